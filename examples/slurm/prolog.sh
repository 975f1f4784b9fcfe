#!/bin/bash
# Slurm's Prolog, as root on each node of a job. The job names its datasets in its comment:
#   sbatch --comment=dataset=coco,imagenet train.sh
# For each the agent is asked to fill (a fill that runs goes on), unless an operator stopped that, and a process
# stands in the view until the job's end, so that the dataset counts as used and gives up no room. What goes wrong is
# said in the log and to nobody else: a Prolog that fails drains the node, and a slip in a comment must not.
# Nothing here touches a view, which would hang with a Ceph that does not answer, and no signal ends that.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin   # Slurm sets none
nodeagent=${NODEAGENT:-/opt/nodeagent/bin/nodeagent}
views=${NODEAGENT_VIEWS:-/var/lib/nodeagent/views}
holds=${NODEAGENT_HOLDS:-/run/nodeagent-slurm}
longest=${NODEAGENT_HOLD_SECONDS:-2592000}   # 30 days: no job's time limit is longer
every=${NODEAGENT_HOLD_EVERY:-20}
longest_here=60   # seconds of a Prolog; the job waits for it
say() { logger -t nodeagent-prolog -- "job ${SLURM_JOB_ID:-?}: $*" 2>/dev/null || echo "nodeagent-prolog: $*" >&2; }

case ${SLURM_JOB_COMMENT:-} in dataset=*) ;; *) exit 0 ;; esac
[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || exit 0
mkdir -p "$holds" && chmod 0755 "$holds" || exit 0
# A second Prolog of one job (it was requeued, slurmd began anew) adds to the first one's holds.
: >>"$holds/$SLURM_JOB_ID" && : >>"$holds/$SLURM_JOB_ID.datasets" || exit 0
held() {
  local pid name
  while read -r pid name; do
    [ "$name" = "$1" ] && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "^nodeagent-hold-$SLURM_JOB_ID " &&
      return 0
  done <"$holds/$SLURM_JOB_ID"
  return 1
}
fill() {   # paused, cancelled, evicted and removed are an operator's word, and 'warm' would undo it
  answer=$(timeout -k 5 20 "$nodeagent" dataset show "$1" 2>&1) || return
  [[ $answer =~ (^|$'\n')state\ +(paused|cancelled|evicted|removed) ]] && { answer="it is ${BASH_REMATCH[2]}"; return 1; }
  answer=$(timeout -k 5 20 "$nodeagent" dataset warm "$1" 2>&1)
}
IFS=, read -ra names <<<"${SLURM_JOB_COMMENT#dataset=}"
for name in "${names[@]:0:16}"; do
  if ! [[ $name =~ ^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$ ]]; then
    say "'$name' is not a dataset's name"
    continue
  fi
  # For task-prolog.sh, which Slurm gives no comment.
  grep -qxF "$name" "$holds/$SLURM_JOB_ID.datasets" || echo "$name" >>"$holds/$SLURM_JOB_ID.datasets"
  if [ "$SECONDS" -ge "$longest_here" ]; then say "$name is not filled: the agent took too long for those before"
  elif ! fill "$name"; then say "$name is not filled: ${answer:0:300}"; fi
  [ -d "$views/$name" ] || { say "$name has no view at $views/$name"; continue; }
  held "$name" && continue
  # It enters the view again and again: the mount there is another one once more of the dataset is on the SSD.
  # Nothing of the job's is open: slurmd waits for whoever has its pipes.
  setsid bash -c 'exec -a "nodeagent-hold-$0" bash -c "$3" nodeagent-hold "$1" "$2" "$4"' "$SLURM_JOB_ID" \
    "$views/$name/data" "$longest" 'while [ "$SECONDS" -lt "$2" ]; do cd "$1" || cd /; sleep "$3"; done' "$every" \
    </dev/null >/dev/null 2>&1 &
  echo "$! $name" >>"$holds/$SLURM_JOB_ID"
  # Until it has its name: an Epilog that comes at once would take it for another's.
  for _ in {1..100}; do held "$name" && break; sleep 0.05; done
done
exit 0
