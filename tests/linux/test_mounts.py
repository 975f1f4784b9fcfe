"""The mount calls on real overlays; names that need escaping among them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux import mountinfo, mounts

pytestmark = pytest.mark.real


@pytest.fixture
def target(area: Path) -> Iterator[Path]:
    made = area / "target"
    made.mkdir()
    yield made
    while mountinfo.at(str(made), mountinfo.read()):
        subprocess.run(["umount", "-l", str(made)], check=True)


def layer(area: Path, name: str, **files: str) -> Path:
    made = area / name
    made.mkdir(parents=True)
    for file, text in files.items():
        (made / file).write_text(text)
    return made


def overlay(area: Path, target: Path, *layers: Path) -> None:
    scratch = area / "scratch"
    scratch.mkdir(exist_ok=True)
    tree = mounts.overlay(layers, scratch)
    try:
        mounts.attach(tree, target)
    finally:
        os.close(tree)


@pytest.mark.parametrize("name", ["plain", "co:lon", "com,ma", "back\\slash", "long" * 60])
def test_overlay_shows_its_first_layer_first(area: Path, target: Path, name: str) -> None:
    upper = layer(area, name, a="upper")
    lower = layer(area, "lower", a="lower", b="lower")
    overlay(area, target, upper, lower)
    assert ((target / "a").read_text(), (target / "b").read_text()) == ("upper", "lower")
    (shown,) = mountinfo.at(str(target), mountinfo.read())
    assert mounts.shows_layer(shown.super_options, str(upper))
    assert not mounts.shows_layer(shown.super_options, str(area / "upp"))
    assert not mounts.shows_layer(shown.super_options, str(lower))
    assert {"ro", "nosuid", "nodev"} <= shown.options
    with pytest.raises(OSError):
        (target / "new").touch()


def test_overlay_refuses_paths_that_are_too_long(area: Path) -> None:
    deep = area / ("x" * 200) / ("y" * 200)
    with pytest.raises(OSError, match="too long together"):
        mounts.overlay([deep / str(number) for number in range(20)], area)


def test_new_filesystem_explains_a_failure(area: Path) -> None:
    with pytest.raises(OSError) as caught:
        mounts.new_filesystem("overlay", {"lowerdir": str(area / "none")})
    assert caught.value.filename == "mount of overlay" and caught.value.strerror


def test_swap_replaces_the_mount_and_open_files_keep_the_old_one(area: Path, target: Path) -> None:
    old, new = layer(area, "old", a="old"), layer(area, "new", a="new")
    overlay(area, target, old, layer(area, "lower"))
    with (target / "a").open() as reader:
        tree = mounts.overlay([new, area / "lower"], area / "scratch")
        beneath = mounts.swap(tree, target)
        os.close(tree)
        assert reader.read() == "old"
    assert (target / "a").read_text() == "new"
    assert len(mountinfo.at(str(target), mountinfo.read())) == (1 if beneath else 2)


def test_refresh_shows_what_was_added_to_the_upper_layer(area: Path, target: Path) -> None:
    upper, lower = layer(area, "upper"), layer(area, "lower", a="lower")
    overlay(area, target, upper, lower)
    assert (target / "a").read_text() == "lower"
    (upper / "a").write_text("upper")
    mounts.refresh(target)
    assert (target / "a").read_text() == "upper"


def test_unmount_is_refused_while_used_and_detach_is_not(area: Path, target: Path) -> None:
    overlay(area, target, layer(area, "one", a="one"), layer(area, "two"))
    with (target / "a").open() as reader:
        with pytest.raises(OSError, match="busy"):
            mounts.unmount(target)
        mounts.detach(target)
        assert mountinfo.at(str(target), mountinfo.read()) == [] and reader.read() == "one"


def test_bind_shared_makes_a_mount_point_that_propagates(target: Path) -> None:
    mounts.bind_shared(target)
    (shown,) = mountinfo.at(str(target), mountinfo.read())
    assert shown.shared is not None and not shown.is_private
