#!/usr/bin/env bash
# Kubernetes, etcd, helm and csi-sanity for the tests, built from the Go module proxy into the cache folder outside the
# clone: a fresh clone does not build them again. 5 to 8 minutes and 4 GB of modules and build cache
# the first time; 500 MB of binaries stay. Idempotent, quiet when they are there. Needs go.
#   ${NODEAGENT_CACHE:-~/.cache/nodeagent}/kubernetes/<version>/bin/{csi-sanity,etcd,helm,kube-*,kubectl,kubelet}
. "$(dirname "$0")/steps.sh"
"$(dirname "$0")/job_kinds.sh"  # small, and needs the same proxy
kubernetes=1.34.2 etcd=3.6.4 helm=3.19.0 sanity=5.4.0

bin=${NODEAGENT_CACHE:-$HOME/.cache/nodeagent}/kubernetes/$kubernetes/bin
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl)
missing=()
for program in "${programs[@]}" etcd helm csi-sanity; do [ -x "$bin/$program" ] || missing+=("$program"); done
[ ${#missing[@]} -eq 0 ] && exit 0

need_go "it builds ${missing[*]} for the tests"
say "building ${missing[*]} into $bin, once: 5 to 8 minutes on two quiet cores, 4 GB of modules and build cache"
mkdir -p "$bin"
exec 9>"$bin/../lock"
flock 9  # two clones on one machine
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
export CGO_ENABLED=0 GOFLAGS=-mod=mod GOWORK=off

# module FOLDER: an empty module to build programs of other modules from.
module() { mkdir -p "$work/$1"; cd "$work/$1"; [ -f go.mod ] || quietly go mod init scratch; }

# build PROGRAM PACKAGE [LINKER FLAGS]: there only when it is whole.
build() {
  [ -x "$bin/$1" ] && return 0
  say "building $1"
  download "the Go module proxy (GOPROXY)" nice go build -trimpath -ldflags "-s -w ${3:-}" -o "$work/out/$1" "$2"
  mv "$work/out/$1" "$bin/$1"
}

# The staging modules: go.mod of k8s.io/kubernetes replaces them by its own folders, which a module that
# depends on it does not inherit. Their published versions are v0.MINOR.PATCH.
staging() {
  local home name
  download "the Go module proxy (GOPROXY)" go mod download "k8s.io/kubernetes@v$kubernetes"
  home=$(go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  while read -r name _; do go mod edit -replace "$name=$name@v0.${kubernetes#1.}"; done \
    < <(grep -oE '^\s*k8s\.io/\S+ => \./staging' "$home/go.mod")
}

minor=${kubernetes#1.} minor=${minor%.*}
flags=
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  flags+=" -X $package.gitVersion=v$kubernetes -X $package.gitMajor=1 -X $package.gitMinor=$minor"
  flags+=" -X $package.gitTreeState=clean"
done
module kubernetes
staging
go mod edit -require "k8s.io/kubernetes@v$kubernetes"
for program in "${programs[@]}"; do build "$program" "k8s.io/kubernetes/cmd/$program" "$flags"; done
module etcd
go mod edit -require "go.etcd.io/etcd/server/v3@v$etcd"
build etcd go.etcd.io/etcd/server/v3
module helm
staging  # the same libraries: their compiled packages are there
go mod edit -require "helm.sh/helm/v3@v$helm"
# What 'helm template' takes for the cluster's version; unset it is v1.20.
flags="-X helm.sh/helm/v3/internal/version.version=v$helm"
for package in pkg/chartutil pkg/lint/rules; do
  flags+=" -X helm.sh/helm/v3/$package.k8sVersionMajor=1 -X helm.sh/helm/v3/$package.k8sVersionMinor=$minor"
done
build helm helm.sh/helm/v3/cmd/helm "$flags"
module sanity
go mod edit -require "github.com/kubernetes-csi/csi-test/v5@v$sanity"
build csi-sanity github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity
