PYTHON ?= python3
PIP_ARGS ?=
PY := .venv/bin/python
# Stages of a tiny model: a second thread only spins.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

# Checkpoint, retention baseline and settings of the demo and of the tests.
PRACTICE ?= recipe/practice/shipped
DEMO := runs/demo$(addprefix -,$(notdir $(filter-out recipe/practice/shipped,$(PRACTICE))))

.PHONY: demo practice test clean
.DELETE_ON_ERROR:

demo: $(DEMO)/report/summary/summary.md  ## every stage with the practice checkpoint, summary with plots
	@echo "summary: $<"

practice: runs/practice/practice.yaml  ## train the practice checkpoint again
	@echo "trained: runs/practice; try it with: make demo PRACTICE=runs/practice"

test: .venv-det35/ready  ## all tests
	# in the order of their names: by count, the files with few and long tests would come last, on one process;
	# three processes on two cores, since a test waits for stage processes that are not always at work
	DET35_PYTHON=$(CURDIR)/.venv-det35/bin/python DET38_PYTHON=$(CURDIR)/$(PY) $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.venv/ready: requirements-cpu.txt pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet $(PIP_ARGS) -r requirements-cpu.txt
	@touch $@

# The cluster's harness over the packages of .venv, before which its own comes.
.venv-det35/ready: .venv/ready
	$(PY) -m venv --without-pip .venv-det35
	$(PY) -m pip --python .venv-det35/bin/python install --quiet $(PIP_ARGS) --no-deps determined==0.35.0
	echo $(CURDIR)/.venv/lib/python*/site-packages > "$$(echo .venv-det35/lib/python*/site-packages)/packages.pth"
	@touch $@

runs/practice/practice.yaml: | .venv/ready
	OMP_NUM_THREADS=2 $(PY) -m recipe.practice --output runs/practice

$(DEMO)/plan.json: | .venv/ready $(PRACTICE)/practice.yaml
	$(PY) -m experiments.prepare --model $(PRACTICE)/checkpoint --retention-baseline $(PRACTICE)/retention-baseline \
		--config $(PRACTICE)/practice.yaml --output $(DEMO)

$(DEMO)/report/summary/summary.md: | $(DEMO)/plan.json
	$(PY) -m tools.driver run --local --resume --plan $(DEMO)/plan.json

clean:  ## forget the demos and the checkpoint of make practice, keep .venv
	rm -rf runs/practice runs/demo runs/demo-practice
