# SPDX-License-Identifier: MIT
# Needs python3 (3.11 to 3.14) and the network to PyPI; everything else is fetched into .venv*.
#
#   make test [KERNEL=fa1_forward] [PYTEST_ARGS=...]   all tests that need no GPU
#   make test-gpu [PYTHON=python3] [GPU_JOBS=auto]     all tests, with an interpreter as it is
#                                                      (PYTEST_ARGS="-m 'not slow'": without long ones)
#   make demo                                          denoise a photograph, on a GPU if there is one
#   make lint | format                                 check, or mend, the form of the sources
#   make compile                                       build every kernel for every architecture
#                                                      (make test: one of a family, and for some seconds
#                                                      what changed; CUPYFLASH_COMPILE_SECONDS)
#   make sanitize [PYTHON=python3]                     GPU tests under compute-sanitizer
#   make bench | profile [KERNEL=...] [PYTHON=python3] time the kernels on a GPU, or watch one by ncu
#                                                      (BENCH_ARGS="--grid paper --rows head_dim=64")
#   make sass KERNEL=forward_sm90 [SPEC=...]           what a specialisation's instructions are
#                                                      (SPEC="element=float16 head_dim=64")
#   make install | clean | clean-cache
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# The first interpreter that runs (a shim may not), is of a supported version and can make a venv.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
	2>/dev/null && { echo $$p; break; }; done)
JOBS ?= 2
KERNEL ?=
PYTEST_ARGS ?=
# Other NVRTC versions that users have; their register counts differ from the newest one's.
NVRTC ?= 13.0 12.9

VENV := .venv
PY := $(VENV)/bin/python
RUFF := $(VENV)/bin/ruff
RUFF_SETTINGS := --isolated --target-version py311 --line-length 100
# E741: l and O are the paper's symbols.
RUFF_RULES := --select E,F,W,I,UP,B,SIM,PT,RUF --ignore E741
CXX_SOURCES = $(shell find kernels tests \
	-name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.hpp' -o -name '*.cpp')

.PHONY: install lint format test test-gpu demo compile sanitize bench profile sass clean clean-cache system

define new_venv
@test -n "$(PYTHON)" || { echo "make: no Python 3.11 to 3.14 with the venv module was found;" \
	"install one (Debian: apt-get install python3 python3-venv) or name it: make PYTHON=..." >&2; exit 1; }
$(PYTHON) -m venv --clear $(@D)
$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES)
touch $@
endef

# A stamp older than the metadata makes a new environment: what was dropped there goes here too.
$(VENV)/stamp: PACKAGES = -e '.[test,lint,demo]'
$(VENV)/stamp: setup.cfg pyproject.toml
	$(new_venv)

install: $(VENV)/stamp

lint: $(VENV)/stamp
	$(RUFF) check $(RUFF_SETTINGS) $(RUFF_RULES) .
	$(RUFF) format $(RUFF_SETTINGS) --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	! grep -nE '.{101}' $(CXX_SOURCES)  # clang-format leaves comments alone

format: $(VENV)/stamp
	$(RUFF) check $(RUFF_SETTINGS) $(RUFF_RULES) --fix .
	$(RUFF) format $(RUFF_SETTINGS) .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

# Kernels run on the CPU need g++ and Boost.Context; without them those tests skip, or fail where
# CUPYFLASH_REQUIRE_HOSTCUDA is set.
system:
	@printf '#include <boost/context/detail/fcontext.hpp>\n' | g++ -E -x c++ - >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			g++ libboost-context-dev; \
	else \
		echo "make: running kernels on the CPU needs g++ and Boost.Context:" >&2; \
		echo "    sudo apt-get install g++ libboost-context-dev" >&2; \
	fi

test: $(VENV)/stamp system
	CUPYFLASH_TEST_KERNEL='$(KERNEL)' $(PY) -m pytest -n $(JOBS) --dist worksteal -m 'not gpu' $(PYTEST_ARGS)

# No environment is made and nothing is fetched: the interpreter's own packages are what is tested,
# by GPU_JOBS processes where it has pytest-xdist. Most of the time goes into building kernels.
GPU_JOBS ?= auto
test-gpu: PARALLEL = $(shell $(PYTHON) -c 'import xdist' 2>/dev/null && echo '-n $(GPU_JOBS) --dist worksteal')
test-gpu:
	CUPYFLASH_TEST_KERNEL='$(KERNEL)' PYTHONPATH='$(CURDIR)' $(or $(PYTHON),python3) -m pytest $(PARALLEL) $(PYTEST_ARGS)

# Errors of API calls are left out: cuda-bindings asks the driver for functions that it may not have.
sanitize:
	status=0; for tool in memcheck racecheck; do \
		CUPYFLASH_TEST_KERNEL='$(KERNEL)' PYTHONPATH='$(CURDIR)' \
		compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 9 --target-processes all \
			$(or $(PYTHON),python3) -m pytest -m 'gpu and not slow' $(PYTEST_ARGS) || status=1; \
	done; exit $$status

# CUDA 13 came with driver 580; older drivers take CUDA 12.
DRIVER = $(shell sed -n 's/.*Kernel Module[^0-9]*\([0-9]*\)\..*/\1/p' /proc/driver/nvidia/version 2>/dev/null \
	|| true)
GPU_EXTRA = $(if $(DRIVER),$(shell [ $(DRIVER) -ge 580 ] && echo ,cuda13 || echo ,cuda12))

.venv-demo/stamp: PACKAGES = -e '.[demo$(GPU_EXTRA)]'
.venv-demo/stamp: setup.cfg pyproject.toml
	$(new_venv)

demo: .venv-demo/stamp
	.venv-demo/bin/python -m cupyflash demo

.venv-nvrtc-%/stamp: PACKAGES = -e . 'cuda-bindings==$(basename $*).*' 'cuda-toolkit[cudart,nvrtc]==$*.*'
.venv-nvrtc-%/stamp: setup.cfg pyproject.toml
	$(new_venv)

compile: $(VENV)/stamp $(NVRTC:%=.venv-nvrtc-%/stamp)
	status=0; for venv in $(VENV) $(NVRTC:%=.venv-nvrtc-%); do \
		$$venv/bin/python tests/compile_matrix.py --jobs $(JOBS) $(if $(KERNEL),--kernel $(KERNEL)) \
			|| status=1; \
	done; exit $$status

# With the interpreter's own packages, as test-gpu.
BENCH_ARGS ?=
BENCH = PYTHONPATH='$(CURDIR)' $(1) $(or $(PYTHON),python3) -m cupyflash bench $(if $(KERNEL),--kernel $(KERNEL))
bench:
	$(call BENCH) $(BENCH_ARGS)

# The second launch, so that none of it is the first one's.
profile:
	@command -v ncu >/dev/null || { echo "make: ncu is missing; it comes with the CUDA toolkit, or as" \
		"Nsight Compute" >&2; exit 1; }
	$(call BENCH,ncu --set full --kernel-name 'regex:forward' --launch-skip 1 --launch-count 1) \
		--against --rounds 1 $(BENCH_ARGS)

sass: $(VENV)/stamp
	@test -n "$(KERNEL)" || { echo "make: name a kernel: make sass KERNEL=forward_sm90" >&2; exit 1; }
	@$(PY) tests/sass.py $(KERNEL) $(SPEC)

# Any interpreter with numpy will do; the folder is the same for all.
clean-cache:
	PYTHONPATH='$(CURDIR)' $(or $(wildcard $(PY)),$(PYTHON),python3) -c \
		'from cupyflash import clear_cache; clear_cache()'

clean:
	rm -rf .venv .venv-demo .venv-nvrtc-* build dist *.egg-info .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
