#!/usr/bin/env bash
# The stargz snapshotter for the tests, built from the Go module proxy into the cache folder outside the
# clone. About a minute the first time (35 MB stay); quiet when it is there. Needs go and /dev/fuse.
# 0.6.4 is the newest release whose module holds the program itself (tests/testbed/stargz.py names it).
#   ${NODEAGENT_CACHE:-~/.cache/nodeagent}/snapshotters/stargz-<version>/bin/containerd-stargz-grpc
set -euo pipefail
stargz=0.6.4

bin=${NODEAGENT_CACHE:-$HOME/.cache/nodeagent}/snapshotters/stargz-$stargz/bin
program=containerd-stargz-grpc
[ -x "$bin/$program" ] && exit 0

if ! command -v go >/dev/null; then
  echo "snapshotters: go is needed to build $program (1.24 or newer)" >&2
  exit 1
fi
mkdir -p "$bin"
exec 9>"$bin/../lock"
flock 9  # two clones on one machine
[ -x "$bin/$program" ] && exit 0
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cd "$work"
export CGO_ENABLED=0 GOFLAGS=-mod=mod GOWORK=off
echo "setup: building $program into $bin" >&2
go mod init scratch 2>/dev/null
go mod edit -require "github.com/containerd/stargz-snapshotter@v$stargz"
nice go build -trimpath -ldflags '-s -w' -o "$program" \
  "github.com/containerd/stargz-snapshotter/cmd/$program" 2>log || { tail -n 30 log >&2; exit 1; }
mv "$program" "$bin/$program"
