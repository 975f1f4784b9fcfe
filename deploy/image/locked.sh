#!/bin/sh
# Whether the lock FILE can be followed: apt has each package in the version of the lock. If not, print those
# that are gone, and say what to do.
set -eu
export LC_ALL=C
file=$1
if [ ! -e "$file" ]; then
  echo "image: there is no ${file##*/}, so the packages of this Debian are not pinned; make one with" \
    "'make image-lock', or build with DEBIAN_LOCK=preferred" >&2
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -v '^#' "$file" | sort >"$work/wanted"
{
  dpkg-query -W -f '${Package}=${Version}\n'
  # shellcheck disable=SC2046
  apt-cache madison $(sed 's/=.*//' "$work/wanted") | awk -F'|' '{gsub(/ /, ""); print $1 "=" $2}'
} | sort -u >"$work/there"
gone=$(comm -23 "$work/wanted" "$work/there")
[ -z "$gone" ] && exit 0
echo "$gone"
echo "image: the package archive no longer has these versions of ${file##*/}:" $gone >&2
echo "image: make the lock anew with 'make image-lock', build with the secret apt_sources naming a snapshot of the archive that" \
  "has them, or with DEBIAN_LOCK=preferred" >&2
exit 1
