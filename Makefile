# Every target does its own set-up in .venv first; that is quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: setup browser demo test test-tools test-long mutants lint format bench docs audit clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,bench,hf,browser,ray]' -c constraints.txt
	touch $@

browser:  ## the browser that tests open the report in; without it they are skipped
	command -v chromium chromedriver >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }

demo: setup  ## the paper's first study on one seed: table, handles and figures in runs/demo
	$(BIN)/plot-ot run heq --seeds 1 --first-seed 1 --sampler balanced --out runs/demo
	@echo "Figures: runs/demo/figures"

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
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fuzz]' -c constraints.txt
	$(BIN)/python -m pytest -m long

mutants: setup  ## changes one expression at a time and asks whether the tests notice: docs/results/mutants.md
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[mutants]' -c constraints.txt
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
	$(BIN)/python benchmarks/language_study.py tiny
	$(BIN)/python benchmarks/language_study.py settings
	$(BIN)/python benchmarks/language_study.py smollm2 --seeds 1
	$(BIN)/python benchmarks/language_study.py ioi
	$(BIN)/python benchmarks/token_stage.py
	$(BIN)/python benchmarks/language_budget.py --seeds 0 1
	$(BIN)/python benchmarks/language_cost.py --task mcqa --adapter planted-1000 --seed 0 --tight 0.5
	$(BIN)/python benchmarks/scale_signatures.py
	$(BIN)/python benchmarks/ray_speed.py
	$(BIN)/python benchmarks/plan_check.py --check --memory --table
	$(BIN)/plot-ot models --fetch smollm2
	$(BIN)/python benchmarks/decoder_speed.py --model $${PLOT_OT_CACHE:-$$HOME/.cache/plot-ot}/models/smollm2

docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

audit: setup  ## known holes in what is installed; needs a network
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[audit]' -c constraints.txt
	$(BIN)/pip-audit --strict -r constraints.txt --no-deps --disable-pip

clean:
	rm -rf $(VENV) $(TOOLS) site runs .pytest_cache .mypy_cache .ruff_cache
