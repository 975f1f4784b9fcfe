#!/usr/bin/env bash
# apart.sh [KEEP...] -- COMMAND: run COMMAND in a new mount namespace. First unmount the copies of
# other tests' mounts there, of this run and of others: a copy would keep the disk or the view of its
# test busy, because mounts are private on the machines of the tests, and an unmount does not arrive
# here. They are known by what they are or by the folder of their test. What lies below or above a
# folder KEEP stays. tests/volumes/audit/holder.py does the same in its process.
set -e
keep=()
while [ "$1" != -- ]; do
  keep+=("$1")
  shift
done
shift
found=()
while read -r _ _ _ _ target rest; do
  case "$target $rest" in
    */views/*/data\ * | */views/*/by-id/*\ *) ;; # an eviction waits for who still shows a view
    *" - fuse "* | *" - fuse."* | *" /dev/loop"*) ;;
    *" - bpf "*) continue ;; # it keeps nothing busy, and a guard looks for its own one there
    */build/test-* | */pytest-of-*) ;;
    *) continue ;;
  esac
  printf -v target %b "$target" # \040 is a space
  [ "$target" != / ] || continue
  for each in "${keep[@]}"; do
    case "$target/" in "$each"/*) continue 2 ;; esac
    case "$each/" in "$target"/*) continue 2 ;; esac
  done
  found=("$target" "${found[@]}") # the latest first
done </proc/self/mountinfo
# All at once: until then, what other tests unmount stays in use. Some are gone by themselves.
[ ${#found[@]} = 0 ] || umount -l "${found[@]}" 2>/dev/null || true
exec "$@"
