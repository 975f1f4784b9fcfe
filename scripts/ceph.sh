#!/usr/bin/env bash
# Ceph of later releases of Debian for the tests: each in a root of its own, in the cache folder outside the clone,
# with a link in build/ceph. Nothing of it is installed on the machine. Idempotent; nothing to do = no network.
#   scripts/ceph.sh RELEASE...    trixie: Ceph 18.2; sid: Ceph 20.2
#   build/ceph/<release>/         the root; its file packages.txt names what is in it
cd "$(dirname "$0")/.."
. scripts/steps.sh

packages=ceph-mon,ceph-mgr,ceph-osd,ceph-mds,ceph-common,ceph-fuse,python3-rados,python3-rbd,python3-cephfs
cache=${NODEAGENT_CACHE:-$HOME/.cache/nodeagent}/ceph
options=(--mode=root --variant=minbase --quiet "--include=$packages"
  '--dpkgopt=path-exclude=/usr/share/doc/*' '--dpkgopt=path-exclude=/usr/share/man/*'
  '--dpkgopt=path-exclude=/usr/share/locale/*')

# root RELEASE: made under another name, so that what has the right one is whole.
root() {
  local release=$1 sum place site
  sum=$(printf '%s\n' "$release" "${options[@]}" | sha256sum | cut -c 1-12)
  place=$cache/$release-$sum
  mkdir -p "$cache" build/ceph
  exec 9>"$cache/lock"
  flock 9  # two clones on one machine
  if [ ! -e "$place/packages.txt" ]; then
    [ "$(id -u)" = 0 ] || { say "only root can make a root with the Ceph of Debian $release"; return 1; }
    site=$(mirror)
    [ -n "$site" ] || { say "apt on this machine names no Debian archive to take the Ceph of $release from"; return 1; }
    say "making a root with the Ceph of Debian $release in $place, once: a minute or two, 700 MB"
    rm -rf "$place.new"
    # It reads none of this machine's settings of apt: proxies, and what a mirror that stands still needs.
    apt-config dump --no-empty Acquire | grep -vE '^Acquire::(IndexTargets|Changelogs)' >"$place.apt" || true
    download "the archive in /etc/apt" mmdebstrap "${options[@]}" "--aptopt=$place.apt" "$release" "$place.new" "$site"
    # What is this machine's, and where the archive is.
    rm -f "$place.apt" "$place.new"/etc/{hostname,resolv.conf,apt/sources.list,apt/apt.conf.d/99mmdebstrap}
    dpkg-query --root="$place.new" -W -f '${Package}=${Version}\n' >"$place.new/packages.txt"
    rm -rf "$place"
    mv "$place.new" "$place"
  fi
  exec 9>&-
  ln -sfn "$place" "build/ceph/$release"
}

[ $# -gt 0 ] || { say "ceph.sh: name releases of Debian"; exit 2; }
for release; do root "$release"; done
