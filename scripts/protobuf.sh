#!/usr/bin/env bash
# Make the Python modules of every .proto file. They are in the repo, so that neither the wheel nor a
# fresh clone needs a compiler; a test makes them anew and compares.
#   protobuf.sh [FOLDER]   where to write them; default: beside the .proto files
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${1:-.}")
.venv/bin/python -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" \
  cache/csi/*.proto preheat/runtimes/*.proto tests/testbed/*.proto
