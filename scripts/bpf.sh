#!/usr/bin/env bash
# Compile the format guard's kernel program. Needs clang and libbpf's headers (Debian: clang, libbpf-dev).
cd "$(dirname "$0")/.."
. scripts/steps.sh
source=volumes/guard/guard.bpf.c object=volumes/guard/guard.bpf.o
[ "$object" -nt "$source" ] && [ "$object" -nt scripts/bpf.sh ] && exit 0
if ! command -v clang >/dev/null || [ ! -e /usr/include/bpf/bpf_helpers.h ]; then
  say "clang and libbpf's headers are needed for $source (Debian: clang, libbpf-dev)"
  exit 1
fi
# Debian keeps asm/ by architecture; the BPF target has none of its own.
clang -O2 -g -Wall -Werror -target bpf -I"/usr/include/$(uname -m)-linux-gnu" -c "$source" -o "$object.new"
if command -v llvm-strip >/dev/null; then llvm-strip --strip-debug "$object.new"; fi
mv "$object.new" "$object"
