#!/bin/sh
# What the three rooms start or load, and nothing that it takes to install it.
#   cache     ceph-fuse, libcephfs2 and python3-cephfs (sources), kmod (modprobe overlay, ceph)
#   preheat   ca-certificates (registries); the runtime's socket needs no client
#   volumes   libbpf1 (guard), libblkid1 (probe; part of the base), python3-rados and python3-rbd (ledger,
#             audit), rbd-nbd (unmap what is broken), rados (the client's version), journalctl (logs)
#
# DEBIAN_LOCK: required, preferred or off. The lock beside this file has all packages of the image, those of
# the base too, in the form NAME=VERSION.
set -eu
here=$(dirname "$0")
names="python3 ca-certificates kmod libbpf1 libblkid1 ceph-fuse libcephfs2 python3-rados python3-rbd
  python3-cephfs rbd-nbd libsystemd-shared libradosstriper1"
# One program each of two packages whose other files nobody here uses: ceph-common would bring 90 MB
# of libraries, systemd an init system. ldd below proves that what they load is there.
single="ceph-common:rados systemd:journalctl"

. "$here/apt.sh"
mkdir -p /usr/share/nodeagent "$here/debs"
lock=$here/debian-$(. /etc/os-release && echo "${VERSION_CODENAME:-unknown}").txt
if [ "$DEBIAN_LOCK" = off ]; then
  lock=
elif ! sh "$here/locked.sh" "$lock" >"$here/not-locked.txt"; then
  if [ "$DEBIAN_LOCK" = required ]; then exit 1; fi
  echo "image: the newest packages are taken" >&2
  cp "$here/not-locked.txt" /usr/share/nodeagent/
  lock=
fi
# version NAME: as apt wants it, NAME or NAME=VERSION.
version() { { [ -n "$lock" ] && grep "^$1=" "$lock"; } || echo "$1"; }

if [ -n "$lock" ]; then names=$(grep -vE "^(#|ceph-common=|systemd=)" "$lock"); fi
# shellcheck disable=SC2086
apt-get install -y --allow-downgrades $names

cd "$here/debs"
chmod 755 . # apt fetches as a user of its own
for each in $single; do
  package=${each%:*} program=${each#*:}
  apt-get download -qq "$(version "$package")" >&2
  dpkg-deb --fsys-tarfile "$package"_*.deb | tar -x -C /usr/bin --transform 's#.*/##' --wildcards "*/bin/$program"
  echo "$package=$(dpkg-deb -f "$package"_*.deb Version) /usr/bin/$program"
done >/usr/share/nodeagent/single-files.txt
cd /

for program in rados journalctl ceph-fuse rbd-nbd; do
  if ldd "$(command -v $program)" | grep "not found"; then
    echo "image: $program does not find its libraries" >&2
    exit 1
  fi
done
found=$(dpkg-query -W -f '${Version}' librados2)
case $found in
  "${CEPH_RELEASE:-$found}" | "${CEPH_RELEASE:-$found}".*) ;;
  *)
    echo "image: CEPH_RELEASE is $CEPH_RELEASE, but the package sources have Ceph $found;" \
      "name a BASE or the secret apt_sources that has it, with DEBIAN_LOCK=off" >&2
    exit 1
    ;;
esac

# Copyright files stay.
find /usr/share/doc -type f ! -name copyright -delete
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/* /var/log/* /tmp/* \
  /usr/share/man/* /usr/share/locale/* /usr/share/info/* /usr/share/lintian/* \
  /usr/share/python3/debpython/__pycache__
