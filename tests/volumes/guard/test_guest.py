"""Real krbd: the core of the accident and of the matrix on /dev/rbd0, in a guest with Debian's
kernel (6.1), the guard attached at the root of its cgroup hierarchy."""

from pathlib import Path

import pytest

from tests.testbed import guest

pytestmark = [pytest.mark.real, pytest.mark.guest, pytest.mark.timeout(600)]

_SCRIPT = Path(__file__).with_name("guest_replay.py")
_STAGES = Path(__file__).with_name("guest_stage.py")


def test_the_accident_and_the_matrix_on_real_krbd(tmp_path: Path) -> None:
    result, fsid = guest.replay(
        _SCRIPT,
        tmp_path,
        (
            *("control", "blank", "secret-luks1", "secret-luks2", "raw", "raw2"),
            *("nbd-blank", "nbd-other"),
        ),
        "320M",
    )
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
    raw = [line.removeprefix("raw ") for line in said if line.startswith("raw ")]
    assert raw == [
        *("while published True", "without an agent True", "same number True", "next device False"),
    ]
    for kind in ("luks1", "luks2"):
        luks = [line.removeprefix(f"{kind} ") for line in said if line.startswith(f"{kind} ")]
        for expected in (
            *("formatted after a refusal True", "opened 0", "guarded at once True"),
            *("mounted True", "key rotation 0", "old key removed 0", "resize 0", "grown 0"),
            *("reformat denied True", "luksFormat denied True", "accident EPERM True"),
            *("again 0", "data True"),
        ):
            assert expected in luks, (kind, expected, luks)
        of_mapping = [line for line in luks if line.startswith(f"volume rbd:{fsid}/")]
        assert len(of_mapping) == 1 and f"+CRYPT-{kind.upper()}" in of_mapping[0], of_mapping
    assert "another mapping formatted 0" in said
    nbd = [line.removeprefix("nbd ") for line in said if line.startswith("nbd ")]
    assert nbd == [
        "blank mounted True",
        "volume nbd:0001-0009-ceph-csi-0000000000000001-nbd-blank",
        *("image nbd-blank", "unmap in use RefusedError"),
        *("same device True", "other denied True", "other still denied True"),
        *("reformat denied True", "mounted again 0"),
    ]
    assert any(line.startswith(f"volume rbd:{fsid}/") for line in said)


def test_new_volumes_are_formatted_although_ceph_csi_undoes_a_refused_stage(tmp_path: Path) -> None:
    images = ("plain", "secret", "left", "full", "last")
    result, _ = guest.replay(_STAGES, tmp_path, images, "64M")
    print(result.text)
    assert result.exit == 0, result.text[-4000:]
    assert result.marked("check") == [
        *("plain mounted True refused first True", "plain detached True"),
        "secret mounted True refused twice True",
        *("left mounted, held (False, True)", "left detached True"),
        "full denied True detached True",
        "last detached True",
    ]
