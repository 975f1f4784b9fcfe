#!/usr/bin/env bash
# The kernel and the initramfs of the test guest: a Debian kernel that has krbd, CephFS, nbd and the
# device mapper, which the machines that run the tests lack. Idempotent; needs apt-get, cpio, kmod, busybox.
#   scripts/guest.sh FOLDER
cd "$(dirname "$0")/.."
. scripts/steps.sh
out=${1:-build/guest}
modules="crc32c_generic crc32_generic libcrc32c virtio_pci virtio_net 9p 9pnet_virtio overlay loop
  ext4 xfs rbd ceph nbd sd_mod scsi_debug dm_mod dm_crypt xts ecb aes_generic sha256_generic algif_skcipher algif_hash"
[ -e "$out/initrd.gz" ] && [ "$out/initrd.gz" -nt scripts/guest.sh ] &&
  [ "$out/initrd.gz" -nt tests/testbed/guest-init.sh ] && exit 0
for tool in cpio depmod modprobe busybox; do
  command -v "$tool" >/dev/null || { say "guest.sh needs $tool (Debian: cpio, kmod, busybox-static)"; exit 1; }
done
rm -rf "$out"; mkdir -p "$out"
out=$(realpath "$out")
download "the archive in /etc/apt" apt-get update -qq  # the archive keeps the newest kernel only
package=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" {print $2; exit}')
download=$(mktemp -d); trap 'rm -rf "$download" "${tree:-}"' EXIT
chmod 755 "$download"
say "making the guest's kernel and initramfs from $package (about 20 s)"
(cd "$download" && download "the archive in /etc/apt" apt-get download -qq "$package" && dpkg -x ./*.deb root)
version=$(basename "$download"/root/boot/vmlinuz-* | cut -d- -f2-)
cp "$download/root/boot/vmlinuz-$version" "$out/vmlinuz"
source=$download/root
depmod -b "$source" "$version"
tree=$(mktemp -d)
mkdir -p "$tree"/{bin,dev,proc,sys,host,rw,new,"lib/modules/$version"}
cp "$(command -v busybox)" "$tree/bin/busybox"
for applet in sh mount modprobe ip mkdir poweroff chroot cat ln; do ln -s busybox "$tree/bin/$applet"; done
for module in $modules; do
  modprobe -d "$source" -S "$version" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
done | sort -u | while read -r file; do
  target=$tree/lib/modules/${file##*/lib/modules/}
  mkdir -p "$(dirname "$target")"; cp "$file" "$target"
done
cp "$source/lib/modules/$version"/modules.{builtin,order,builtin.modinfo} "$tree/lib/modules/$version/"
depmod -b "$tree" "$version"
cp tests/testbed/guest-init.sh "$tree/init"; chmod +x "$tree/init"
(cd "$tree" && find . | cpio -o -H newc --quiet | gzip -1) >"$out/initrd.new"
mv "$out/initrd.new" "$out/initrd.gz"
