# Sourced by the scripts of set-up: what they say, and why one ended. Not a program.
# A script that ends early names itself, the line and the command; 'quietly' shows what the command printed.
set -Eeuo pipefail

say() { printf 'setup: %s\n' "$*" >&2; }

step=  # the words of the step that is under way
_failed() { say "${0##*/} ended with $1${step:+ in the step \"$step\"}, ${2##*/} line $3: ${4%%$'\n'*}"; }
trap '_failed "$?" "${BASH_SOURCE[0]:-$0}" "$LINENO" "$BASH_COMMAND"' ERR

# step WORDS...: run them; say how long they took when there was something to do.
step() {
  local begin=$SECONDS
  step=$*
  "$@"
  step=
  [ $((SECONDS - begin)) -lt 2 ] || say "${1#scripts/} took $((SECONDS - begin)) s"
}

# quietly PROGRAM...: what it prints is kept, and its last lines are shown when it fails.
quietly() {
  local log status=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 || status=$?
  if [ "$status" != 0 ]; then
    tail -n 20 "$log" >&2
    say "failed with $status: $*; its whole output is in $log"
    return "$status"
  fi
  rm -f "$log"
}

# download WHERE PROGRAM...: quietly, and name what must be reachable over the network when it fails.
download() {
  local from=$1 status=0
  shift
  quietly "$@" || status=$?
  [ "$status" = 0 ] || say "it needs the network: $from must be reachable (address and proxy: its own settings, https_proxy)"
  return "$status"
}

# need_go WHY: ends the script that needs it.
need_go() { command -v go >/dev/null || { say "go is missing (1.24 or newer, in PATH): $1"; exit 1; }; }

# The archive that serves this machine's own release (its security and update pockets left out).
mirror() {
  apt-get indextargets --format '$(SITE) $(CODENAME)' 'Created-By: Packages' 'Origin: Debian' |
    awk '$2 !~ /-/ { print $1; exit }'
}
