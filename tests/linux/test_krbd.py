from pathlib import Path

import pytest

from linux import krbd


@pytest.mark.parametrize(
    ("code", "said"), [(0, "rbd-nbd is not used"), (1, "no module nbd either")]
)
def test_kernel_without_a_client_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    modprobe = tmp_path / "modprobe"
    modprobe.write_text(f'#!/bin/sh\n[ "$*" = "-n -q nbd" ] && exit {code}\nexit 2\n')
    modprobe.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert said in krbd.lacking() and "no RBD client (module rbd)" in krbd.lacking()
