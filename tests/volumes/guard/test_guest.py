"""Real krbd: the core of the accident and of the matrix on /dev/rbd0, in a guest with Debian's
kernel (6.1), the guard attached at the root of its cgroup hierarchy."""

from pathlib import Path

import pytest

from tests.testbed import guest

pytestmark = [pytest.mark.real, pytest.mark.guest, pytest.mark.timeout(600)]

_SCRIPT = Path(__file__).with_name("guest_replay.py")


def test_the_accident_and_the_matrix_on_real_krbd(tmp_path: Path) -> None:
    with guest.with_cluster(tmp_path) as (backend, folder):
        backend.run("rbd", "pool", "init", "rbd")
        for image in ("control", "blank"):
            backend.run("rbd", "create", "--size", "320M", f"rbd/{image}")
        script = (
            f"{guest.environment()}modprobe -a rbd ext4 xfs\n"
            f"python {_SCRIPT} {backend.monitor} {backend.secret()} /mnt/ceph.conf\n"
        )
        result = guest.run(script, folder, timeout=420)

    said = result.marked("check")
    assert result.exit == 0, result.text[-4000:]
    assert "control mkfs 0 mounted True" in said
    assert "status enforce enforced whole True" in said
    assert any(line.startswith("blank mounted True") for line in said)
    assert "resize2fs while mounted 0" in said
    denied = [line for line in said if line.startswith("denied ")]
    assert len(denied) == 8 and all(line.endswith("True") for line in denied), denied
    assert "allowed fsck 0" in said and "allowed unmap True" in said
    assert "accident found '' mkfs 1 EPERM True" in said
    assert any("content-missing" in line for line in said if line.startswith("findings ")), said
    assert "data True" in said
    assert "metadata content extents content" in said
    assert any(line.startswith(f"volume rbd:{backend.fsid}/") for line in said)
