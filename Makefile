.PHONY: help env demo test test-cpus coverage lint tree docs oracle compat clean
PYTHON := .venv/bin/python

help:
	@echo "make demo       fine-tune the bundled model and see what it learnt (two minutes)"
	@echo "make test       the whole test suite"
	@echo "make test-cpus  the numeric tests with the BLAS kernels of other CPUs (x86-64 Linux)"
	@echo "make coverage   run the tests and print which lines and branches they reach"
	@echo "make env        only the virtual environment, in .venv"
	@echo "make lint       ruff and mypy"
	@echo "make tree       print which group of files imports which"
	@echo "make docs       build the documentation as a site, in site/ (installs MkDocs)"
	@echo "make oracle     compare training with transformers + PEFT, live (installs PyTorch)"
	@echo "make compat     try older versions of mlx, mlx-lm and mlx-vlm, an environment each (9 GB in .compat)"

env: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt scripts/make_env
	scripts/make_env
	@touch $@

demo: env
	$(PYTHON) -m deltatune demo

# Two processes with one BLAS thread each: small tests leave the second core of one process idle.
test: env
	DELTATUNE_THREADS=$${DELTATUNE_THREADS:-1} $(PYTHON) -m pytest -n 2 --dist loadfile --durations 15

# After `make test`, which runs this machine's own kernels.
test-cpus: env
	$(PYTHON) scripts/test_cpus.py

lint: env
	$(PYTHON) -m ruff check src tests benchmarks scripts examples
	$(PYTHON) -m ruff format --check src tests benchmarks scripts examples
	$(PYTHON) -m mypy

tree: env
	$(PYTHON) scripts/tree.py

# Tracing makes the tests half as long again, so this is not part of `make test`.
coverage: env
	DELTATUNE_THREADS=$${DELTATUNE_THREADS:-1} $(PYTHON) -m pytest -n 2 --dist loadfile --cov --cov-report=term

docs: env
	scripts/make_env docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

oracle: env
	scripts/make_env oracle
	$(PYTHON) -m pytest -m oracle

compat: env
	$(PYTHON) scripts/compat

clean:
	rm -rf .venv .compat build dist site src/*.egg-info
