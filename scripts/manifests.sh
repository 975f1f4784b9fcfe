#!/usr/bin/env bash
# Render the plain manifests from the chart, for clusters without helm. A test keeps them equal.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^kubernetes=\([0-9.]*\) .*/\1/p' scripts/kubernetes.sh)
helm=${NODEAGENT_CACHE:-$HOME/.cache/nodeagent}/kubernetes/$version/bin/helm
{
  echo "# Made from deploy/chart by scripts/manifests.sh. Do not edit."
  "$helm" template nodeagent deploy/chart --namespace nodeagent --set createNamespace=true |
    grep -v '^# Source:'
} >"${1:-deploy/manifests/nodeagent.yaml}"
