"""The kernel's own CephFS client, in a guest whose kernel has one."""

import pickle
from pathlib import Path

import pytest

from tests.testbed import guest, trees

pytestmark = [pytest.mark.real, pytest.mark.guest, pytest.mark.timeout(600)]

_SCRIPT = Path(__file__).with_name("guest_kernel_client.py")


def test_datasets_by_the_kernel_client(tmp_path: Path) -> None:
    with guest.with_cluster(tmp_path) as (backend, folder):
        with backend.mounted(tmp_path / "fs") as root:
            top = root / "data"
            trees.plain(top, 300, mean=6000)
            (top / "link").symlink_to("d0/f00000")
            (top / "empty").mkdir()
            snapshot = top / ".snap" / "v1"
            snapshot.mkdir()
            with (folder / "records").open("wb") as stream:
                pickle.dump(trees.records(snapshot), stream)
        (folder / "secret").write_text(backend.secret())
        address, port = backend.ip, backend.port_v2
        script = (
            f"{guest.environment()}modprobe -a ceph ext4 loop overlay\n"
            f"python {_SCRIPT} {backend.monitor} v2:{address}:{port} /mnt/secret /mnt/records\n"
        )
        result = guest.run(script, folder, timeout=420)

    said = result.marked("check")
    assert result.exit == 0, result.text[-4000:]
    for name in ("v1", "v2"):
        assert f"{name} ceph kernel" in said
        assert f"{name} complete []" in said
    assert "secret shown False" in said
    assert "without an agent []" in said
    assert "adopted True" in said
    reasons = {line.partition(":")[0]: line for line in said if ": dataset" in line}
    assert "is refused: wrong key" in reasons["key"]
    assert "there is no path /nowhere" in reasons["path"]
    assert "it has no snapshot 'nothing'" in reasons["snapshot"]
