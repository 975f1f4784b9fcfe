#!/usr/bin/env bash
# Set up what the repo needs. Idempotent, quiet when nothing is to do.
#   setup.sh base   the virtual environment with the command .venv/bin/nodeagent
#   setup.sh full   also the real parts that tests and benchmarks run against (needs root)
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

# step WORDS...: run them; say how long they took when there was something to do.
step() {
  local begin=$SECONDS
  "$@"
  [ $((SECONDS - begin)) -lt 2 ] || say "${1#scripts/} took $((SECONDS - begin)) s"
}

# packages NAME...: install what is missing of Debian's packages.
packages() {
  local there missing=() name
  # dpkg-query answers 1 when it does not know one of the names, which is the very case to mend here.
  there=" $({ dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' "$@" 2>/dev/null || true; } | awk '$1 == "ii" {printf "%s ", $2}')"
  for name in "$@"; do [[ $there == *" $name "* ]] || missing+=("$name"); done
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "missing Debian packages, install them as root: ${missing[*]}"
    return 1
  fi
  say "installing Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  local log; log=$(mktemp)
  if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    say "apt-get failed; its whole output is in $log"
    return 1
  fi
  rm -f "$log"
}

find_python() {
  local p
  for p in python3.11 python3 /usr/bin/python3; do
    if command -v "$p" >/dev/null && "$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$p"; return 0
    fi
  done
  say "python 3.11 is needed (Debian's Ceph bindings are built for it)"; return 1
}

environment() {
  local stamp=.venv/.stamp want
  want=$(cat pyproject.toml locks/*.txt scripts/setup.sh | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && [ -x .venv/bin/nodeagent ] && return 0
  local python; python=$(find_python)
  say "making .venv from locks/dev.txt"
  "$python" -c 'import ensurepip' 2>/dev/null || packages python3-venv  # Debian keeps it apart
  .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
  .venv/bin/python -m pip install -q --disable-pip-version-check 'uv>=0.7'
  VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install -q --compile-bytecode --require-hashes -r locks/dev.txt
  VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install -q --no-deps -e .
  printf '%s' "$want" >"$stamp"
}

# Debian's Ceph bindings are cpython-311 extension files: linked one by one, nothing else of
# Debian's Python leaks into the environment.
ceph_bindings() {
  local site module from
  site=$(echo .venv/lib/python3.11/site-packages)
  for module in rados rbd cephfs; do
    from=/usr/lib/python3/dist-packages/$module.cpython-311-x86_64-linux-gnu.so
    if [ -e "$from" ] && [ ! -e "$site/$(basename "$from")" ]; then ln -sf "$from" "$site/"; fi
  done
}

step environment
if [ "${1:-base}" = full ]; then
  mapfile -t names < <(grep -v '^#' scripts/packages.txt)
  step packages "${names[@]}"
  step scripts/runtimes.sh  # containerds and a registry, unpacked and not installed
  step scripts/kubernetes.sh  # Kubernetes, etcd and helm, built once into a cache folder
  step scripts/snapshotters.sh  # the stargz snapshotter, likewise
fi
ceph_bindings
# An environment that forbids writing bytecode would compile every module at each start.
.venv/bin/python -m compileall -q cache ceph kit linux nodeagent preheat volumes tests
# The format guard's kernel program; tests need it, an agent without it says so in its status.
if [ "${1:-base}" = full ] || command -v clang >/dev/null; then scripts/bpf.sh; fi
