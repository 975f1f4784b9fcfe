#!/bin/bash
# Slurm's Epilog, as root on each node of a job: lets go of what prolog.sh holds for it.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin   # Slurm sets none
holds=${NODEAGENT_HOLDS:-/run/nodeagent-slurm}
[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || exit 0
[ -f "$holds/$SLURM_JOB_ID" ] || exit 0
while read -r pid _; do
  # The number may be another process's by now.
  [[ $pid =~ ^[0-9]+$ ]] && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "^nodeagent-hold-$SLURM_JOB_ID " &&
    kill -- "-$pid"   # and its sleep: the hold leads a group of its own
done <"$holds/$SLURM_JOB_ID"
rm -f "$holds/$SLURM_JOB_ID" "$holds/$SLURM_JOB_ID.datasets"
exit 0
