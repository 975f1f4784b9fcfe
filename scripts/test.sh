#!/usr/bin/env bash
# The whole suite, real parts included; says what it skipped and why (-ra).
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m pytest -q -ra "$@"
