#!/bin/sh
# What the three rooms start or load, and nothing that it takes to install it.
#   cache     ceph-fuse, libcephfs2 and python3-cephfs (sources), kmod (modprobe overlay, ceph)
#   preheat   ca-certificates (registries); the runtime's socket needs no client
#   volumes   libbpf1 (guard), libblkid1 (probe; part of the base), python3-rados and python3-rbd (ledger,
#             audit), rbd-nbd (unmap orphans), rados (the client's version), journalctl (logs)
set -eu
apt-get update
apt-get install -y --no-install-recommends \
  python3 ca-certificates kmod libbpf1 libblkid1 \
  ceph-fuse libcephfs2 python3-rados python3-rbd python3-cephfs rbd-nbd

# One program each of two packages whose other files nobody here uses: ceph-common would bring 90 MB
# of libraries, systemd an init system. ldd below proves that what they load is there.
apt-get install -y --no-install-recommends libsystemd-shared libradosstriper1
cd "$(mktemp -d)"
chmod 755 .
apt-get download ceph-common systemd
dpkg-deb --fsys-tarfile ceph-common_*.deb | tar -x -C / ./usr/bin/rados
dpkg-deb --fsys-tarfile systemd_*.deb | tar -x -C / ./bin/journalctl
cd /

for program in rados journalctl ceph-fuse rbd-nbd; do
  if ldd "$(command -v $program)" | grep "not found"; then
    echo "image: $program does not find its libraries" >&2
    exit 1
  fi
done

rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/* /var/log/* /tmp/tmp.* \
  /usr/share/doc/* /usr/share/man/* /usr/share/locale/* /usr/share/info/* /usr/share/lintian/* \
  /usr/share/python3/debpython/__pycache__
