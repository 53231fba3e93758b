# Every target does its own set-up in .venv first; that is quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CORE := $(VENV)/.core
MODELS := $(VENV)/.models
READY := $(VENV)/.ready
WHEEL := dist/.made
WORKERS ?= 2

.PHONY: setup browser demo demo-lm test test-tools test-long test-minimum test-newest package mutants lint format bench docs audit lock clean

setup: $(READY)

$(CORE): pyproject.toml constraints.txt  ## what a user installs: the library alone
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) pip
	$(BIN)/python scripts/announce_torch.py -c constraints.txt
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(MODELS): $(CORE)  ## and Hugging Face language models
	$(INSTALL) -e '.[hf]'
	touch $@

$(READY): $(MODELS)  ## and what developers need
	$(INSTALL) -e '.[hf,ray]' --group dev --group bench --group browser
	touch $@

$(WHEEL): $(READY) README.md MANIFEST.in $(shell git ls-files src 2>/dev/null)  ## `python -m build`
	$(INSTALL) --group package
	rm -rf dist && $(BIN)/python -m build --quiet --outdir dist && touch $@

browser:  ## the browser that tests open the report in; without it they are skipped
	command -v chromium chromedriver >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }

demo: $(CORE)  ## the paper's first study on one seed: sentences, report, handles and figures in runs/demo
	$(BIN)/plot-ot run heq --seeds 1 --first-seed 1 --sampler balanced --out runs/demo

demo-lm: $(MODELS)  ## where does a small language model keep the right line of a question? report in runs/demo-lm
	$(BIN)/plot-ot localize examples/pointer.py --model tiny --out runs/demo-lm

test: setup  ## one process per core of a small machine; a file's tests share one, and with it their fixtures
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

TOOLS := .venv-tools
test-tools: setup  ## with the real TransformerLens and nnsight, in an environment on top of the usual one
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > $$(ls -d $(TOOLS)/lib/python3*/site-packages)/usual.pth
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check --no-deps transformer_lens==4.3.0 nnsight==0.8.1 \
	  greenlet cloudpickle zstandard httpx httpcore beartype einops fancy-einsum typeguard transformers-stream-generator
	OMP_NUM_THREADS=1 PYTHONPATH=src $(TOOLS)/bin/python -m pytest tests/test_transformer_lens.py tests/test_nnsight.py

test-long: setup  ## campaigns: plants, kills, fuzzing, soak (PLOT_OT_SOAK_MINUTES, 30 by default)
	$(INSTALL) --group fuzz
	$(BIN)/python -m pytest -m long

test-minimum: $(WHEEL)  ## the wheel with the oldest versions that pyproject.toml allows, in an environment of its own
	bash scripts/test_installed.sh minimum $(PYTHON)

test-newest: $(WHEEL)  ## the wheel with the newest versions that the package index has
	bash scripts/test_installed.sh newest $(PYTHON)

package: $(WHEEL)  ## the wheel and the source distribution, checked: small, complete, with a description that renders
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/check_package.py dist

mutants: setup  ## changes one expression at a time and asks whether the tests notice: docs/results/mutants.md
	$(INSTALL) --group mutants
	nice $(BIN)/python benchmarks/mutants.py

lint: setup
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

bench: setup  ## the studies and side-by-side timings behind docs/results
	$(BIN)/python benchmarks/heq_study.py
	$(BIN)/python benchmarks/heq_speed.py --share 0.5
	$(BIN)/python benchmarks/addition_study.py
	$(BIN)/python benchmarks/addition_ceiling.py --seeds 0 1 2 3 4 5 6 7 8 9 --widths 8 --out docs/results
	$(BIN)/python benchmarks/addition_speed.py
	$(BIN)/python benchmarks/natural_study.py
	$(BIN)/python benchmarks/two_halves.py
	$(BIN)/python benchmarks/newton_pairs.py --models planted-1000 planted-1001 planted-1002 ioi smollm2
	$(BIN)/python benchmarks/language_study.py tiny
	$(BIN)/python benchmarks/language_study.py settings
	$(BIN)/python benchmarks/language_study.py smollm2 --seeds 1
	$(BIN)/python benchmarks/language_study.py ioi
	$(BIN)/python benchmarks/token_stage.py
	$(BIN)/python benchmarks/token_cost.py
	$(BIN)/python benchmarks/two_cores.py
	$(BIN)/python benchmarks/language_budget.py --seeds 0 1
	$(BIN)/python benchmarks/language_cost.py --task mcqa --adapter planted-1000 --seed 0 --tight 0.5
	$(BIN)/python benchmarks/scale_signatures.py
	$(BIN)/python benchmarks/ray_speed.py
	$(BIN)/python benchmarks/plan_check.py --check --memory --table
	$(BIN)/plot-ot models --fetch smollm2
	$(BIN)/python benchmarks/decoder_speed.py --model $${PLOT_OT_CACHE:-$$HOME/.cache/plot-ot}/models/smollm2

docs: setup
	$(INSTALL) --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

audit: setup  ## known holes in all that is pinned, torch included; needs a network
	$(INSTALL) --group audit
	$(BIN)/pip-audit --strict --disable-pip --require-hashes -r requirements.lock
	$(BIN)/pip-audit --strict --disable-pip --no-deps -r constraints.txt

lock: setup  ## requirements.lock with hashes, the rest of constraints.txt, sbom.cdx.json; needs a network
	$(INSTALL) --group audit
	$(BIN)/python scripts/lock.py

clean:
	rm -rf $(VENV) $(TOOLS) .venv-installed dist site runs .pytest_cache .mypy_cache .ruff_cache
