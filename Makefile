# Every target sets up what it needs: an environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
OLDEST := .venv-oldest
NEWEST := .venv-newest
BETWEEN := .venv-between
STACKS := .venv-stacks
PACKAGE := .venv-package

.PHONY: demo test test-slow test-families test-faults test-generated test-oldest test-newest test-torch test-stacks support docs package lint format clean

demo: $(VENV)/ready
	$(RUN) examples/flip/run.py --columns plain betahook --seeds 7 --output runs/demo

test: $(VENV)/ready
	$(RUN) -m pytest -n 2

test-slow: $(VENV)/ready
	$(RUN) -m pytest -n 2 -m slow

# A tiny model of each model type of transformers, against what torch's own operations show of it; `make test` has a few.
test-families: $(VENV)/ready
	$(RUN) -m pytest -n 2 tests/zoo -m families

# Small faults, one at a time: the tests beside the code must notice each.
test-faults: $(VENV)/ready
	$(RUN) tests/faults/run.py

# Random attention modules: each must be right, or left alone by name. MODULES=300 SEED=5000 picks others.
MODULES := 2000
SEED := 0
test-generated: $(VENV)/ready
	cd tests && ../$(RUN) -m generated --modules $(MODULES) --seed $(SEED)

# The least versions of pyproject.toml. torch from PyPI brings the CUDA libraries along, several gigabytes.
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest -n 2

# Whatever PyPI has today; torch is several gigabytes here, too.
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	$(NEWEST)/bin/python -m pytest -n 2

# A torch between those: what compiles differs most. TORCH=2.9.1 picks another.
TORCH := 2.11.0
test-torch:
	$(PYTHON) -m venv --clear $(BETWEEN)
	$(BETWEEN)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[test]'
	$(BETWEEN)/bin/python -m pytest -n 2 -W ignore tests/unit tests/models

# With the packages that others train in; their warnings are theirs.
test-stacks: $(STACKS)/ready
	BETAHOOK_STACKS=required $(STACKS)/bin/python -m pytest tests/stacks -W ignore

support: $(VENV)/ready
	cd tests && ../$(RUN) -m zoo.support

# The site in build/site; a dead link, or a page that the contents lack, is an error.
docs: $(VENV)/docs
	$(RUN) -m sphinx -q -W --keep-going -c docs/site . build/site
	@echo 'open build/site/index.html'

# The sdist and the wheel, checked; the code of the README runs with the wheel alone, in an environment of its own.
package:
	rm -rf build dist $(PACKAGE)
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install --quiet --disable-pip-version-check build twine
	$(PACKAGE)/bin/python -m build --outdir dist .
	$(PACKAGE)/bin/python -m twine check --strict dist/*
	$(PACKAGE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PACKAGE)/bin/python -m pip install --quiet --disable-pip-version-check "$$(echo dist/*.whl)[trainer]" pytest hypothesis
	cd tests && PYTHONPATH=. ../$(PACKAGE)/bin/python -P -m pytest -c /dev/null --rootdir . -p no:cacheprovider \
		examples/test_readme.py -k block
	cd tests && ../$(PACKAGE)/bin/betahook --version

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# torch first and alone: a range would pull in the CUDA build where a CPU build was meant.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/docs: $(VENV)/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(OLDEST)/ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[test]'
	touch $@

$(STACKS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(STACKS)
	$(STACKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(STACKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[stacks]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(BETWEEN) $(STACKS) $(PACKAGE) runs build dist betahook.egg-info
