#!/usr/bin/env bash
# The whole suite, real parts included; says what it skipped and why (-ra).
#
# The real parts share one small machine with whatever else runs there. What failed is run once more
# by itself, openly: a test that fails twice fails the suite.
set -euo pipefail
cd "$(dirname "$0")/.."
select=()
if [ $# -gt 0 ]; then select=("$@"); fi
status=0
.venv/bin/python -m pytest -q -ra "${select[@]}" || status=$?
if [ $status -eq 1 ]; then
  echo "test: what failed above is run once more by itself" >&2
  status=0
  .venv/bin/python -m pytest -q -ra --last-failed --last-failed-no-failures=none "${select[@]}" || status=$?
fi
exit $status
