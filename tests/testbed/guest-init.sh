#!/bin/sh
# First process of the test guest: the host's root, read-only over 9p, with a tmpfs for what is
# written; then the script that came on the kernel's command line.
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for m in crc32c_generic virtio_pci virtio_net 9pnet_virtio 9p overlay; do modprobe $m; done
ip link set lo up; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose host /host
mount -t tmpfs tmpfs /rw; mkdir -p /rw/u /rw/w
mount -t overlay overlay -o lowerdir=/host,upperdir=/rw/u,workdir=/rw/w /new
mount -t proc proc /new/proc; mount -t sysfs sys /new/sys; mount -t devtmpfs dev /new/dev
mount -t cgroup2 cgroup2 /new/sys/fs/cgroup; mount -t tmpfs tmpfs /new/tmp; mount -t tmpfs tmpfs /new/run
mkdir -p /new/lib/modules /new/dev/shm; mount -o bind /lib/modules /new/lib/modules
mkdir -p /work /rw/mu /rw/mw
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose work /work
mount -t overlay overlay -o lowerdir=/work,upperdir=/rw/mu,workdir=/rw/mw /new/mnt
# The checkout may lie below a folder that was just covered, /tmp for example.
checkout=$(cat /work/guest-checkout)
[ -e "/new$checkout/pyproject.toml" ] ||
  { mkdir -p "/new$checkout" && mount -o bind "/host$checkout" "/new$checkout"; }
for word in $(cat /proc/cmdline); do case $word in script=*) script=${word#script=};; esac; done
echo "guest: running $script"
# The first process goes into the new root itself: its mounts and its root are the host's here.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec chroot /new /bin/bash -c \
  '/bin/bash "$0" 2>&1; echo "guest: exit $?"; exec busybox poweroff -f' "$script"
