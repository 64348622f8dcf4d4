# Every target sets itself up in .venv first; PYTHON=... picks another interpreter (3.11 or newer).

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check bench chaos fuzz soak gpu clean lint

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | sed 's/^/  make /' | expand -t 16

demo: $(READY) ## Two vLLM engines share one cache; ARGS="--help" tells more
	$(BIN)/python demo/sharing.py $(ARGS)

test: lint ## Everything CI runs: lint, types, size budget, all tests
	$(BIN)/pytest tests

check: lint ## The same with unit tests only; under a minute
	$(BIN)/pytest tests/unit -q

bench: $(READY) ## Measure the control path, the copy path and tiers
	$(BIN)/kvcellar bench control
	$(BIN)/kvcellar bench copy
	$(BIN)/kvcellar bench tiers

chaos: $(READY) ## Kill and stall things at random; ARGS="..." is passed on
	$(BIN)/python tests/chaos/run.py $(ARGS)

fuzz: $(READY) ## Feed the server broken messages; ARGS="..." is passed on
	$(BIN)/python tests/fuzz/run.py $(ARGS)

soak: $(READY) ## Two real vLLM engines for hundreds of requests; ARGS="..." is passed on
	$(BIN)/python -m tests.vllm.soak $(ARGS)

# The calls that make the published figures are in docs/gpu.md, "Repeat it".
gpu: ## On a GPU host that has vLLM: copies and real engines, checked; PYTHON=... picks vLLM's interpreter
	@$(PYTHON) -c 'import torch, triton, cuda.bindings' 2>/dev/null || { echo "$(PYTHON) has no torch, Triton or cuda-bindings; PYTHON=... picks vLLM's interpreter"; exit 1; }
	PYTHONPATH=src:.:$$PYTHONPATH $(PYTHON) -m bench.gpu.check
	PYTHONPATH=src:.:$$PYTHONPATH $(PYTHON) -m bench.gpu.copy
	PYTHONPATH=src:.:$$PYTHONPATH $(PYTHON) -m bench.gpu.beside
	PYTHONPATH=src:.:$$PYTHONPATH $(PYTHON) -m bench.gpu.prove tokens flip pair --model llama8b mla hybrid --out build/gpu/prove.json

clean: ## Remove .venv, caches and build output
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/size.py

$(READY): pyproject.toml
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) is missing or cannot make a venv: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)
