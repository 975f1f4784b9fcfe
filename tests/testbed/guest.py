"""A guest machine with a distribution's kernel, under emulation: krbd, nbd, device mapper.

The guest sees the host's root read-only (what it writes goes to memory), so that the host's tools
and our environment run in it unchanged, and reaches addresses on the host's loopback through
10.0.2.2's network: give a cluster an address of its own with ``address()``.
"""

import contextlib
import os
import random
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import ceph, patience, waiting

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "guest"
MEMORY_MIB = 1536
ADDRESS_SECONDS = 7200.0  # longer than any test with a guest
# What guards a kernel against its programs is dear to emulate: without it, and with one processor,
# a guest needs a quarter less of the host's CPU.
CPU = "max,la57=off,smap=off,smep=off"
KERNEL = "console=ttyS0 quiet panic=-1 random.trust_cpu=on mitigations=off"


@dataclass(frozen=True)
class Result:
    """``exit``: of the script, None when the guest did not get that far; ``text``: its console."""

    exit: int | None
    text: str

    def marked(self, name: str) -> list[str]:
        """The texts of the script's lines ``name: text``."""
        return re.findall(rf"^{re.escape(name)}: (.*?)\r?$", self.text, re.MULTILINE)


def prepare() -> None:
    """RuntimeError when set-up has not made the kernel and the initramfs."""
    if not (FOLDER / "initrd.gz").exists():
        raise RuntimeError(f"{FOLDER} has no guest: make it by scripts/guest.sh {FOLDER}")


def run(script: str, folder: Path, timeout: float = waiting.limit(180.0)) -> Result:
    """Run ``script`` (bash) in a fresh guest; it sees what is in ``folder`` at /mnt.

    Raises TimeoutExpired when it takes longer.
    """
    prepare()
    file = folder / "guest-script.sh"
    file.write_text(script)
    (folder / "guest-checkout").write_text(str(ROOT))
    command = [
        *("qemu-system-x86_64", "-accel", "tcg", "-cpu", CPU, "-smp", "1"),
        *("-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-display", "none"),
        *("-serial", "stdio", "-no-reboot", "-kernel", str(FOLDER / "vmlinuz")),
        *("-initrd", str(FOLDER / "initrd.gz")),
        *("-append", f"{KERNEL} script=/mnt/{file.name}"),
        *("-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", f"local,path={folder},mount_tag=work,security_model=none,readonly=on"),
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
    )
    text = done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
    ended = re.search(r"guest: exit (\d+)", text)
    return Result(int(ended[1]) if ended else None, text)


def program(
    words: Sequence[str],
    folder: Path,
    before: str,
    passed: Sequence[str] = (),
    timeout: float = waiting.limit(500.0),
) -> Result:
    """``run`` of a Python program of this checkout. ``words``: it and its arguments. ``before``:
    commands that go first. ``passed``: variables of our environment that it gets."""
    path, root = f"{ROOT}/.venv/bin:{os.environ['PATH']}", str(ROOT)
    wanted = (patience.NAME, *passed)
    given = {name: os.environ[name] for name in wanted if name in os.environ}
    exported = "".join(f"export {name}={shlex.quote(given[name])}\n" for name in given)
    script = (
        f"export PATH={shlex.quote(path)} PYTHONPATH={shlex.quote(root)}\n"
        f"{exported}cd {shlex.quote(root)}\n{before}\npython {shlex.join(words)}\n"
    )
    return run(script, folder, timeout)


@contextlib.contextmanager
def address() -> Iterator[str]:
    """An address on the host's loopback device that the guest reaches too. The kernel takes it back
    after a while, should this process be killed."""
    seconds = str(round(waiting.limit(ADDRESS_SECONDS)))
    while True:
        ip = f"10.77.{random.randrange(256)}.{random.randrange(1, 255)}"
        lives = ("valid_lft", seconds, "preferred_lft", seconds)
        done = subprocess.run(
            ["ip", "addr", "add", f"{ip}/32", "dev", "lo", *lives],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            break
        if "File exists" not in done.stderr:
            raise RuntimeError(f"ip addr add {ip}: {done.stderr}")
    try:
        yield ip
    finally:
        subprocess.run(["ip", "addr", "del", f"{ip}/32", "dev", "lo"], check=False)


def replay(
    script: Path,
    folder: Path,
    images: Sequence[str],
    size: str,
    passed: Sequence[str] = (),
) -> tuple[Result, str]:
    """Run a Python program of this checkout in a guest, beside a Ceph cluster that has ``images``.

    Its arguments are a ceph.conf, the monitor's address, a keyring and the key in it. ``passed``:
    variables of our environment that it gets. Returns the result and the cluster's fsid.
    """
    with address() as ip:
        cluster = ceph.CephCluster(folder / "ceph", ip=ip, osd_bytes=4 * 2**30)
        try:
            cluster.start()
            seen = folder / "guest"
            seen.mkdir()
            text = cluster.conf.read_text().replace(f"{cluster.folder}/keyring", "/mnt/keyring")
            (seen / "ceph.conf").write_text(text)
            (seen / "keyring").write_bytes((cluster.folder / "keyring").read_bytes())
            cluster.run("rbd", "pool", "init", "rbd")
            for image in images:
                cluster.run("rbd", "create", "--size", size, f"rbd/{image}")
            words = ("/mnt/ceph.conf", cluster.monitor, "/mnt/keyring", cluster.secret())
            modules = "modprobe -a rbd nbd ext4 xfs dm_crypt xts loop"
            patient = waiting.limit(2000)  # emulation on a busy machine
            result = program((str(script), *words), seen, modules, passed, patient)
            return result, cluster.fsid
        finally:
            cluster.stop()
