#!/usr/bin/env bash
# The whole suite once, real parts included, in two workers; says what it skipped and why (-ra) and
# what took longest. Which tests stay together: _group in tests/conftest.py.
#   scripts/test.sh [PYTEST ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m pytest -q -ra --numprocesses 2 --dist loadgroup --no-loadscope-reorder \
  --durations 30 "$@"
