"""How commands name a device."""

import pytest

from volumes import commands


@pytest.mark.parametrize(
    ("given", "path"),
    [("/dev/rbd4", "/dev/rbd4"), ("rbd4", "/dev/rbd4"), ("./disk", "./disk")],
)
def test_device_is_named_by_its_path_or_its_name(given: str, path: str) -> None:
    assert commands.path_of(None, None, given) == path
