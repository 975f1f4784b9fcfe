#!/usr/bin/env bash
# containerd of three Debian releases, runc and docker-registry, unpacked side by side in
# build/runtimes without installing anything (no service is started, the system's apt is untouched).
# The mirror is the one this machine's apt already uses. Idempotent; nothing to do = no network.
#   build/runtimes/<release>/usr/bin/{containerd,containerd-shim-runc-v2,runc,docker-registry}
cd "$(dirname "$0")/.."
. scripts/steps.sh

base=$PWD/build/runtimes
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# fetch RELEASE PACKAGE...: download with lists and a cache of our own, unpack.
fetch() {
  local release=$1; shift
  local root=$base/$release
  local stamp=$root/.complete
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$*" ] && return 0
  local site; site=$(mirror)
  [ -n "$site" ] || { say "apt on this machine names no Debian archive to take $* from"; return 1; }
  say "unpacking $* of Debian $release into build/runtimes"
  rm -rf "$root"
  mkdir -p "$root"/apt/{lists/partial,cache/archives/partial} "$root"/debs
  printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$site" "$release" >"$root/apt/sources.list"
  # "download" takes exactly the named packages; what they depend on is in the base system.
  local options=(
    -o "Dir::Etc::SourceList=$root/apt/sources.list" -o "Dir::Etc::SourceParts=/dev/null"
    -o "Dir::State::Lists=$root/apt/lists" -o "Dir::Cache=$root/apt/cache"
    -o "Dir::Etc::PreferencesParts=/dev/null" -o "APT::Sandbox::User=root" -qq
  )
  download "the archive in /etc/apt" apt-get "${options[@]}" update
  (cd "$root/debs" && download "the archive in /etc/apt" apt-get "${options[@]}" download "$@")
  for deb in "$root"/debs/*.deb; do dpkg -x "$deb" "$root"; done
  rm -rf "$root/apt" "$root/debs"
  printf '%s' "$*" >"$stamp"
}

# Beside one another. All have ended when this ends, also when one fails: the next set-up begins with what they left.
started=()
fetch bookworm containerd runc docker-registry busybox-static & started+=($!)  # containerd 1.6.20
fetch trixie containerd & started+=($!)                                        # containerd 1.7.24
fetch sid containerd & started+=($!)                                           # containerd 2.x
failed=
for each in "${started[@]}"; do wait "$each" || failed=1; done
[ -z "$failed" ]
