# The environment that every target uses; made by `make setup`, which the others call when they need it.
VENV ?= .venv
PYTHON ?= python3
# Enough for tests and demo. pip takes a CPU build where it is given an index of those; otherwise: make setup TORCH=torch
TORCH ?= torch==2.13.0
JOBS ?= 2

INSTALLED := $(VENV)/.kvfold-installed
BIN := $(VENV)/bin

.PHONY: setup demo test lanes style quality real engines bench dist

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/kvfold demo

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

# What takes minutes: the embedded recipe from conversion to a Hub on this machine, also killed again and again, every
# command of the documents, and the wheel in an environment of its own.
lanes: setup
	$(BIN)/python -m pytest -v tests/lanes/pipeline.py tests/lanes/documented.py tests/lanes/release.py

style: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# A short form of the lane; the whole takes the better part of an hour on two cores, and can be stopped and resumed:
# python -m kvfold.recipes.real.smollm2
real: setup
	$(BIN)/python -m kvfold.recipes.real.smollm2 --only mean --only svd --only mla-192 --calib-windows 16 --max-windows 8

# vLLM and llama.cpp on the CPU, each in an environment of its own in kvfold's cache (2.7 GB); can be stopped and resumed.
engines: setup
	$(BIN)/python -m kvfold.recipes.engines

# What is uploaded, in dist/; see "Release" in CONTRIBUTING.md.
dist: setup
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

bench: setup
	$(BIN)/python -m kvfold.recipes.bench.convert
