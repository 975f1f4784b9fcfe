#!/usr/bin/env bash
# `make stop`: take down what `make run` left: the view, and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD/build/run
while read -r target; do umount "$target" && echo "unmounted $target"; done \
  < <(awk -v p="$here/" 'index($5, p) == 1 {print $5}' /proc/self/mountinfo | sort -r)
