PYTHON ?= python3
PIP_ARGS ?=
PY := .venv/bin/python
# Stages of a tiny model: a second thread only spins.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test clean
.DELETE_ON_ERROR:

demo: runs/demo/report/summary/summary.md  ## practice checkpoint, every stage, summary with plots
	@echo "summary: $<"

test: .venv-det35/ready runs/practice/practice.yaml  ## all tests, with the demo's practice checkpoint
	PRACTICE=runs/practice DET35_PYTHON=$(CURDIR)/.venv-det35/bin/python DET38_PYTHON=$(CURDIR)/$(PY) $(PY) -m pytest -n 2 --dist loadfile

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

runs/demo/plan.json: | runs/practice/practice.yaml
	$(PY) -m experiments.prepare --model runs/practice/checkpoint --retention-baseline runs/practice/retention-baseline \
		--config runs/practice/practice.yaml --output runs/demo

runs/demo/report/summary/summary.md: | runs/demo/plan.json
	$(PY) -m tools.driver run --local --resume --plan runs/demo/plan.json

clean:  ## forget the practice checkpoint and the demo, keep .venv
	rm -rf runs/practice runs/demo
