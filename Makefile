# Every target only calls uv, installed to .uv/ if missing. PYTHON=3.12 chooses .venv's Python.
UV := $(shell command -v uv || echo .uv/bin/uv)
RUN := $(UV) run --no-project --python .venv
INSTALL := UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(UV) pip install --python .venv --quiet \
	--compile-bytecode --constraints constraints.txt
COMPILE := $(UV) pip compile --universal --python-version 3.11 --no-header --no-annotate --quiet
EXPORT := $(COMPILE) pyproject.toml
EXTRAS := atari envpool procgen mujoco dm_control pettingzoo minigrid jax brax jaxtari craftax marl optuna cluster trackio hub export docs dev all

.PHONY: help train new test test-slow format constraints requirements clean

help:
	@echo "make train         PPO on CartPole-v1, in a minute, after the installation"
	@echo "make new           start a file as a copy: make new NAME=my_ppo FROM=ppo"
	@echo "make test          the tests, with every extra installed"
	@echo "make test-slow     the tests that train to the end as well"
	@echo "make format        ruff and codespell over everything"
	@echo "make constraints   test with the newest versions from now on"
	@echo "make requirements  export requirements/ from pyproject.toml"

train: .venv/train
	$(RUN) python cleanrl/ppo.py $(FLAGS)

new:
	@python3 scripts/new_file.py "$(NAME)" "$(FROM)"

test: .venv/all
	$(RUN) pytest --numprocesses 2 -m "not slow"

test-slow: .venv/all
	$(RUN) pytest --numprocesses 2

format: .venv/all
	$(RUN) ruff check --fix
	$(RUN) ruff format
	git ls-files | xargs $(RUN) codespell

constraints: $(UV)
	$(EXPORT) --all-extras --upgrade --output-file constraints.txt
	$(COMPILE) requirements/mjlab.in --upgrade --output-file requirements/constraints-mjlab.txt
	$(MAKE) requirements

requirements: $(UV)
	mkdir -p requirements
	$(EXPORT) --constraints constraints.txt --output-file requirements/requirements.txt
	for extra in $(EXTRAS); do \
		$(EXPORT) --constraints constraints.txt --extra $$extra \
			--output-file requirements/requirements-$$extra.txt || exit 1; \
	done

# A file in .venv marks what was installed last; it is out of date when its dependencies change.
.venv/train: pyproject.toml constraints.txt | .venv/pyvenv.cfg
	$(INSTALL) --requirements pyproject.toml
	@touch $@

.venv/all: pyproject.toml constraints.txt | .venv/pyvenv.cfg
	$(INSTALL) --requirements pyproject.toml --extra all
	@touch $@ .venv/train

.venv/pyvenv.cfg: | $(UV)
	$(UV) venv --quiet --seed $(if $(PYTHON),--python $(PYTHON)) .venv

.uv/bin/uv:
	python3 -m pip install --quiet --target .uv uv

clean:
	rm -rf .venv .uv
