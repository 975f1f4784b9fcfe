#!/usr/bin/env bash
# The whole suite once, real parts included, in WORKERS workers (3: on two cores, for much of it is waiting); says what it skipped and why
# (-ra) and what took longest; how long each test took is in build/tests.xml. Which tests stay
# together: _group in tests/conftest.py.
#   scripts/test.sh [PYTEST ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf build/internal-errors
status=0
.venv/bin/python -m pytest -q -ra --numprocesses "${WORKERS:-3}" --dist loadgroup --no-loadscope-reorder \
  --durations 30 --junit-xml build/tests.xml "$@" || status=$?
# A worker whose pytest broke, last: what the main process says then does not tell why.
[ ! -d build/internal-errors ] || tail -n 40 build/internal-errors/* >&2
exit $status
