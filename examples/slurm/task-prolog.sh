#!/bin/bash
# Slurm's TaskProlog, as the job's user: sets DATASET_NAME (upper case, '_' for '-' and '.') to the directory of each
# dataset that prolog.sh found in the job's comment. Slurm takes lines 'export NAME=VALUE' and 'print TEXT' from it.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin   # Slurm sets none
views=${NODEAGENT_VIEWS:-/var/lib/nodeagent/views}
holds=${NODEAGENT_HOLDS:-/run/nodeagent-slurm}
[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] && [ -r "$holds/$SLURM_JOB_ID.datasets" ] || exit 0
while read -r name; do
  variable=${name^^}
  # Not of the view itself, which would hang with a Ceph that does not answer.
  if [ -d "$views/$name" ]; then
    echo "export DATASET_${variable//[.-]/_}=$views/$name/data"
  else
    echo "print nodeagent: this node does not serve the dataset '$name'; as root 'nodeagent dataset list' says what it has"
  fi
done <"$holds/$SLURM_JOB_ID.datasets"
exit 0
