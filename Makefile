PYTHON ?= python3
PIP_ARGS ?=
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test clean
.DELETE_ON_ERROR:

demo: runs/demo/report/summary/summary.md  ## practice checkpoint, every stage, summary with plots
	@echo "summary: $<"

test: .venv/ready  ## all tests
	$(PY) -m pytest

.venv/ready: requirements-cpu.txt pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet $(PIP_ARGS) -r requirements-cpu.txt
	@touch $@

runs/practice/practice.yaml: | .venv/ready
	$(PY) -m recipe.practice --output runs/practice

runs/demo/plan.json: | runs/practice/practice.yaml
	$(PY) -m experiments.prepare --model runs/practice/checkpoint --retention-run runs/practice/retention-run \
		--config runs/practice/practice.yaml --output runs/demo

runs/demo/report/summary/summary.md: | runs/demo/plan.json
	$(PY) -m tools.driver run --local --resume --plan runs/demo/plan.json

clean:  ## forget the practice checkpoint and the demo, keep .venv
	rm -rf runs/practice runs/demo
