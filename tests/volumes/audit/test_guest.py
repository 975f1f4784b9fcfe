"""Real krbd, in a guest with Debian's kernel (6.1: before the kernel listed mount namespaces)."""

from pathlib import Path

import pytest

from tests.testbed import guest

pytestmark = [pytest.mark.real, pytest.mark.guest, pytest.mark.timeout(600)]

_SCRIPT = Path(__file__).with_name("guest_audit.py")


def test_the_audit_on_real_kernel_mappings(tmp_path: Path) -> None:
    result, _ = guest.replay(_SCRIPT, tmp_path, ("vol1", "vol2"), "128M")
    said = result.marked("check")
    assert result.exit == 0, "\n".join(said)
    assert "device rbd/vol1 read-only False fsid client True" in said
    assert "device rbd/vol2 read-only True fsid client True" in said
    assert "device rbd/vol1@s1 read-only True fsid client True" in said
    assert "features known True" in said
    assert "our watcher is our mapping True" in said
    assert "a read-only mapping leaves 0 watchers" in said
    assert "mapped-elsewhere 0" in said
    assert "mapped-twice 0" in said
    assert "leak True pid True" in said
    assert "unmap 16 rbd: unmap failed: (16) Device or resource busy" in said
    assert "unmap-failing True True" in said
    assert "act done holder alive True" in said
    assert "unmap after 0" in said
    assert "blocklisted-client found" in said
    assert "log-rbd-io-error True" in said
    assert "same client 2" in said
    assert "mounted one stays True" in said
    steps = "unmap begun, unmap done, probe begun, probe done, release begun, release done"
    assert f"repair {steps}" in said, said
    assert "data True" in said
    patterns = next(line for line in said if line.startswith("patterns "))
    for expected in ("rbd-io-error", "block-io-error"):
        assert expected in patterns, result.marked("kernel")
