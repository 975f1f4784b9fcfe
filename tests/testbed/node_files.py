"""What the programs of the Kubernetes testbed are started with: certificates, the node's script,
containerd's settings."""

CERTIFICATES = """\
openssl genrsa -out sa.key 2048
openssl rsa -in sa.key -pubout -out sa.pub
openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=ca -days 2
one() {
  openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2"
  echo "subjectAltName=$3" >"$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 \\
    -out "$1.crt" -extfile "$1.ext"
}
one api /CN=kube-apiserver IP:127.0.0.1,IP:10.96.0.1,DNS:kubernetes.default
one admin /O=system:masters/CN=admin DNS:admin
one node /O=system:nodes/CN=system:node:localhost IP:127.0.0.1,DNS:localhost
"""

# Runs as pid 1 of the node, in its mount namespace, and stays.
NODE_SCRIPT = """\
set -e
mount --make-rshared /
mount -o barrier=0 {disk} {folder}/disk  # no test cuts its power, and each flush waits for a disk
losetup -d {disk}  # once nothing uses it any more
cd {folder}/disk
for each in etc opt var; do
  mkdir -p $each $each.work
  mount -t overlay -o lowerdir=/$each,upperdir=$each,workdir=$each.work overlay /$each
done
mount -t tmpfs -o mode=755 tmpfs /run
mount -t bpf bpf /sys/fs/bpf
mkdir -p /run/containerd /run/log /etc/containerd/certs.d
for each in containerd kubelet nodeagent; do
  mkdir -p lib/$each /var/lib/$each
  mount --bind lib/$each /var/lib/$each
done
mkdir -p mnt
mount --bind mnt /mnt
mount -t tmpfs tmpfs /var/log
cp -r {folder}/certs.d/. /etc/containerd/certs.d/
cp {folder}/kubelet.yaml /var/lib/kubelet/config.yaml
cd /
containerd --config {folder}/containerd.toml >{folder}/containerd.log 2>&1 &
until ctr --timeout 2s version >/dev/null 2>&1; do sleep 0.1; done
[ ! -e {boot} ] || sh {boot} >{folder}/boot.log 2>&1 || true
while :; do
  {bin}/kubelet --config /var/lib/kubelet/config.yaml --kubeconfig {folder}/pki/node.kubeconfig \\
    --hostname-override localhost --root-dir /var/lib/kubelet --v 1 \\
    >>{folder}/kubelet.log 2>&1 || true
  sleep 0.2
done
"""

CONTAINERD = """\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.nri.v1.nri"]
[grpc]
  address = "/run/containerd/containerd.sock"
[ttrpc]
  address = "/run/containerd/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "/etc/containerd/certs.d"
"""
# containerd 2 does not take these over from the names above.
NEWER = """\
[plugins."io.containerd.cri.v1.images".registry]
  config_path = "/etc/containerd/certs.d"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{pause}"
"""
