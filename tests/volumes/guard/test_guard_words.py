"""Which command lines of programs that may also format pass the guard, asked of the kernel."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import blockdev, cell, grave
from volumes import settings

pytestmark = pytest.mark.real

_LONG = "/" + "k" * 126  # with its end 128 bytes, as much as the program reads at once
_SOURCE = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
int main(void) { puts(open(getenv("DEVICE"), O_RDWR) >= 0 ? "passes" : "refused"); return 0; }
"""

# The command is the first argument that is neither an option nor an option's value.
PASSES = (
    "cryptsetup luksOpen D name",
    "cryptsetup open D name",
    "cryptsetup --type luks2 open D name",
    "cryptsetup --type=luks2 open D name",
    "cryptsetup -M luks2 open D name",
    "cryptsetup -q open --type luks2 D name",
    "cryptsetup -q -v --debug open D name",
    "cryptsetup --key-file /key luksOpen D name",
    "cryptsetup -d /key luksOpen D name",
    "cryptsetup -d - luksOpen D name",
    "cryptsetup --key-file=- luksOpen D name",
    f"cryptsetup --key-file {_LONG} luksOpen D name",
    f"cryptsetup --key-file {_LONG}k luksOpen D name",
    f"cryptsetup --key-file {_LONG * 3} luksOpen D name",
    f"cryptsetup --header={_LONG} luksOpen D name",
    "cryptsetup --header /h --key-slot 1 --tries 1 --timeout 5 luksOpen D name",
    "cryptsetup --allow-discards --perf-no_read_workqueue luksOpen D name",
    "cryptsetup --token-id 0 --token-type x open D name",
    "cryptsetup --readonly open D name",
    "cryptsetup --disable-keyring luksOpen D csi-vol-1",
    "cryptsetup open -c aes -s 256 -h plain --type plain D name",
    "cryptsetup -c aes -s 256 -h plain --type plain open D name",
    "cryptsetup --size 100 resize name",
    "cryptsetup -q --key-file /old luksAddKey D /new",
    "cryptsetup luksAddKey --key-slot 1 D /new",
    "cryptsetup --new-keyfile-size 8 luksChangeKey D /new",
    "cryptsetup luksKillSlot D 0",
    "cryptsetup --disable-keyring luksResume name",
    "cryptsetup -- luksOpen D name",
    "cryptsetup luksOpen D luksFormatted",
    "btrfs check --repair D",
    "btrfs --format json check D",
    "btrfs --log debug -q check D",
    "btrfs rescue zero-log D",
    "btrfs -v rescue super-recover D",
)
REFUSED = (
    "cryptsetup luksFormat D",
    "cryptsetup -q luksFormat D",
    "cryptsetup -q --label open luksFormat D",
    "cryptsetup --label=open luksFormat D",
    "cryptsetup -q --subsystem luksOpen luksFormat D",
    "cryptsetup --key-file open luksFormat D",
    "cryptsetup -d open luksFormat D",
    "cryptsetup -qd open luksFormat D",
    "cryptsetup --a-new-option open luksFormat D",
    f"cryptsetup --label {_LONG}open luksFormat D",
    f"cryptsetup --label {_LONG}luksOpen luksFormat D",
    f"cryptsetup {_LONG}open luksFormat D",
    f"cryptsetup {_LONG}open D",
    "cryptsetup open --label luksFormat D",
    "cryptsetup open D luksFormat",
    "cryptsetup reencrypt --encrypt D",
    "cryptsetup --type luks2 reencrypt D",
    "cryptsetup --label open reencrypt D",
    "cryptsetup --header open erase D",
    "cryptsetup luksErase D",
    "cryptsetup --label open luksErase D",
    "cryptsetup --label open repair D",
    "cryptsetup --header-backup-file open luksHeaderRestore D",
    "cryptsetup --label open convert D",
    "cryptsetup --label open config D",
    "cryptsetup --uuid open luksUUID D",
    "cryptsetup luksRemoveKey D",
    "cryptsetup OPEN D",
    "cryptsetup",
    "cryptsetup -q",
    "cryptsetup --label open",
    "cryptsetup " + "-q " * 200 + "open D",
    "cryptsetup open D name " + "-q " * 200 + "luksFormat",
    "cryptsetup-reencrypt open D",
    "btrfs device add -f D /mnt",
    "btrfs --format check device add -f D /mnt",
    "btrfs --log rescue replace start D /mnt",
    "btrfs chec D",
    "mkfs.ext4 open D",
    "dd if=/dev/zero of=D",
    "sh open D",
)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    image = blockdev.blank(tmp_path_factory.mktemp("disk") / "image", blockdev.MiB)
    with blockdev.loop(image) as made:
        yield made


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Opens the device for writing, whatever its arguments are."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "open.c").write_text(_SOURCE)
    blockdev.run("clang", "-o", str(folder / "open"), str(folder / "open.c"))
    return folder


@pytest.mark.parametrize(
    ("line", "answer"),
    [*((line, "passes") for line in PASSES), *((line, "refused") for line in REFUSED)],
)
def test_guard_knows_the_command_of_a_line(
    guarded: cell.Cell, device: str, program: Path, line: str, answer: str
) -> None:
    name, *arguments = (device if word == "D" else word for word in line.split())
    called = program / name  # of a script or a link the kernel keeps the name
    called.unlink(missing_ok=True)
    called.hardlink_to(program / "open")
    done = guarded.run("env", f"DEVICE={device}", str(called), *arguments)
    with grave.missing_denial():
        assert done.stdout.strip() == answer or answer == "passes"
    assert done.stdout.strip() == answer, done.stderr


def test_options_with_a_value_are_those_of_the_installed_programs() -> None:
    said = blockdev.run("cryptsetup", "--help").stdout
    options = re.findall(r"^ +(?:(-\w), )? *(--[\w-]+)(=?)", said, re.MULTILINE)
    take = {text for short, long, equals in options if equals for text in (short, long) if text}
    flags = {text for short, long, equals in options if not equals for text in (short, long)}
    assert len(take) > 50
    assert take <= set(settings.TAKE_VALUE["cryptsetup"])
    assert not flags & set(settings.TAKE_VALUE["cryptsetup"])


def test_words_that_never_pass_are_no_setting() -> None:
    for program, texts in settings.NEVER.items():
        for text in texts:
            with pytest.raises(ValueError, match="allow-format"):
                settings.GuardSettings(words=(f"{program} {text}",))
