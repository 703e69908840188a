# Two commands for users: `make demo` and `make test`. Each sets up its own environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: demo test test-lowest test-all check bench docs pictures release clean

demo: $(READY)  ## compare methods on handwritten digits, in about two minutes
	$(BIN)/bitplan demo

test: $(READY) check  ## the checks, then every test
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0  # with a worker replaced, xdist may wait for ever

test-lowest:  ## every test with the lowest versions of the core's dependencies, in .venv-lowest
	$(MAKE) VENV=.venv-lowest .venv-lowest/.ready
	.venv-lowest/bin/pip install -q --disable-pip-version-check --no-deps -r constraints-lowest.txt
	.venv-lowest/bin/pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0

test-all: test docs  ## and what takes longer: the site, whole tutorials, wheel and sdist, a newcomer's first hour
	$(BIN)/pytest tests_all

check: $(READY)  ## style, types and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m benchmarks.house

bench: $(READY)  ## side-by-side measurements, as ratios
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

docs: $(READY)  ## the site, in build/site: a broken link or a page that is missing ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict  # --quiet would hush what strict counts

pictures: $(READY)  ## every picture of the documents again, from the demo's run, in headless Chromium
	$(BIN)/bitplan demo
	$(BIN)/python docs/screenshots.py runs/demo
	$(BIN)/bitplan report studies/results/choosers/cifar_resnet20.json --figures build/figures
	cp build/figures/spend.png docs/images/cifar-spend.png

release: $(READY)  ## wheel and sdist in dist/, each tried in a fresh environment away from the repository
	$(BIN)/python -m build
	$(BIN)/pytest tests_all/test_release.py

# torch==2.13.0 stands in constraints.txt: pip then takes the CPU build where one is at hand.
$(READY): pyproject.toml constraints.txt
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[vision,text,llama,lightning,cluster,export,openvino,report,docs,dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-lowest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
