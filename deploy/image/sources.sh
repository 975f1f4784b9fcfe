#!/bin/sh
# Where apt takes packages from, as the build arguments say. Without them nothing is changed.
set -eu
if [ -n "${DEBIAN_SNAPSHOT:-}" ]; then
  rm -f /etc/apt/sources.list.d/* /etc/apt/sources.list
  for part in "debian bookworm" "debian bookworm-updates" "debian-security bookworm-security"; do
    set -- $part
    echo "deb [check-valid-until=no] http://snapshot.debian.org/archive/$1/$DEBIAN_SNAPSHOT $2 main"
  done >/etc/apt/sources.list
fi
if [ -n "${CEPH_RELEASE:-}" ]; then
  apt-get update
  apt-get install -y --no-install-recommends ca-certificates curl
  curl -fsS -o /etc/apt/trusted.gpg.d/ceph.asc "$CEPH_MIRROR/keys/release.asc"
  echo "deb $CEPH_MIRROR/debian-$CEPH_RELEASE bookworm main" >/etc/apt/sources.list.d/ceph.list
  apt-get purge -y --auto-remove curl
  rm -rf /var/lib/apt/lists/*
fi
