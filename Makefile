PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := all-cpu,dev
CONSTRAINTS := constraints/cpu.txt

.DEFAULT_GOAL := help
.PHONY: help install install-vllm run test test-recipes test-containers test-faults images bench gpu-check lint types pins clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## make .venv with everything the CPU run and the tests need

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) tools/install.sh
	PYTHON=$(PYTHON) sh tools/install.sh $(VENV) $(CONSTRAINTS) '$(EXTRAS)'
	@touch $@

install-vllm: $(VENV)/.installed-vllm ## add vLLM's CPU build to .venv

$(VENV)/.installed-vllm: $(VENV)/.installed tools/install.sh
	sh tools/install.sh $(VENV) $(CONSTRAINTS) vllm
	@touch $@

run: install ## set up, then run the rounds of params.yaml on a real 135M model
	$(BIN)/rlpipe run

test: install-vllm ## set up, then run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 30

test-recipes: install-vllm ## whole runs, servers and trainings in processes of their own
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 10 -m recipes

test-containers: install ## build the CPU images and run two rounds in containers
	PYTHON=$(BIN)/python tests/containers/run.sh

test-faults: install ## kill runs at POINTS places (64), drawn by DRAW, and compare what the next run makes of each
	$(BIN)/python -m tests.faults --points $(or $(POINTS),64) --draw '$(DRAW)'

images: ## build the image of every component; BASE=gpu|cpu PREFIX=registry/folder TAG=version EXTRA=folder of own rewards
	BASE='$(BASE)' PREFIX='$(PREFIX)' TAG='$(TAG)' EXTRA='$(EXTRA)' tools/images.sh

bench: $(VENV)/.installed-bench ## side by side with TRL, transformers and vLLM into benchmarks/results.md; 3 hours on 2 quiet cores
	for name in rollout update memory ranks time_to_reward; do $(BIN)/python benchmarks/$$name.py --results benchmarks/results.md || exit 1; done

$(VENV)/.installed-bench: $(VENV)/.installed-vllm tools/install.sh
	sh tools/install.sh $(VENV) $(CONSTRAINTS) bench
	@touch $@

gpu-check: ## one round with the engines and backends that .venv or else PYTHON has, on a GPU or CPUs, in 8 minutes
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu_check.py

lint: install ## check style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: install ## check types
	$(BIN)/mypy

pins: install ## show that the pins resolve for Python 3.11 and 3.12
	sh tools/pins.sh $(BIN)/uv $(CONSTRAINTS)

clean: ## remove what runs made here, not .venv and not the models
	rm -rf rounds reports tasks mlflow.db .rlpipe dvc.lock
