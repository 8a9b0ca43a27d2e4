# cbmir: `make` lists the targets.

PYTHON ?= python3
PORT ?= 7860
NIH ?=
BIN := .venv/bin
CBMIR := $(BIN)/cbmir

.PHONY: help venv constraints lint test-tools test test-all coverage docs fuzz attack soak demo demo-steps clean-demo FORCE

help:  ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  make demo NIH=DIR   the same on a folder of NIH ChestX-ray14 (images, Data_Entry_2017*.csv, splits.csv if any)'
	@echo '  make demo PORT=8080, make test PYTHON=python3.12'

# --- set-up: one .venv, into which `make demo` installs what it needs and `make venv` everything. Repeated only if
# pyproject.toml or constraints.txt change. Uses uv if it is installed, which is faster than pip. ---------------------

UV := $(shell command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install) -c constraints.txt
# PyTorch builds without CUDA, which PyPI does not have for Linux on x86-64. Empty: use PyPI's.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

venv: .venv/installed  ## set up .venv with everything

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "cbmir needs Python 3.11 to 3.13, found $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "$(PYTHON) cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(torch)
	$(INSTALL) -e ".[dev]"
	@touch $@ .venv/demo

.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	$(call step,1,install the packages,3 min,9 min)
	$(torch)
	$(INSTALL) -e ".[train,export,cpu,dicom,demo]"
	@touch $@

ifeq ($(shell uname -sm),Linux x86_64)
define torch
	@test -z "$(TORCH_INDEX)" || $(BIN)/python -c 'import torch' 2> /dev/null || \
		PIP_RETRIES=1 UV_HTTP_RETRIES=1 $(INSTALL) --no-deps --index-url "$(TORCH_INDEX)" torch torchvision || \
		echo "$(TORCH_INDEX) has no such PyTorch or cannot be reached; PyPI's takes 4 GB more, for CUDA." >&2
endef
endif

constraints: venv  ## update constraints.txt to the newest versions that pyproject.toml allows
	$(BIN)/python -m pip install --upgrade --upgrade-strategy eager -e ".[dev]"
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt.part && mv constraints.txt.part constraints.txt

# --- checks ------------------------------------------------------------------------------------------------------

# There is one test process per processor, so more than one thread each would only compete.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0

lint: .venv/installed  ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# axe-core, a browser and a PACS: installed if possible; otherwise the tests that need them are skipped.
test-tools: .venv/installed
	@$(BIN)/python tests/helpers/set_up.py

test: lint test-tools  ## lint, then all tests but the slow ones
	$(PYTEST)

test-all: lint test-tools  ## what CI runs: lint, then the slow tests too
	$(PYTEST) -m 'not release'

coverage: test-tools  ## the same tests, a third slower, with at least 90% of lines covered
	$(PYTEST) -m 'not release' --cov --cov-report=term --cov-fail-under=90

docs: .venv/installed  ## build the documentation into site/; no network, no warnings
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

FUZZ_SECONDS ?= 600

fuzz: .venv/installed  ## look for files that crash or stall the readers, or make their memory grow (FUZZ_SECONDS=600 for each)
	nice -n 19 $(BIN)/python tests/fuzzing/fuzz.py --seconds $(FUZZ_SECONDS)

attack: .venv/installed  ## attack commands, files and services, and write the results into docs/security.md
	$(BIN)/python tests/attack/attack.py --write docs/security.md

SOAK_SECONDS ?= 3600

soak: .venv/installed  ## hold serve and the PACS node under normal and hostile load (SOAK_SECONDS=3600)
	test -d soak/phantoms || $(CBMIR) data phantom -n 200 --seed 0 -o soak/phantoms
	test -d soak/gallery || $(CBMIR) index build starter soak/phantoms/manifest.csv -o soak/gallery
	$(BIN)/python tests/attack/soak.py starter soak/gallery soak/phantoms/images --seconds $(SOAK_SECONDS) -o soak/soak.json

# --- demo: each file is a step that runs once, so `make demo` continues after an interruption. Times are for two cores
# and drawn X-rays. ---------------------------------------------------------------------------------------------------

# $(call step,NUMBER,WHAT,HOW LONG,TIME TO THE PAGE)
step = @printf '\nStep $1 of 6: $2$(if $(NIH),,, about $3; the page opens in about $4)\n'
# Open a browser only if there is a display.
OPEN := $(if $(CI),,$(if $(DISPLAY)$(WAYLAND_DISPLAY)$(filter Darwin,$(shell uname -s)),--open))

ifeq ($(strip $(NIH)),)
DATA := demo-data
MANIFEST := $(DATA)/phantoms/manifest.csv
TRAIN ?= --encoder resnet18 --image-size 128 --epochs 9 --lr 5e-4 --augment crop

$(MANIFEST): | .venv/demo
	$(call step,2,draw 800 X-rays,20 s,6 min)
	$(CBMIR) data phantom -n 800 --seed 0 -o $(@D)
else
DATA := demo-data-nih
MANIFEST := $(DATA)/manifest.csv
TRAIN ?= --encoder resnet18 --image-size 128 --epochs 8 --lr 5e-4
ENTRIES := $(firstword $(wildcard $(NIH)/Data_Entry_2017*.csv))
SPLITS := $(wildcard $(NIH)/splits.csv)

$(DATA)/source.txt: FORCE
	@test -n "$(ENTRIES)" || { echo "NIH=$(NIH): expected Data_Entry_2017_v2020.csv in this folder" >&2; exit 1; }
	@mkdir -p $(DATA)
	@echo "$(abspath $(NIH))" | cmp -s - $@ || ! test -e $@ || \
		{ echo "$(DATA) was made from $$(cat $@); 'make clean-demo' first" >&2; exit 1; }
	@test -e $@ || echo "$(abspath $(NIH))" > $@

$(MANIFEST): $(DATA)/source.txt | .venv/demo
	$(call step,2,read the tables of NIH ChestX-ray14)
	$(CBMIR) data nih --images "$(NIH)" --entries "$(ENTRIES)" $(if $(SPLITS),--splits "$(SPLITS)") --missing skip -o $@
endif

$(DATA)/run/card.json: $(MANIFEST)
	$(call step,3,train a model,4 min,6 min)
	$(CBMIR) train $(MANIFEST) -o $(@D) $(TRAIN) --resume

$(DATA)/evaluation/per_query.csv: $(DATA)/run/card.json
	$(call step,4,measure the model,20 s,2 min)
	$(CBMIR) evaluate $(DATA)/run $(MANIFEST) -o $(@D)

$(DATA)/model.fp16.onnx: $(DATA)/run/card.json
	$(call step,5,export the model to ONNX,1 min,90 s)
	$(CBMIR) export $(DATA)/run -o $(DATA)/model.onnx --fp16

$(DATA)/gallery/current: $(DATA)/model.fp16.onnx
	$(call step,6,build the gallery,20 s,30 s)
	$(CBMIR) index build $(DATA)/model.onnx $(MANIFEST) -o $(@D)

$(DATA)/gallery/map.npz: $(DATA)/gallery/current
	$(CBMIR) index map $(@D)

demo-steps: $(DATA)/evaluation/per_query.csv $(DATA)/gallery/map.npz  ## everything for the demo, without the page

demo: demo-steps  ## from synthetic X-rays to a page in the browser: data, training, evaluation, export, gallery
	$(CBMIR) demo $(DATA)/model.onnx $(DATA)/gallery --port $(PORT) $(OPEN)

clean-demo:  ## delete what `make demo` made
	rm -rf demo-data demo-data-nih
