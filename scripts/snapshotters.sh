#!/usr/bin/env bash
# The stargz snapshotter for the tests, built from the Go module proxy into the cache folder outside the
# clone. About a minute the first time (35 MB stay); quiet when it is there. Needs go and /dev/fuse.
# 0.6.4 is the newest release whose module holds the program itself (tests/testbed/stargz.py names it).
#   ${NODEAGENT_CACHE:-~/.cache/nodeagent}/snapshotters/stargz-<version>/bin/containerd-stargz-grpc
. "$(dirname "$0")/steps.sh"
stargz=0.6.4

bin=${NODEAGENT_CACHE:-$HOME/.cache/nodeagent}/snapshotters/stargz-$stargz/bin
program=containerd-stargz-grpc
[ -x "$bin/$program" ] && exit 0

need_go "it builds $program for the tests"
mkdir -p "$bin"
exec 9>"$bin/../lock"
flock 9  # two clones on one machine
[ -x "$bin/$program" ] && exit 0
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cd "$work"
export CGO_ENABLED=0 GOFLAGS=-mod=mod GOWORK=off
say "building $program into $bin, once: about a minute"
quietly go mod init scratch
go mod edit -require "github.com/containerd/stargz-snapshotter@v$stargz"
download "the Go module proxy (GOPROXY)" nice go build -trimpath -ldflags '-s -w' -o "$program" \
  "github.com/containerd/stargz-snapshotter/cmd/$program"
mv "$program" "$bin/$program"
