.PHONY: help env demo test test-all test-again test-cpus fuzz coverage lint house tree docs oracle families clean selftest selftest-metal \
        require-metal wheel check-wheel demo-from-wheel demo-from-dist data-formats \
        check-tag addresses floors newest branches on-metal test-metal
PYTHON := .venv/bin/python
# Every Metal call and every access of a kernel is checked, and a mistake ends the process.
METAL_VALIDATION := MTL_DEBUG_LAYER=1 MTL_SHADER_VALIDATION=1 METAL_DEVICE_WRAPPER_TYPE=1 METAL_DEBUG_ERROR_MODE=0
# Modules are compiled once. Images for containers often set this, and then every process that tests start would compile
# some 1,600 anew.
export PYTHONDONTWRITEBYTECODE :=

help:
	@echo "make demo                 fine-tune the bundled model and see what it learnt (under two minutes)"
	@echo "make test                 the test suite"
	@echo "make test-all             the test suite with further sizes, dtypes and combinations of its cases"
	@echo "make test-again           up to three tests that failed under make test, once more and alone"
	@echo "make test-cpus            the numeric tests with the BLAS kernels of other CPUs (x86-64 Linux)"
	@echo "make fuzz [MINUTES=30]    throw random options, data, templates and damaged files at every command"
	@echo "make coverage             run the tests and print which lines and branches they reach"
	@echo "make env                  only the virtual environment, in .venv"
	@echo "make lint                 ruff, mypy, and actionlint for the workflows"
	@echo "make house                print the lines of each room of the source beside its budget; fail above one"
	@echo "make tree                 print every room of the source, what its files hold and what it imports"
	@echo "make docs                 build the documentation as a site, in site/ (installs MkDocs)"
	@echo "make selftest             everything on this machine, into deltatune-selftest.json (minutes)"
	@echo "make selftest-metal       the same on a Mac, with Metal's validation layers on (slow)"
	@echo "make require-metal        fail where MLX does not compute on an Apple GPU"
	@echo "make wheel                build the wheel and the source archive, in dist"
	@echo "make check-wheel          look at what they hold, and at how PyPI will show them"
	@echo "make demo-from-wheel      install the wheel in a clean environment; run the demo outside the source tree"
	@echo "make demo-from-dist       the same with the wheel that is in dist already"
	@echo "make data-formats         with that wheel, every command that reads data on every format of data"
	@echo "make check-tag TAG=v1.2.3  fail unless the tag is the version in pyproject.toml"
	@echo "make on-metal             whole programs on a stand-in for a Mac, with real head sizes (hours)"
	@echo "make test-metal           tests with that stand-in as MLX's default device, and every program on it"
	@echo "make oracle               compare training with transformers + PEFT, live (installs PyTorch)"
	@echo "make families             train a tiny model of every type of mlx-lm and mlx-vlm in every way (half an hour)"
	@echo "make floors               the tests and the self-test with the lowest mlx, mlx-lm and mlx-vlm"
	@echo "make newest               the tests and the self-test with the newest mlx, mlx-lm and mlx-vlm"
	@echo "make branches             the same with their main branches, mlx's compiled here"

env: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt scripts/make_env
	scripts/make_env
	@touch $@

demo: env
	$(PYTHON) -m deltatune demo

# Two processes with one BLAS thread each: small tests leave the second core of one process idle.
test: env
	DELTATUNE_THREADS=$${DELTATUNE_THREADS:-1} $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15

# The weekly workflow runs it.
test-all: env
	DELTATUNE_THREADS=$${DELTATUNE_THREADS:-1} $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m ""

# After `make test` failed.
test-again: env
	$(PYTHON) scripts/test_again.py

# After `make test`, which runs this machine's own kernels.
test-cpus: env
	$(PYTHON) scripts/test_cpus.py

fuzz: env
	$(PYTHON) scripts/fuzz.py $(MINUTES)

lint: env
	$(PYTHON) -m ruff check src tests benchmarks scripts examples
	$(PYTHON) -m ruff format --check src tests benchmarks scripts examples
	$(PYTHON) -m mypy
	scripts/lint_workflows

house: env
	$(PYTHON) scripts/house.py

selftest: env
	$(PYTHON) -m deltatune selftest

require-metal: env
	$(PYTHON) scripts/require_metal.py

selftest-metal: require-metal
	$(METAL_VALIDATION) $(PYTHON) -m deltatune selftest

wheel: env
	scripts/make_env release
	rm -rf build dist
	$(PYTHON) -m build --quiet --outdir dist

check-wheel: wheel
	$(PYTHON) -m twine check --strict dist/*
	$(PYTHON) scripts/wheel_contents.py dist/*.whl

demo-from-wheel: wheel
	scripts/from_wheel demo

demo-from-dist: env
	scripts/from_wheel demo

data-formats: env
	scripts/from_wheel scripts/data_formats.py

check-tag: env
	@version=$$($(PYTHON) -c 'import importlib.metadata as m; print(m.version("deltatune"))'); \
	if [ "$(TAG)" != "v$$version" ]; then echo "TAG is '$(TAG)': expected v$$version" >&2; exit 1; fi

addresses: env
	$(PYTHON) scripts/addresses.py "$(TAG)"

floors newest branches: env
	scripts/with_upstream $@

tree: env
	$(PYTHON) scripts/tree.py

# Tracing makes the tests half as long again, so this is not part of `make test`.
coverage: env
	DELTATUNE_THREADS=$${DELTATUNE_THREADS:-1} $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term

docs: env
	scripts/make_env docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build
	@echo "Open site/index.html. For its search: $(PYTHON) -m http.server --directory site"

# `make test` runs the same programs with smaller heads (tests/on_metal/smaller.py).
on-metal: env
	$(PYTHON) -m pytest tests/on_metal --real-sizes --durations 5

# The nightly workflow runs it. Other tests know the CPU's choices and sizes.
METAL_TESTS := $(addprefix tests/ops/,operator linear_attention attention products/test_unpacking_by_time.py) \
        tests/plan/test_fit.py tests/patches/tables/test_mlx_lm.py tests/train/test_loop.py \
        tests/train/test_early_engine.py tests/train/by_layer/test_bounded_runs.py
test-metal: env
	DELTATUNE_THREADS=$${DELTATUNE_THREADS:-1} $(PYTHON) -m pytest -n 2 --dist loadfile --metal $(METAL_TESTS)
	$(PYTHON) -m pytest -m "" tests/on_metal/test_programs.py

oracle: env
	scripts/make_env oracle
	$(PYTHON) -m pytest -m oracle

families: env
	$(PYTHON) scripts/families

clean:
	rm -rf .venv .wheel .upstream build dist site src/*.egg-info
