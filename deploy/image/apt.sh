# To be sourced: apt with what the build arguments say, its lists fetched. Nothing of it stays in the image.
#   /run/secrets/apt_sources   a sources.list, used in place of the base's own: the build's secret apt_sources
#   CEPH_RELEASE  Ceph's packages are taken in this release ("18"), when the sources have it
export APT_CONFIG=/tmp/apt.conf DEBIAN_FRONTEND=noninteractive
echo 'APT::Install-Recommends "false";' >$APT_CONFIG
sources=/run/secrets/apt_sources
if [ -s $sources ]; then
  printf 'Dir::Etc::SourceList "%s";\nDir::Etc::SourceParts "/dev/null";\n' $sources >>$APT_CONFIG
fi
if [ -n "${CEPH_RELEASE:-}" ]; then
  printf 'Package: src:ceph\nPin: version %s.*\nPin-Priority: 1001\n' "$CEPH_RELEASE" >/tmp/preferences
  echo 'Dir::Etc::Preferences "/tmp/preferences";' >>$APT_CONFIG
fi
apt-get update
