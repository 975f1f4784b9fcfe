# To be sourced: apt with what the build arguments say, its lists fetched. Nothing of it stays in the image.
#   APT_SOURCES   lines of a sources.list, used in place of the base's own
#   CEPH_RELEASE  Ceph's packages are taken in this release ("18"), when the sources have it
export APT_CONFIG=/tmp/apt.conf DEBIAN_FRONTEND=noninteractive
echo 'APT::Install-Recommends "false";' >$APT_CONFIG
if [ -n "${APT_SOURCES:-}" ]; then
  printf '%s\n' "$APT_SOURCES" >/tmp/sources.list
  printf 'Dir::Etc::SourceList "/tmp/sources.list";\nDir::Etc::SourceParts "/dev/null";\n' >>$APT_CONFIG
fi
if [ -n "${CEPH_RELEASE:-}" ]; then
  printf 'Package: src:ceph\nPin: version %s.*\nPin-Priority: 1001\n' "$CEPH_RELEASE" >/tmp/preferences
  echo 'Dir::Etc::Preferences "/tmp/preferences";' >>$APT_CONFIG
fi
apt-get update
