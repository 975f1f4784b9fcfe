#!/usr/bin/env bash
# The kinds of others that examples/ and the chart use, as their projects publish them: CustomResourceDefinitions out of
# the modules of the Go module proxy, into the cache folder outside the clone. Of Volcano the proxy has only the Go types.
# 90 MB of modules the first time. Idempotent, quiet when they are there. Needs go.
#   ${NODEAGENT_CACHE:-~/.cache/nodeagent}/job-kinds/VERSIONS/{*.{yaml,go},chart/*.yaml}
. "$(dirname "$0")/steps.sh"
ray=1.5.0 trainer=2.0.0 argo=3.6.10 volcano=1.12.1 prometheus=0.85.0 certs=1.18.2

folder=${NODEAGENT_CACHE:-$HOME/.cache/nodeagent}/job-kinds/ray$ray-trainer$trainer-argo$argo-volcano$volcano-prometheus$prometheus-certs$certs
[ "${1:-}" = --where ] && { echo "$folder"; exit 0; }
[ -d "$folder" ] && exit 0
need_go "its module proxy has the kinds of examples/ and the chart"
mkdir -p "$folder.new.$$"
trap 'rm -rf "$folder.new.$$"' EXIT

# take MODULE@VERSION FILE...: files of a module, into this folder.
take() {
  local home file
  download "the Go module proxy (GOPROXY)" go mod download "$1"
  home=$(go mod download -json "$1" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  for file in "${@:2}"; do install -m 0644 "$home/$file" .; done
}
cd "$folder.new.$$"  # no go.mod of ours around
take "github.com/ray-project/kuberay/ray-operator@v$ray" config/crd/bases/ray.io_ray{jobs,clusters}.yaml
take "github.com/kubeflow/trainer/v2@v$trainer" manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml
take "github.com/argoproj/argo-workflows/v3@v$argo" manifests/base/crds/full/argoproj.io_workflows.yaml
take "volcano.sh/apis@v$volcano" pkg/apis/batch/v1alpha1/job.go
mkdir chart; cd chart
take "github.com/prometheus-operator/prometheus-operator@v$prometheus" \
  example/prometheus-operator-crd/monitoring.coreos.com_{podmonitors,prometheusrules}.yaml
take "github.com/cert-manager/cert-manager@v$certs" deploy/crds/crd-certificates.yaml
mv -T "$folder.new.$$" "$folder" 2>/dev/null || [ -d "$folder" ]  # another clone was faster
