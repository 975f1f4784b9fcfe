#!/usr/bin/env bash
# Set up what the repo needs. Idempotent, quiet when nothing is to do.
#   setup.sh base   the virtual environment with the command .venv/bin/nodeagent
#   setup.sh full   also the real parts that benchmarks and most tests run against (needs root)
#   setup.sh gate   also what 'make test' needs: the agent's image, a later Ceph
#   setup.sh long   also what 'make test-long' needs: its image on the second release of Debian, a guest's kernel
cd "$(dirname "$0")/.."
. scripts/steps.sh
what=${1:-base}
if [[ " base full gate long " != *" $what "* ]]; then say "unknown: $what (base, full, gate or long)"; exit 2; fi
here=$(pwd -P)
if [[ " gate long " == *" $what "* ]] && [[ $here == /var/* || $here == /etc/* || $here == /opt/* || $here == /run/* ]]; then
  say "the tests cannot run in $here: their Kubernetes node has file systems of its own at /var, /etc, /opt and /run. Clone elsewhere"
  exit 1
fi

# packages NAME...: install what is missing of Debian's packages.
packages() {
  local there missing=() name
  # dpkg-query answers 1 when it does not know one of the names, which is the very case to mend here.
  there=" $({ dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' "$@" 2>/dev/null || true; } | awk '$1 == "ii" {printf "%s ", $2}')"
  for name in "$@"; do [[ $there == *" $name "* ]] || missing+=("$name"); done
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "missing Debian packages; run this as root on Debian 12, or install them: ${missing[*]}"
    return 1
  fi
  say "installing Debian packages (a minute or two): ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  download "the archive in /etc/apt" apt-get update -qq
  download "the archive in /etc/apt" apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

find_python() {
  local p
  for p in python3.11 python3 /usr/bin/python3; do
    if command -v "$p" >/dev/null && "$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$p"; return 0
    fi
  done
  say "python 3.11 is needed (Debian's Ceph bindings are built for it); Debian 12 has it: apt-get install python3"; return 1
}

environment() {
  local stamp=.venv/.stamp want
  want=$(cat pyproject.toml locks/*.txt scripts/setup.sh | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && [ -x .venv/bin/nodeagent ] && return 0
  local python; python=$(find_python)
  say "making .venv from locks/dev.txt (about a minute)"
  "$python" -c 'import ensurepip' 2>/dev/null || packages python3-venv  # Debian keeps it apart
  .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
  download "pip's package index" .venv/bin/python -m pip install -q --disable-pip-version-check 'uv>=0.7'
  export VIRTUAL_ENV=$PWD/.venv
  download "uv's package index" .venv/bin/uv pip install -q --compile-bytecode --require-hashes -r locks/dev.txt
  download "uv's package index" .venv/bin/uv pip install -q --no-deps -e .
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

# pytest compiles a file of tests when it first reads it: 15 s, in each of its workers at once. For the background, which
# it becomes. What cannot be read, the run of the tests itself says.
read_tests() {
  unset PYTHONDONTWRITEBYTECODE
  TEST_PATIENCE=1 exec .venv/bin/python -m pytest -q --collect-only >/dev/null 2>&1
}

step environment
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT  # a step that fails leaves nothing at work; without jobs kill complains
compiled=(tests/kit/__pycache__/*-pytest-*.pyc)  # the pattern itself, while there is none
if [[ " gate long " == *" $what "* ]] && [ ! -e "${compiled[0]}" ]; then read_tests & fi
if [ "$what" != base ]; then
  mapfile -t names < <(grep -v '^#' scripts/packages.txt)
  [ ${#names[@]} -gt 0 ] || { say "scripts/packages.txt names no package"; exit 1; }
  step packages "${names[@]}"
  step scripts/runtimes.sh  # containerds and a registry, unpacked and not installed
  step scripts/kubernetes.sh  # Kubernetes, etcd and helm, built once into a cache folder
  step scripts/snapshotters.sh  # the stargz snapshotter, likewise
fi
ceph_bindings
# An environment that forbids writing bytecode would compile every module at each start.
.venv/bin/python -m compileall -q cache ceph fleet kit kube linux nodeagent preheat volumes tests
# The format guard's kernel program; tests need it, an agent without it says so in its status.
if [ "$what" != base ] || { command -v clang >/dev/null && [ -e /usr/include/bpf/bpf_helpers.h ]; }; then scripts/bpf.sh; fi
# Made here and not by the first test that needs them, whose limit they would take.
images() { .venv/bin/python scripts/image.py prepare "$@"; }
if [ "$what" = gate ]; then
  step scripts/ceph.sh trixie
  step images bookworm
fi
if [ "$what" = long ]; then
  step scripts/ceph.sh trixie sid
  step images bookworm trixie
  step scripts/guest.sh build/guest
fi
wait  # for what reads the tests
