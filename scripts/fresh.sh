#!/usr/bin/env bash
# Is what set-up needs named? In an empty Debian 12 with git, make and python3, and this machine's go: set-up
# without network, without apt and without go, which must say what is missing; then the whole set-up, all unit
# tests and 'make run' in a folder with a space and a letter outside ASCII, and a real Ceph in a plain one.
# What is tested is the last commit. Only what is built by go is taken from this machine's cache folder. Needs root.
#   scripts/fresh.sh        about 10 minutes; the log of each step is in build/fresh
cd "$(dirname "$0")/.."
. scripts/steps.sh

folder=$PWD/build/fresh
root=$folder/root
cache=${NODEAGENT_CACHE:-$HOME/.cache/nodeagent}
odd='/home/dev/a clöne' plain=/home/dev/plain

[ "$(id -u)" = 0 ] || { say "test-fresh needs root: it makes a root file system and mounts in it"; exit 1; }
for tool in mmdebstrap unshare go; do
  command -v "$tool" >/dev/null || { say "test-fresh needs $tool"; exit 1; }
done

# clear: what a run before left. Its mounts went with its namespace.
clear() {
  if grep -qF " $root/" /proc/self/mountinfo; then
    say "something is still mounted below $root: unmount it first"
    return 1
  fi
  rm -rf --one-file-system "$folder"
}

# The machine's own ways to packages, and nothing else of it.
base() {
  say "making an empty Debian 12 (about a minute)"
  local site; site=$(mirror)
  [ -n "$site" ] || { say "apt on this machine names no Debian archive to make a Debian 12 from"; return 1; }
  quietly mmdebstrap --quiet --mode=root --variant=minbase \
    --include=ca-certificates,git,make,python3 --skip=cleanup/apt bookworm "$root" "$site"
  rm -rf "$root/etc/apt"
  cp -a /etc/apt "$root/etc/apt"
  local file
  for file in /etc/pip.conf /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt /usr/share/keyrings; do
    if [ -e "$file" ]; then rm -rf "${root:?}$file"; cp -aL "$file" "$root$file"; fi
  done
  mkdir -p "$root$odd" "$root$plain" "$root/usr/local/go" "$root/cache/kubernetes" "$root/cache/snapshotters"
  git clone -q --no-hardlinks . "$root$odd"
  git clone -q --no-hardlinks . "$root$plain"
  mkdir "$root/without-apt"
  for file in "$root"/usr/bin/* "$root"/usr/sbin/*; do ln -sf "${file#"$root"}" "$root/without-apt/"; done
  rm "$root/without-apt/apt-get"
}

# inside NAME FOLDER WORDS...: run them in it, with a mount and a process namespace of their own.
inside() {
  local name=$1 where=$2
  shift 2
  timeout --foreground --kill-after 10 2400 unshare --mount --pid --fork --kill-child --propagation private bash -euc '
    root=$1 go=$2 cache=$3 where=$4; shift 4
    mount --bind "$root" "$root"
    for each in dev sys; do mount --rbind "/$each" "$root/$each"; done
    mount -t proc proc "$root/proc"
    mount --bind "$go" "$root/usr/local/go"
    for each in kubernetes snapshotters; do
      if [ -d "$cache/$each" ]; then mount --bind "$cache/$each" "$root/cache/$each"; fi
    done
    exec chroot "$root" /usr/bin/env -u PIP_FIND_LINKS -u VIRTUAL_ENV HOME=/root NODEAGENT_CACHE=/cache \
      PATH="${FRESH_PATH:-/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin}" \
      bash -c "cd \"\$1\" && shift && exec \"\$@\"" bash "$where" "$@"
  ' bash "$root" "$(go env GOROOT)" "$cache" "$where" "$@" >"$folder/$name.log" 2>&1 </dev/null
}

# must NAME FOLDER WORDS...: it passes.
must() {
  local begin=$SECONDS
  if ! inside "$@"; then
    tail -n 40 "$folder/$1.log" >&2
    say "fresh: $1 FAILED; its whole output is in $folder/$1.log"
    return 1
  fi
  say "fresh: $1 passed in $((SECONDS - begin)) s: $(tail -n 1 "$folder/$1.log")"
}

# refuses NAME WORD FOLDER WORDS...: it fails, and its last lines name WORD.
refuses() {
  local name=$1 word=$2
  shift 2
  if inside "$name" "$@"; then say "fresh: $name passed, and must not"; return 1; fi
  if ! tail -n 5 "$folder/$name.log" | grep -qi -- "$word"; then
    tail -n 20 "$folder/$name.log" >&2
    say "fresh: $name does not say '$word' at its end"
    return 1
  fi
  say "fresh: $name is refused: $(grep -i -- "$word" "$folder/$name.log" | tail -n 1)"
}

clear
mkdir -p "$folder"
step base
refuses no-network network "$plain" unshare --net make setup
FRESH_PATH=/without-apt refuses no-apt 'as root on Debian' "$plain" make setup
must setup "$odd" make setup
must setup-full "$odd" scripts/setup.sh full
FRESH_PATH=/usr/sbin:/usr/bin:/sbin:/bin refuses no-go 'go is missing' "$odd" \
  env NODEAGENT_CACHE=/elsewhere scripts/kubernetes.sh
must unit-tests "$odd" make test-unit
must run "$odd" scripts/try_run.sh
must setup-plain "$plain" scripts/setup.sh full
must ceph "$plain" env NODEAGENT_TEST_FRESH=1 .venv/bin/python -m pytest -q \
  tests/cache/sources/test_cephfs.py::test_snapshot_of_odd_tree_is_copied_whole tests/ceph/test_client.py
rm -rf --one-file-system "$root"
say "fresh: all passed in $SECONDS s"
