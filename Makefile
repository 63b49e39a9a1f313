# Every target makes what it needs: a .venv with the pinned dependencies and Meshwright in it, once. The demo needs no
# more; tests, checks and documentation add theirs to it.
# PYTHON=… names the Python to make it with; DEMO_ARGS='train.steps=30' adds words to the demo's command;
# TESTERS=4 runs the tests of four files at once, each with processes of its own; GPU_ARGS are words of bench/gpu.

VENV := .venv
READY := $(VENV)/.ready
READY_DEV := $(READY)-dev
PY := $(VENV)/bin/python
TESTERS ?= 2
# Without .pyc files every process of a test would compile all of src again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(TESTERS) --dist loadfile
override DEMO_OUT := runs/demo# removed before each demo, so it is this folder and no other

.PHONY: help demo test test-slow gpu lint docs setup setup-dev clean redo-setup
help:
	@echo "make demo       train a small Llama on 2 processes (2 minutes or so), and verify its checkpoint"
	@echo "make test       all tests but the slow ones"
	@echo "make test-slow  the end-to-end tests that take tens of seconds"
	@echo "make gpu        all that a GPU must show, into bench/results/gpu (8 minutes; GPU_ARGS=--dry: on the CPU)"
	@echo "make lint       ruff, and mypy on src"
	@echo "make docs       the documentation with its reference, as a site in build/docs; a broken link is an error"
	@echo "make setup      only the .venv that the demo makes by itself; make setup-dev: the one of the others"
	@echo "make clean      remove .venv, caches and the demo's run folder; other runs stay"

demo: $(READY)
	@rm -rf $(DEMO_OUT)
	@$(PY) -m meshwright run llama-tiny mesh.dp_shard=2 $(DEMO_ARGS) --out $(DEMO_OUT)
	@$(PY) -m meshwright checkpoint verify $(DEMO_OUT)

test: $(READY_DEV)
	@echo "test: all tests but the slow ones (5 to 10 minutes on 2 cores) …"
	@$(PYTEST)

test-slow: $(READY_DEV)
	@echo "test-slow: end-to-end tests (half an hour or more on 2 cores) …"
	@$(PYTEST) -m slow

# The environment needs a CUDA build of PyTorch. Without one, python bench/gpu takes what the machine has.
gpu: $(READY_DEV)
	@$(PY) bench/gpu $(GPU_ARGS)

lint: $(READY_DEV)
	@echo "lint: ruff, then mypy on src (a minute the first time) …"
	@$(PY) -m ruff check -q .
	@$(PY) -m mypy

docs: $(READY_DEV)
	@echo "docs: the site (a minute or so) …"
	@$(PY) -m sphinx -q -E -W --keep-going -j auto -b html -d build/doctrees docs build/docs
	@echo "docs: build/docs/index.html"

setup: $(READY)
setup-dev: $(READY_DEV)

# A stamp holds the path of this folder: a .venv that came along with a copy points at the original.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
$(READY): redo-setup
else ifeq ($(wildcard $(PY)),)
$(READY): redo-setup
endif
$(READY): pyproject.toml bench/pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" .ci/setup $(VENV) "$(CURDIR)"
$(READY_DEV): $(READY)
	@PYTHON="$(PYTHON)" .ci/setup $(VENV) "$(CURDIR)" dev
redo-setup:

clean:
	rm -rf $(VENV) $(DEMO_OUT) build docs/reference docs/project src/*.egg-info bench/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src bench tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
