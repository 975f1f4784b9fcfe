#!/usr/bin/env bash
# Render the plain manifests from the chart, for clusters without helm. A test keeps them equal.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^kubernetes=\([0-9.]*\) .*/\1/p' scripts/kubernetes.sh)
helm=${NODEAGENT_CACHE:-$HOME/.cache/nodeagent}/kubernetes/$version/bin/helm
{
  echo "# Made from deploy/chart by scripts/manifests.sh. Do not edit."
  echo "# Put registry and repository of your image in place of registry.example/nodeagent."
  "$helm" template nodeagent deploy/chart --namespace nodeagent --no-hooks --set createNamespace=true \
    --set image.repository=registry.example/nodeagent |
    grep -v '^# Source:'
} >"${1:-deploy/manifests/nodeagent.yaml}"
