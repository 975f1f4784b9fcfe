# Every target sets up what it needs; nothing relies on what was installed by hand.
PY := .venv/bin/python
.PHONY: setup run stop test test-long test-fresh test-guest test-fuzz test-unit lint format bench soak soak-node lock image image-lock clean

setup: ; @scripts/setup.sh base
run: setup ; @scripts/demo.sh
stop: ; @scripts/stop.sh
test: ; @scripts/setup.sh gate && $(PY) scripts/test.py gate
test-long: ; @scripts/setup.sh long && $(PY) scripts/test.py long
test-fresh: ; @scripts/setup.sh full && scripts/fresh.sh
test-guest: ; @scripts/setup.sh long && $(PY) -m pytest -q -m guest
test-fuzz: ; @scripts/setup.sh full && FUZZ_EXAMPLES=500 $(PY) -m pytest -q tests/nodeagent/test_fuzz.py
test-unit: setup ; @$(PY) -m pytest -q -m "not real" --numprocesses 2 --dist loadgroup
lint: setup ; @.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports
format: setup ; @.venv/bin/ruff check --fix . ; .venv/bin/ruff format .
bench: ; @scripts/setup.sh full && $(PY) -m tests.bench
soak: ; @scripts/setup.sh full && SOAK_SECONDS=600 $(PY) -m tests.bench volume_audit
soak-node: ; @scripts/setup.sh full && $(PY) -m tests.deploy.soak && SOAK_CYCLES=25 $(PY) -m pytest -q tests/deploy/test_node_rounds.py
lock: setup ; @scripts/lock.sh
image: ; @scripts/setup.sh full && $(PY) scripts/image.py build
image-lock: ; @scripts/setup.sh full && $(PY) scripts/image.py lock
clean: ; rm -rf build .venv
