"""Our systemd units on this host, for ``nodeagent uninstall``.

A unit does not start when it requires one that does not exist. So each link that makes kubelet, k3s
or RKE2 require a unit of ours goes before the unit does, and a unit that another file requires by
name counts as in use. What only bears our name, and drop-ins, which are an operator's, stay.
"""

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from kit.traces import Trace

SYSTEMD = Path("/etc/systemd/system")
MODULES = Path("/etc/modules-load.d/nodeagent-guard.conf")
GUARD = "nodeagent-guard.service"
# What each of our units executes, after options.
_COMMANDS = {"nodeagent.service": ("run",), GUARD: ("volume", "guard", "attach")}
_LINK_FOLDERS = ("*.wants", "*.requires", "*.upholds")
# A unit with such a line does not start without the units that the line names.
_NEEDS = re.compile(r"^[ \t]*(?:Requires|Requisite|BindsTo)[ \t]*=(.*)$", re.MULTILINE)
_CONTINUED = re.compile(r"\\\n(?:[ \t]*[#;].*\n)*")  # comments may come between
_MOST_BYTES = 1 << 20  # of a unit file that is looked at
_MODULES = {"rbd", "nbd"}


def find(systemd: Path = SYSTEMD, modules: Path = MODULES) -> list[Trace]:
    """In the order in which they are to be removed."""
    found = [trace for name in _COMMANDS for trace in _unit(systemd, name)]
    if os.path.lexists(modules):
        words = {line.strip() for line in _text(modules).splitlines() if not line.startswith("#")}
        why = "" if words <= {"", *_MODULES} else "it names other modules than ours"
        found.append(Trace("file", str(modules), stays=why))
    return found


def _unit(systemd: Path, name: str) -> Iterator[Trace]:
    file = systemd / name
    present = os.path.lexists(file)
    ours = _is_ours(file)
    if ours or not present:
        for link in _links(systemd, name):
            # A link to a unit elsewhere, a package's say, is good as long as that unit is there.
            if ours or _is_beside(link):
                yield Trace("link", str(link))
    if present:
        why = "" if ours else "it does not run this program"
        users = _needed_by(systemd, name) if ours else ()
        yield Trace("file", str(file), users, stays=why)
    for drop_in in sorted(systemd.glob(f"{name}.d/*")):
        yield Trace("file", str(drop_in), stays="an operator's drop-in")


def _links(systemd: Path, name: str) -> list[Path]:
    """``systemctl enable --runtime`` makes them below /run, until the next boot."""
    above = (systemd, _elsewhere(systemd, "run"))
    folders = sorted(f for each in _LINK_FOLDERS for path in above for f in path.glob(each))
    return [folder / name for folder in folders if (folder / name).is_symlink()]


def _elsewhere(systemd: Path, above: str) -> Path:
    """Another directory of units on the host that has ``systemd``."""
    return systemd.parents[2] / above / "systemd/system"


def _is_beside(link: Path) -> bool:
    """Whether it leads to a unit of the folder that its own folder is in."""
    # The folder's name on the host: this may look at it through another.
    return os.path.dirname(os.readlink(link)) in ("..", str(SYSTEMD), str(link.parent.parent))


def _is_ours(file: Path) -> bool:
    if file.is_symlink() and not file.exists():
        # "systemctl enable /opt/.../nodeagent-guard.service" from a container that lacks /opt.
        return file.name == GUARD and os.path.basename(os.readlink(file)) == GUARD
    command = " ".join(_COMMANDS[file.name])
    for line in _joined(file).splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "ExecStart" and (words := _words(value)):
            program = os.path.basename(words[0].lstrip("@-:+!"))
            if program == "nodeagent" and f" {command} " in f" {' '.join(words)} ":
                return True
    return False


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:  # a quotation that does not end
        return value.split()


def _needed_by(systemd: Path, name: str) -> tuple[str, ...]:
    """Other files that require the unit by name, a line each."""
    above = (systemd, *(_elsewhere(systemd, each) for each in ("run", "usr/local/lib", "usr/lib")))
    files = [file for path in above for each in ("*", "*.d/*.conf") for file in path.glob(each)]
    return tuple(
        f"{file}, which requires {name}"
        for file in sorted(files)
        if file.name != name and any(name in m.split() for m in _NEEDS.findall(_joined(file)))
    )


def _joined(file: Path) -> str:
    """Its text, each setting on one line."""
    return _CONTINUED.sub(" ", _text(file))


def _text(file: Path) -> str:
    """Empty for what is no file or cannot be read."""
    with contextlib.suppress(OSError):
        if file.is_file() and file.stat().st_size <= _MOST_BYTES:
            return file.read_text(errors="replace")
    return ""


def remove_link(link: Path) -> None:
    """And its folder, when nothing else is in it, as systemctl does."""
    link.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        link.parent.rmdir()
