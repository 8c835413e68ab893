PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where it is set, as in images of containers, each of the hundreds of processes that tests start would compile PyTorch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-device lint install docs chaos fuzz ray-versions clean

install: $(VENV)/installed

# The stamp is older than pyproject.toml or the pins after either changed. Modules are compiled when they are imported: of
# the 23,000 of all packages a small part is.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable '.[dev,docs]'
	touch $@

demo: install
	$(BIN)/rayfl run

# Processes with one thread each. Tests that start Ray go one after the other in one of them (tests/conftest.py), which waits
# for processes that it starts most of the time; so one more than two CPUs have room for.
WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test: install lint
	$(PYTEST) -n $(WORKERS)

test-all: install lint
	$(PYTEST) -n $(WORKERS) -m 'slow or not slow'

# Tests compute on CPUs on every machine. These on a device of this one, in place of a pretended one:
# make test-device DEVICE=cuda
DEVICE ?= cuda
test-device: install
	RAYFL_TEST_DEVICE=$(DEVICE) $(PYTEST) tests/devices

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: install
	$(BIN)/mkdocs build --strict

# Kills, full disks and damaged files by the hundred, each followed by a continued run: docs/reliability.md.
chaos: install
	$(BIN)/python scripts/chaos/chaos.py --trials 300 --seed 0

# Coverage-guided, two minutes for each kind of input.
fuzz: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python scripts/chaos/fuzz.py all --seconds 120

# The oldest Ray that rayfl takes, the first with jobs and sweeps, and the newest there is: docs/cluster.md.
ray-versions: install
	$(BIN)/python scripts/bench/ray_versions.py 2.40.0 2.52.0 newest

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
