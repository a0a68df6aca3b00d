# make demo          trains a network inside half of its memory (installs what it needs)
# make test          lint, types, tests
# make experiments   short versions of the experiments
#
# Everything is installed into .venv; PYTHON=python3.12 picks another Python.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
SETTINGS := setup.py pyproject.toml

.PHONY: help demo test experiments
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

demo: $(VENV)/installed
	$(RUN) -m experiments.demo

# TensorFlow cannot share a process with OR-tools, which these tests use.
WITHOUT_TENSORFLOW := tests/test_published_methods.py tests/test_solver_quality.py

# A module stays in one process: its tests share what is dear to make.  tests/conftest.py
# says which come first.
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p remat -p experiments
	$(RUN) -m pytest $(WORKERS) $(WITHOUT_TENSORFLOW)
	$(RUN) -m pytest $(WORKERS) $(WITHOUT_TENSORFLOW:%=--ignore=%)

experiments: $(VENV)/installed-test
	$(RUN) -m experiments.measured_step --models UNet --budgets 0.5 --repeats 1
	$(RUN) -m experiments.solver_quality --scale --sizes 100 300 1000
	$(RUN) -m experiments.solver_quality --scale --sizes 30 60 --budgets 75% --solvers checkmate checkmate:backend=highs lp_rounding moccasin anneal auto --time-limit 5 --out out/solve_times
	$(RUN) -m experiments.solver_quality --ratios layers:VGG16:64 layers:MobileNet:64 --time-limit 1 --out out/ratios
	$(RUN) -m experiments.solver_quality training-100 segnet-8 --budgets 80% 50% --solvers auto chen_greedy --seeds 1
	$(RUN) -m experiments.budget_sweep layers:U-Net:32 --solvers auto chen_greedy chen_sqrt griewank feng_huang --time-limit 2
	$(RUN) -m experiments.largest_batch --accountings layers --networks U-Net SegNet VGG19 --time-limit 4
	$(RUN) -m experiments.largest_batch --accountings step --networks MobileNet --time-limit 4 --out out/largest_batch_step
	$(RUN) -m experiments.optimal_gradient_search --networks VGG16 ResNet50 DenseNet121 --time-limit 2
	$(RUN) -m experiments.optimal_gradient_search_measured --networks ResNet18 --batch 4
	$(RUN) -m experiments.schedule_pictures
	$(RUN) -m experiments.eager_recompute --shares 0.35
	$(RUN) -m experiments.autoencoder --model-only
	$(RUN) -m experiments.largest_batch_measured --models SmallUNet --ways plain budgeted --limit 64 --accuracy 0.5
	$(RUN) -m experiments.sweep_kills --jobs 48
	$(RUN) -m experiments.predictions --models SmallUNet --shares 0.5 --runs 1
	$(RUN) -m experiments.at_once --models SmallUNet --turns 3
	$(RUN) -m experiments.floors --models UNet Transformer

# The install is editable: what is in this folder is what runs.
$(VENV)/installed: $(SETTINGS) | $(RUN)
	$(RUN) -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(SETTINGS) | $(RUN)
	$(RUN) -m pip install --quiet --editable ".[test]"
	touch $@ $(VENV)/installed

$(RUN):
	@$(PYTHON) -c 'import sys; \
	    ok = (3, 10) <= sys.version_info < (3, 14); \
	    sys.exit(None if ok else "remat needs Python 3.10 to 3.13; this is " \
	        + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
