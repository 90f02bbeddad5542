# make train      train the example under elastirun with two workers; the first time it sets up .venv, with no more than the example needs
# make quick      while you work: style, types, layers and the tests that need no process, within a minute (TESTS=tests/agent/test_guard.py: these, too)
# make test       every check and test; of tests of many like cases that take long, some of the cases, others each day (TESTS=tests/system: all
#                 of the cases there)
# make test-all   all of the cases
# make test-long  tests that take half a minute and more each
# make test-loaded  the tests alone, while other work takes every processor: no test may ask for what a busy machine cannot keep
#                 (TESTS=tests/system for some of them; takes three times as long)
# make test-executed  the tests of whole jobs once more, with --preload=off; make test-forked: with --preload=torch, also where a script has no
#                 torch (make test does either of them on some days, with json in place of torch)
# make failover   three nodes on this machine: one is killed, one is added; a table of what happened, and a proof that
#                 nothing was lost: the same final weights as without failures, bit by bit
# make nightly    public frameworks under elastirun (accelerate, Lightning, ...), torch's tests of its data-parallel class with ours in its place:
#                 installs them in .nightly and uses the network; small scripts of many kinds as live jobs; hangs of many kinds, and honest
#                 slowness that must not be taken for one. Every part runs; at the end there is a list of those that failed
# make test-torch TORCH=2.6.0  the tests with this version of torch, in an environment of their own (.torch-2.6.0, some gigabytes; uses the
#                 network; TESTS=tests/train for some of them, TESTS=some for the most important ones, 8 minutes: docs/support.md). make nightly
#                 runs all of them with the TORCHES: the oldest, the last but one, the newest
# make gpu        every claim about GPUs, checked on one GPU within nine minutes; without a GPU a dry run on the CPU (docs/gpu.md). It needs no
#                 network: GPU_PYTHON=python3 is a Python with torch (default: that of .venv); GPU_PARTS="ddp steps" some parts, GPU_PARTS=left the rest
# make gpu-wheels download what tests of GPUs need besides torch into wheels/, for a machine without network whose Python is GPU_PYTHON_VERSION=3.12
#                 and whose processors are GPU_ARCH=x86_64 (or aarch64)
# make docs       the documentation as a site with a search and an API reference, in build/site, from an environment of its own (0.2 GB, without
#                 torch; Python 3.11.5 or newer). A broken link is an error
# make lint       ruff and mypy alone
# make clean      remove what was built (.venv, .nightly, .torch-* and the checkpoints in runs/ stay)
#
# PYTHON=python3.12 chooses the interpreter. On Linux pip brings the torch that includes CUDA, some gigabytes; the one for
# CPUs alone is much smaller: PIP_EXTRA_INDEX_URL=<the CPU index that pytorch.org/get-started names> make train

PYTHON ?= python3
BIN := .venv/bin

# A stamp's name changes with what the environment is made from, and is written last: a half-made .venv is never taken for a whole one.
# For the example alone the tools of the tests are left out.
MADE_FROM := $(shell { pwd; cat pyproject.toml constraints.txt; } | sha256sum | cut -c 1-16)
STAMP := .venv/ready-$(MADE_FROM)
EXAMPLE_STAMP := .venv/example-$(MADE_FROM)
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# Two processes for each of two processors: half of the tests wait most of the time. A process runs whole files, so that what the tests of
# a file share is started once.
PYTEST_OPTIONS := -q -n 4 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(PYTEST_OPTIONS)
TESTS :=
DOCS_STAMP := build/docs-venv/ready-$(shell sha256sum < constraints.txt | cut -c 1-16)
DAY = $(shell expr $$(date +%s) / 86400)

# Decisions, which are pure: their tests take a minute together.
QUICK := $(addprefix tests/rendezvous/test_,$(addsuffix .py,codec contact death_notice failures formation liveness polling rules silence split steps sync timing transcripts updates)) \
  $(addprefix tests/agent/test_,$(addsuffix .py,account classify hang_causes job_status step_rates stragglers strikes)) \
  tests/cli/test_parse.py tests/cli/test_resolve.py tests/cli/test_detect.py tests/checkpoint/test_record.py tests/report/test_story.py

# The versions of torch that the tests are run with beside that in constraints.txt; elastirun/train/torch_private.py names the ends of the range.
TORCHES := 2.6.0 2.13.0 2.14.1
TORCH := $(lastword $(TORCHES))
SOME := tests/cli $(addprefix tests/system/test_,$(addsuffix .py,launcher elastic restarts failover checkpoints)) \
  $(addprefix tests/train/test_,$(addsuffix .py,ddp data checkpointer ckpt_dcp drain zero torch_private)) tests/rendezvous/test_stores.py

# The Python of the machine with the GPU: .venv's where there is one.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_PYTHON_VERSION ?= 3.12
GPU_ARCH ?= x86_64
GPU_PARTS :=

.PHONY: train quick test test-all test-long test-loaded test-executed test-forked test-torch mutants failover gpu gpu-wheels nightly docs lint venv clean
.DEFAULT_GOAL := train

train: $(if $(wildcard $(STAMP)),,$(EXAMPLE_STAMP))
	$(BIN)/elastirun --standalone --nproc-per-node=2 examples/train.py

quick: lint
	$(PYTEST) tests/test_layers.py $(QUICK) $(TESTS)

test: lint
	$(if $(TESTS),,TEST_DAY=$(DAY)) $(PYTEST) $(TESTS)

test-all: lint
	$(PYTEST)

test-loaded: venv
	@busy=; trap 'kill $$busy' EXIT; trap 'exit 1' INT TERM; \
	for i in $$(seq $$(nproc)); do (while :; do :; done) & busy="$$busy $$!"; done; \
	$(PYTEST) $(TESTS)

mutants: venv
	$(PYTEST) tests/*/test_mutants.py

test-long: venv
	TEST_LONG=1 $(PYTEST) -m long $(TESTS)

test-executed: venv
	TEST_PRELOAD=off $(PYTEST) $(if $(TESTS),$(TESTS),tests/system)

test-forked: venv
	TEST_PRELOAD=torch $(PYTEST) $(if $(TESTS),$(TESTS),tests/system)

# torch pins some of its own needs, each version others, so those of constraints.txt do not hold here.
test-torch:
	$(PYTHON) -m venv .torch-$(TORCH)
	sed -e '/^# what torch needs/,/^$$/d' -e '/^torch==/d' constraints.txt > .torch-$(TORCH)/constraints.txt
	.torch-$(TORCH)/bin/python -m pip install -q --disable-pip-version-check -c .torch-$(TORCH)/constraints.txt torch==$(TORCH) -e '.[etcd,test]'
	.torch-$(TORCH)/bin/python -m pytest $(PYTEST_OPTIONS) $(if $(filter some,$(TESTS)),$(SOME),$(TESTS))

failover: venv
	$(BIN)/python examples/failover.py

gpu:
	PYTHON="$(GPU_PYTHON)" tests/gpu/run.sh $(if $(GPU_PARTS),--parts $(GPU_PARTS))

# For another Python than this one, so without the constraints, whose markers speak of this one.
gpu-wheels:
	$(PYTHON) -m pip download -q --disable-pip-version-check --only-binary=:all: --no-deps -d wheels \
	  --python-version $(GPU_PYTHON_VERSION) --implementation cp \
	  $(foreach tag,manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014,--platform $(tag)_$(GPU_ARCH)) \
	  click psutil numpy pytest iniconfig packaging pluggy Pygments exceptiongroup tomli typing_extensions
	@du -sh wheels

nightly: venv
	$(PYTHON) -m venv .nightly
	.nightly/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e . \
	  accelerate lightning transformers wandb tensorboard torchdata numpy expecttest
	@failed=; run() { echo "$$*"; "$$@" || failed="$$failed\n  $$*"; }; \
	run .nightly/bin/python -m tests.nightly.frameworks; \
	run env PET_PRELOAD=off .nightly/bin/python -m tests.nightly.frameworks; \
	for part in preload in_place live_scripts upstream; do run .nightly/bin/python -m tests.nightly.$$part; done; \
	for version in $(TORCHES); do run $(MAKE) test-torch TORCH=$$version; done; \
	run $(PYTEST); \
	for part in hang_kinds honest_pauses; do run $(BIN)/python -m tests.system.$$part; done; \
	[ -z "$$failed" ] || { printf "failed:$$failed\n"; exit 1; }

# Not with --quiet, with which --strict finds nothing.
docs: $(DOCS_STAMP)
	@build/docs-venv/bin/python docs/site/pages.py build/docs
	@NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict -f build/docs/mkdocs.yml -d $(CURDIR)/build/site >build/docs/log 2>&1 \
	  || { cat build/docs/log; exit 1; }
	@echo "build/site/index.html; the search needs a server: $(PYTHON) -m http.server --directory build/site"

# ruff formats the signatures.
$(DOCS_STAMP):
	$(PYTHON) -m venv --clear build/docs-venv
	build/docs-venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

lint: venv
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check --quiet .
	$(BIN)/python -m mypy

venv: $(STAMP)

define MAKE_VENV
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || { echo "elastirun needs Python 3.10 or newer as '$(PYTHON)'; choose another one with: make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import venv, ensurepip' \
  || { echo "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
@$(PYTHON) -m venv .venv
endef

# Modules are compiled when they are first imported: the example imports few of torch's.
$(EXAMPLE_STAMP):
	@echo "setting up .venv, once: torch (1 of 3)"
	$(MAKE_VENV)
	@$(INSTALL) --no-compile torch
	@echo "setting up .venv: scikit-learn (2 of 3)"
	@$(INSTALL) --no-compile scikit-learn numpy
	@echo "setting up .venv: elastirun (3 of 3)"
	@$(INSTALL) --no-compile -e .
	@rm -f .venv/example-* && touch $@

$(STAMP):
	@echo "setting up .venv, once: torch, elastirun and the tools of the tests; some minutes"
	$(MAKE_VENV)
	@$(INSTALL) -e '.[etcd,test]'
	@rm -f .venv/ready-* && touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . \( -path ./.venv -o -path ./.nightly -o -path './.torch-*' \) -prune -o -name __pycache__ -type d -exec rm -rf {} +
