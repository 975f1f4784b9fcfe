#!/usr/bin/env bash
# Pin every dependency with hashes. requirements form and not uv.lock: uv.lock writes the index's
# host names into the repo, and the agent is built behind private mirrors.
set -euo pipefail
cd "$(dirname "$0")/.."
flags=(--quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --no-annotate)
.venv/bin/uv pip compile "${flags[@]}" "$@" pyproject.toml -o locks/runtime.txt
.venv/bin/uv pip compile "${flags[@]}" "$@" pyproject.toml --group dev -o locks/dev.txt
# The extra gpu alone, as tests have it: what deploy/install.sh --gpu adds.
sed -n '/^nvidia-ml-py==/,/[^\\]$/p' locks/dev.txt >locks/gpu.txt
.venv/bin/uv pip compile "${flags[@]}" "$@" --group build -o locks/build.txt
.venv/bin/uv pip compile "${flags[@]}" "$@" --group pictures -o locks/pictures.txt
