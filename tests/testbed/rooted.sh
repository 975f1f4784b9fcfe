#!/usr/bin/env bash
# rooted.sh ROOT FOLDER -- COMMAND: run COMMAND in a new mount namespace on the system in ROOT, which stays as it is.
# The machine's processes, devices and FOLDER are there under their own names, and no other mount: a copy would keep
# the disks and views of other tests busy (apart.sh says why).
set -e
root=$1 folder=$2
shift 3
if [ -z "$ROOTED" ]; then
  ROOTED=1 exec unshare --mount --propagation private "$0" "$root" "$folder" -- "$@"
fi
unset ROOTED
new=$root/mnt
mount -t tmpfs tmpfs "$new"
mkdir -p "$new"/{dev,etc,old,proc,run,sys,tmp,usr,var} "$new$folder"
for each in etc usr var; do mount -o bind,ro "$root/$each" "$new/$each"; done
cp -P "$root"/{bin,lib,lib64,sbin} "$new"
mount --bind /proc "$new/proc"
mount --bind /sys "$new/sys"
mount --rbind /dev "$new/dev"
mount --bind "$folder" "$new$folder"
cd "$new"
pivot_root . old
cd /
umount -l /old
exec "$@"
