# Every target sets up what it needs; nothing relies on what was installed by hand.
PY := .venv/bin/python
DOCS := NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs --quiet build --strict
.PHONY: setup run stop test test-long test-fresh test-guest test-fuzz test-faults test-kube-faults test-unit lint docs format bench bench-scale soak soak-node soak-follow soak-field lock pictures image image-lock release clean

setup: ; @scripts/setup.sh base
run: setup ; @scripts/demo.sh
stop: ; @scripts/stop.sh
test: ; @scripts/setup.sh gate && $(PY) scripts/test.py gate
test-long: ; @scripts/setup.sh long && $(PY) scripts/test.py long
test-fresh: ; @scripts/setup.sh full && $(PY) -m tests.testbed.machine scripts/fresh.sh
test-guest: ; @scripts/setup.sh long && $(PY) -m pytest -q -m guest
test-fuzz: ; @scripts/setup.sh full && FUZZ_EXAMPLES=500 $(PY) -m pytest -q tests/nodeagent/test_fuzz.py
test-kube-faults: ; @scripts/setup.sh full && KUBE_FAULTS_FACTOR=1 KUBE_FAULTS_AWAY=600 $(PY) -m pytest -q -s tests/kube/test_faults.py
test-faults: ; @scripts/setup.sh full && SEED=$$(date +%s) NTH_CALLS=1000000 KILLS=200 CUTS=500 STARTS=200 $(PY) -m pytest -q -s tests/faults && CYCLES=1000 $(PY) -m pytest -q tests/preheat/runtimes/test_containerd.py -k cycles && JOURNALS=50 $(PY) -m pytest -q tests/cache/fill/test_blocks_journals.py && BLOCK_UPDATES=50 BLOCK_KILLS=108 $(PY) -m pytest -q -s tests/cache/sources/test_rbd_updates.py && KILLS=12 RELOADS=1000 $(PY) -m pytest -q -s tests/cache/sources/test_rbd_guest.py
test-unit: setup ; @$(PY) -m pytest -q -m "not real" --numprocesses 2 --dist loadgroup
lint: setup ; @.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports && $(PY) scripts/house.py && $(DOCS)
docs: setup ; @$(DOCS)
format: setup ; @.venv/bin/ruff check --fix . ; .venv/bin/ruff format .
bench: ; @scripts/setup.sh full && $(PY) -m tests.bench
bench-scale: setup ; @$(PY) -m tests.bench.scale
soak: ; @scripts/setup.sh full && SOAK_SECONDS=600 $(PY) -m tests.bench volume_audit
soak-node: ; @scripts/setup.sh full && $(PY) -m tests.deploy.soak && SOAK_CYCLES=25 $(PY) -m pytest -q tests/deploy/test_node_rounds.py && SOAK_PODS=50 $(PY) -m pytest -q tests/deploy/test_node_csi.py
soak-follow: ; @scripts/setup.sh full && FOLLOW_SECONDS=600 FOLLOW_EVERY=20 FOLLOW_SWAPS=100 $(PY) -m pytest -q -s tests/cache/test_follow.py
soak-field: ; @scripts/setup.sh gate && $(PY) -m tests.deploy.field_soak
lock: setup ; @scripts/lock.sh
pictures: ; @scripts/setup.sh full && .venv/bin/uv pip install --quiet --require-hashes --target build/pictures -r locks/pictures.txt && PYTHONPATH=build/pictures $(PY) scripts/dashboard_pictures.py
image: ; @scripts/setup.sh full && $(PY) scripts/image.py build
image-lock: ; @scripts/setup.sh full && $(PY) scripts/image.py lock
# TO=oci://HOST/PATH pushes the chart, too.
release: ; @scripts/setup.sh full && $(PY) scripts/release.py $(if $(TO),--to $(TO))
clean: ; rm -rf build .venv
