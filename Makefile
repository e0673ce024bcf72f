# `make train` and `make test` set everything up by themselves; `make help` lists the targets.
#
#   make train ARGS="--steps 50"          options of `piper train`
#   make test ARGS="-k split -x"          options of pytest
#   PYTHON=/path/to/python make train     use that environment as it is, install nothing

VENV := .venv
STAMP := $(VENV)/.installed
INSTALL := -c constraints.txt -e '.[test]'
# The files of tests are shared out over so many processes; JOBS=0 runs all in one.
JOBS ?= 2
SHARED_OUT := -n $(JOBS) --dist loadfile

ifdef PYTHON
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(STAMP)
endif

# A candidate counts only if it runs: version managers leave names on the path that do not.
CANDIDATES := python3.13 python3.12 python3.11 python3
IS_USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: help env train test test-slow test-torch test-models fuzz fuzz-train soak bench bench-counts \
	bench-pipeline \
	bench-zero bench-experts bench-plan bench-predict bench-init bench-state bench-launch \
	lint format docs clean

help:
	@echo "make env     create $(VENV) with everything that Piper and its tests need"
	@echo "make train   train the example model: two pipeline ranks, real text (ARGS=... to piper train)"
	@echo "make test    lint, then the tests (ARGS=... to pytest)"
	@echo "make test-slow   the wide sweeps"
	@echo "make test-torch TORCH=2.11.0   the tests with another torch, in an environment of its own"
	@echo "make test-models   the models of examples/: of transformers and peft, and of kinds that users have"
	@echo "make fuzz    random jobs and wrong programs (ARGS='--plans 1000 --seed 7')"
	@echo "make fuzz-train   random trainings beside one process (ARGS='--trainings 1000 --seed 7')"
	@echo "make soak    a training that fails in every way, again and again (ARGS='--tries 2'; root for links and disks)"
	@echo "make bench   everything below beside its peers, in hours: tables, files, pictures (ARGS='plan --pairs 5')"
	@echo "make bench-counts   what steps do, counted, beside the committed counts (ARGS=--write writes these)"
	@echo "make bench-pipeline   time, memory and counts beside torch's pipelining (ARGS='--only counts,host')"
	@echo "make bench-zero   time, memory and counts of ZeRO beside torch's FSDP2 and DDP (root for all of it)"
	@echo "make bench-experts   exchanges hidden, time and memory of experts over slow links (needs root)"
	@echo "make bench-plan   time of the proof, the simulation and planning by size, and for 4,096 ranks"
	@echo "make bench-predict   predicted step times beside measured ones (needs an idle machine)"
	@echo "make bench-init   memory of building a model of a billion parameters under deferred_init"
	@echo "make bench-state   what steps keep for the backward beside the plan; what saving costs"
	@echo "make bench-launch   starting ranks by engine, steps under each, planning one of many ranks"
	@echo "make lint    ruff check, ruff format --check, mypy --strict"
	@echo "make format  rewrite the files as ruff wants them"
	@echo "make docs    write docs/schedules.md and the documents' pictures again"
	@echo "make clean   remove $(VENV), caches and build output; runs/ stays"

env: $(READY)

$(STAMP): setup.py pyproject.toml constraints.txt
	@found=; for python in $(CANDIDATES); do \
		if $$python -c '$(IS_USABLE)' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "Piper needs Python 3.11 or newer with the venv module; none of these is one: $(CANDIDATES)"; \
		echo "hint: install it, or name an environment that has torch: PYTHON=/path/to/python make ..."; \
		exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$($$found --version) (once; torch is a large download)"; \
	$$found -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(INSTALL)
	@touch $@

train: $(READY)
	@$(PY) -m piper_dynamo train $(if $(OUT),--out $(OUT)) $(ARGS)

test: lint
	$(PY) -m pytest -m "not slow" $(SHARED_OUT) $(ARGS)

# Another torch than the tested one, in an environment of its own: make test-torch TORCH=2.11.0
TORCH_VENV = .venv-torch-$(TORCH)

test-torch:
	@test -n "$(TORCH)" || { echo "name a version: make test-torch TORCH=2.11.0"; exit 2; }
	@$(MAKE) --no-print-directory env PYTHON= VENV=$(TORCH_VENV) \
		INSTALL="'torch==$(TORCH)' -e '.[test]'"
	$(TORCH_VENV)/bin/python -m pytest -m "not slow" $(SHARED_OUT) $(ARGS)

# What users' models need beside Piper is large, so it has an environment of its own, too.
MODELS_VENV = .venv-models
MODELS_PY = $(if $(PYTHON),$(PYTHON),$(MODELS_VENV)/bin/python)

test-models:
	@$(if $(PYTHON),:,$(MAKE) --no-print-directory env VENV=$(MODELS_VENV) \
		INSTALL="-c constraints.txt -e '.[test,models]'")
	@for one in transformers peft; do \
		$(MODELS_PY) -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$$one'))" || { \
			echo "$(MODELS_PY) has no $$one, so that its models would be left out"; \
			echo "hint: install the extra 'models' there, or leave out PYTHON="; \
			exit 2; \
		}; \
	done
	$(MODELS_PY) -m pytest -n $(JOBS) --dist worksteal tests/test_examples.py tests/test_zoo.py $(ARGS)

test-slow: $(READY)
	$(PY) -m pytest -m slow $(SHARED_OUT) $(ARGS)

fuzz: $(READY)
	$(PY) -m tests.fuzz $(ARGS)

fuzz-train: $(READY)
	$(PY) -m tests.fuzz_train $(ARGS)

soak: $(READY)
	$(PY) -m tests.soak $(ARGS)

bench: $(READY)
	$(PY) -m benchmarks.suites $(ARGS)

bench-counts: $(READY)
	$(PY) -m benchmarks.counts $(ARGS)

bench-pipeline: $(READY)
	$(PY) -m benchmarks.pipeline $(ARGS)

bench-zero: $(READY)
	$(PY) -m benchmarks.zero $(ARGS)

bench-experts: $(READY)
	$(PY) -m benchmarks.experts $(ARGS)

bench-plan: $(READY)
	$(PY) -m benchmarks.plan $(ARGS)

bench-predict: $(READY)
	$(PY) -m benchmarks.predict $(ARGS)

bench-init: $(READY)
	$(PY) -m benchmarks.init $(ARGS)

bench-state: $(READY)
	$(PY) -m benchmarks.state $(ARGS)

bench-launch: $(READY)
	$(PY) -m benchmarks.launch $(ARGS)

lint: $(READY)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy --strict -p piper_dynamo

format: $(READY)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: $(READY)
	$(PY) -m docs.build

clean:
	rm -rf $(VENV) build dist piper_dynamo.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
