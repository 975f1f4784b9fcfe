"""Part of test_claims: real disks (scsi_debug) and the device mapper, on Debian's kernel."""

import json
import os
from pathlib import Path

from tests.testbed import waiting
from tests.volumes.audit.world import scene
from tests.volumes.guard.guest_shell import run, say
from volumes.audit.inventory import scan
from volumes.audit.rules import mounting

KUBELET = Path("/run/kubelet")
CSI = KUBELET / "plugins/kubernetes.io/csi"
KEY = "/run/key"
LUKS = ("--type", "luks2", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000")


def disks() -> list[str]:
    """Three new ones."""
    before = set(os.listdir("/sys/block"))
    run("modprobe", "scsi_debug", "dev_size_mb=48", "add_host=3", "per_host_store=1")
    waiting.until(lambda: len(set(os.listdir("/sys/block")) - before) == 3, 60.0, "the disks")
    return sorted(set(os.listdir("/sys/block")) - before)


def staged(handle: str, node: str) -> None:
    home = CSI / "disk.csi.example" / handle
    (home / "globalmount").mkdir(parents=True)
    record = {"driverName": "disk.csi.example", "volumeHandle": handle}
    (home / "vol_data.json").write_text(json.dumps(record))
    say(f"mounted {handle} {run('mount', node, str(home / 'globalmount')).returncode}")


def published(handle: str, node: str) -> None:
    data = CSI / "volumeDevices" / handle / "data"
    data.mkdir(parents=True)
    record = {"driverName": "disk.csi.example", "volumeHandle": handle, "specVolID": handle}
    (data / "vol_data.json").write_text(json.dumps(record))
    (KUBELET / "pods/uid").mkdir(parents=True)
    target = CSI / "volumeDevices/publish" / handle / "uid"
    target.parent.mkdir(parents=True)
    target.touch()
    say(f"published {handle} {run('mount', '--bind', node, str(target)).returncode}")


KEPT = scan.Kept()


def told(when: str, changed: tuple[str, ...]) -> None:
    request = scan.Request(
        ("rbd",), str(KUBELET), "/proc", "/sys", "/none", deep=False, changed=changed
    )
    at = scene(inventory=scan.scan(request, KEPT))
    for rule in (mounting.two_claims_one_device, mounting.claim_device_gone):
        found = rule.judge(at)
        said = [f"{trouble.key} {trouble.subject}" for trouble in found.troubles]
        say(f"{when} {rule.name} {sorted(said)} {found.unknown}".strip())


def main() -> None:
    os.environ["DM_DISABLE_UDEV"] = "1"
    Path(KEY).write_bytes(b"k" * 64)
    plain, secret, raw = disks()
    run("mkfs.ext4", "-q", "-F", f"/dev/{plain}")
    staged("plain", f"/dev/{plain}")
    run("cryptsetup", "-q", "luksFormat", *LUKS, f"/dev/{secret}", "-d", KEY)
    run("cryptsetup", "luksOpen", f"/dev/{secret}", "c", "--disable-keyring", "-d", KEY)
    run("mkfs.ext4", "-q", "-F", "/dev/mapper/c")
    staged("secret", "/dev/mapper/c")
    published("raw", f"/dev/{raw}")
    told("there", (plain, secret, raw, "dm-0"))
    for name in (plain, secret, raw):
        Path(f"/sys/block/{name}/device/delete").write_text("1")
    say(f"unplugged {not any(Path('/sys/block', name).exists() for name in (plain, secret, raw))}")
    told("unplugged", (plain, secret, raw))


main()
