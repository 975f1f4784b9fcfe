#!/bin/bash
# Install the agent on a host without Kubernetes: an environment in /opt/nodeagent from the wheel file, the systemd unit,
# and a settings file if there is none. If you run it again, it installs the wheel and restarts the agent.
#   install.sh --wheel FILE [--lock FILE] [--prefix DIR] [--root DIR] [--python PROGRAM] [--gpu]
#   --wheel   nodeagent-VERSION-….whl of a release. Nothing named nodeagent is taken from an index: the name is not ours there
#   --lock    libraries with hashes (locks/runtime.txt of the same release); beside the wheel it is found by itself
#   --prefix  where the environment goes (/opt/nodeagent)
#   --root    below which unit and settings go, for an image or a try (/)
#   --gpu     also nvidia-ml-py, of gpu.txt beside that lock: how busy GPUs are
# pip's own settings say from where libraries come (PIP_INDEX_URL, pip.conf, or PIP_NO_INDEX and PIP_FIND_LINKS).
set -euo pipefail
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }
say() { printf 'install: %s\n' "$*"; }
usage() { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }

here=$(cd "$(dirname "$0")" && pwd -P)
wheel='' lock='' prefix=/opt/nodeagent root='' python=python3 gpu=
while [ $# -gt 0 ]; do
  case $1 in
    --gpu) gpu=yes; shift; continue ;;
    --wheel | --lock | --prefix | --root | --python) [ $# -ge 2 ] || usage ;;
    *) usage ;;
  esac
  case $1 in
    --wheel) wheel=$2 ;; --lock) lock=$2 ;; --prefix) prefix=$2 ;; --root) root=${2%/} ;; --python) python=$2 ;;
  esac
  shift 2
done

[ -n "$wheel" ] || fail "which wheel? name it: --wheel nodeagent-VERSION-py3-none-any.whl ('make release' makes it)"
[ -f "$wheel" ] || fail "there is no file $wheel"
[[ ${wheel##*/} =~ ^nodeagent-[0-9][^-]*-.*\.whl$ ]] || fail "${wheel##*/} is not a wheel of nodeagent"
[[ $prefix == /* ]] || fail "--prefix $prefix: an absolute path, like /opt/nodeagent"
if [ -z "$lock" ]; then
  for each in "$(dirname "$wheel")/runtime.txt" "$here/runtime.txt" "$here/../locks/runtime.txt"; do
    if [ -f "$each" ]; then lock=$each; break; fi
  done
fi
[ -f "$lock" ] || fail "the libraries' lock is missing: name locks/runtime.txt of the release with --lock"
of_gpu=$(dirname "$lock")/gpu.txt
[ -z "$gpu" ] || [ -f "$of_gpu" ] || fail "$of_gpu is missing: put the release's gpu.txt beside the lock, or leave out --gpu"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null ||
  fail "$python is not Python 3.11, 3.12 or 3.13; name another one with --python"
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make environments: apt-get install python3-venv"
if [ -e "$prefix" ] && [ ! -f "$prefix/pyvenv.cfg" ]; then
  fail "$prefix is there and is no environment of Python: name another --prefix, or look what it is"
fi
if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then fail "run it as root, or into a directory of your own with --prefix and --root"; fi

# Libraries by hash first, then the wheel alone: nothing else can come in under our name.
[ -f "$prefix/pyvenv.cfg" ] || "$python" -m venv "$prefix"
pip() { "$prefix/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --require-hashes -r "$lock" || fail "pip could not install $lock: its own settings say from where (pip config list)"
pip install --no-deps --no-index --force-reinstall "$wheel"
if [ -n "$gpu" ]; then pip install --require-hashes -r "$of_gpu" || fail "pip could not install $of_gpu"; fi

# Debian's bindings of Ceph are extension files for Debian's Python: linked one by one, as in the image.
site=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
missing=()
for module in rados rbd cephfs; do
  found=
  for file in /usr/lib/python3/dist-packages/"$module"."$("$prefix/bin/python" -c 'import sys; print(sys.implementation.cache_tag)')"*.so; do
    [ -e "$file" ] && ln -sf "$file" "$site/" && found=yes
  done
  [ -n "$found" ] || missing+=("python3-$module")
done
for each in ceph-fuse:ceph-fuse modprobe:kmod; do
  command -v "${each%:*}" >/dev/null || missing+=("${each#*:}")
done
"$prefix/bin/python" -c 'import ctypes; ctypes.CDLL("libbpf.so.1")' 2>/dev/null || missing+=(libbpf1)

unit=$root/etc/systemd/system/nodeagent.service settings=$root/etc/nodeagent/nodeagent.yaml
mkdir -p "$(dirname "$unit")"
install -d -m 0750 "$(dirname "$settings")"
sed "s#/opt/nodeagent#$prefix#g" "$here/nodeagent.service" >"$unit.new"
mv "$unit.new" "$unit"
if [ ! -e "$settings" ]; then
  cat >"$settings" <<'END'
# docs/settings.md has every setting; 'nodeagent config check FILE' says what is wrong.
cache:
  store: /var/lib/nodeagent/store   # on the SSD
  views: /var/lib/nodeagent/views   # jobs read <views>/NAME/data
  reserve: 15%
  datasets: []
volumes:
  guard: {mode: dry-run}
END
  chmod 0640 "$settings"
fi
"$prefix/bin/nodeagent" config check "$settings" >/dev/null || fail "$settings cannot be used: see above"
say "$("$prefix/bin/nodeagent" --version) is in $prefix, its settings are $settings"
if [ ${#missing[@]} -gt 0 ]; then say "this host lacks ${missing[*]}: 'nodeagent doctor' says what each costs"; fi
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
  # The modules that a running agent has not read yet are another version's now.
  { systemctl daemon-reload && systemctl try-restart nodeagent; } ||
    fail "systemd could not restart the agent: systemctl status nodeagent; journalctl -u nodeagent"
fi
if [ -z "$root" ]; then say "next: $prefix/bin/nodeagent doctor, then systemctl enable --now nodeagent"; fi
