"""Runs inside the guest (see test_guest.py): the audit on real kernel RBD mappings.

    guest_audit.py CEPH_CONF MONITOR KEYRING KEY

Says ``check: ...`` lines; the test on the outside compares them.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kube.settings import KubeletSettings
from linux import kmsg
from tests.testbed import constants, waiting
from tests.volumes.audit import world
from volumes.audit import service, status
from volumes.audit.logs import follower, matcher, patterns
from volumes.audit.types import GuardView
from volumes.probe import prober
from volumes.settings import AuditSettings, ClusterSettings, RepairSettings

CONF, MONITOR, SECRET, _ = sys.argv[1:]
KUBELET = Path("/tmp/kubelet")
LOG = Path("/tmp/csi.log")


def say(text: object) -> None:
    print(f"check: {text}", flush=True)


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=waiting.limit(120), check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}: {done.stderr}")
    return done


def rbd(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run("rbd", "-c", CONF, *arguments, check=check)


async def until(condition: Callable[[], Any], what: str) -> Any:
    return await waiting.until_async(condition, 90, what, pause=waiting.GUEST_PAUSE_SECONDS)


async def main() -> None:
    kernel = kmsg.Kmsg(from_now=True)
    node = rbd("map", "-o", "noudev", "rbd/vol1").stdout.strip()
    run("mkfs.ext4", "-q", "-F", node)
    rbd("snap", "create", "rbd/vol1@s1")
    readonly = rbd("map", "-o", "noudev", "--read-only", "rbd/vol2").stdout.strip()
    snapshot = rbd("map", "-o", "noudev", "rbd/vol1@s1").stdout.strip()
    names = [each.removeprefix("/dev/") for each in (node, readonly, snapshot)]
    KUBELET.mkdir()
    LOG.touch()
    cluster = {"name": "c1", "monitors": [MONITOR], "user": "admin", "secret_file": SECRET}
    verdicts: dict[str, str] = {}  # as the guard's probes say them
    audit = world.audit(
        constants.made(
            AuditSettings,
            settle="500ms",
            look_timeout="120s",
            cluster_timeout="120s",
            cluster_interval="5s",
            logs={"sources": [{"name": "ceph-csi", "files": str(LOG)}]},
            rules={"audit-blind": {"enabled": False}},
        ),
        Path("/tmp/state"),
        clusters=[ClusterSettings.model_validate(cluster)],
        guard=lambda: GuardView(enforcing=True, verdicts=verdicts),
        kubelet=KubeletSettings(root_dir=KUBELET),
    )

    def found(rule: str) -> list[dict[str, Any]]:
        return [f for f in map(vars, status.findings(audit)) if f["rule"] == rule]

    follower.SILENCE_SECONDS = 120.0  # an emulated processor on a busy machine
    await audit.start()
    inventory = await until(lambda: audit.inventory, "the first scan")
    for name in names:
        device = inventory.device(name)
        spec = device.image.spec
        fsid = "fsid" if device.image.fsid else "no fsid"
        client = device.client.client.startswith("client")
        say(f"device {spec} read-only {device.read_only} {fsid} client {client}")
    say(f"features known {inventory.supported_features > 0}")
    view = await until(
        lambda: next((v for v in audit.clusters.views.values() if not isinstance(v, str)), None),
        "the cluster",
    )
    await until(
        lambda: any(i.name == "vol1" and i.watchers for i in _view(audit).images), "our watcher"
    )
    ours = {w.client for i in _view(audit).images if i.name == "vol1" for w in i.watchers}
    say(f"our watcher is our mapping {ours == {inventory.device(names[0]).client.client}}")
    quiet = [i for i in _view(audit).images if i.name == "vol2"]
    say(f"a read-only mapping leaves {len(quiet[0].watchers)} watchers")
    say(f"clients in features {sorted({g.release for g in view.features if g.kind == 'client'})}")
    say(f"mapped-elsewhere {len(found('mapped-elsewhere'))}")
    say(f"mapped-twice {len(found('mapped-twice'))}")

    # The accident: a private copy, the host unmounts, the unmap fails.
    target = Path("/tmp/kubelet/plugins/kubernetes.io/csi/rbd.csi.ceph.com/aa/globalmount")
    target.mkdir(parents=True)
    run("mount", node, str(target))
    holder = subprocess.Popen(["unshare", "-m", "--propagation", "private", "sleep", "600"])
    comm = Path(f"/proc/{holder.pid}/comm")
    await until(lambda: comm.read_text() == "sleep\n", "the private copy")
    await audit.round(full=True)
    run("umount", str(target))
    (leak,) = await until(lambda: found("leaked-mount"), "leaked-mount")
    say(f"leak {leak['device'] == names[0]} pid {leak['pid'] == holder.pid}")
    failed = rbd("unmap", "-o", "noudev", node, check=False)
    say(f"unmap {failed.returncode} {failed.stderr.strip().splitlines()[-1]}")
    with LOG.open("a") as stream:
        stream.write(failed.stderr)
    (failing,) = await until(lambda: found("unmap-failing"), "unmap-failing")
    say(f"unmap-failing {failing['device'] == names[0]} {'sleep' in failing['advice']}")
    result = await audit.act(leak["id"], dry_run=False)
    say(f"act {result['outcome']} holder alive {holder.poll() is None}")
    await until(lambda: not Path("/sys/fs/ext4", names[0]).exists(), "freed")
    say(f"unmap after {rbd('unmap', '-o', 'noudev', node).returncode}")

    # Kernel lines as this kernel prints them: a blocklisted client's reads and watch.
    node = rbd("map", "-o", "noudev", "rbd/vol1").stdout.strip()
    name = node.removeprefix("/dev/")
    run("mount", node, str(target))
    (target / "file").write_text("x" * 100)
    run("sync", "-f", str(target))
    device = await until(
        lambda: audit.inventory and audit.inventory.device(name), "the new mapping"
    )
    address = device.client.address
    run("ceph", "-c", CONF, "osd", "blocklist", "add", address)
    # The OSD learns of it a moment later; until then reads still succeed. The superblock's object
    # exists: a read of one that the object map lacks would never reach the OSD.
    read = ("dd", f"if={node}", "of=/dev/null", "bs=4096", "count=1", "iflag=direct")
    await until(lambda: run(*read, check=False).returncode, "a read that fails")
    await until(lambda: found("blocklisted-client"), "blocklisted-client")
    say("blocklisted-client found")
    try:
        await until(lambda: found("log-rbd-io-error"), "log-rbd-io-error")
    except AssertionError:
        if (logs := audit.follower) is not None:
            say(f"log child: {logs.restarts} restarts, {logs.trouble}, {logs.counters()}")
        for record in kernel.read(10_000):
            say(f"kernel: {record.text}")
        raise
    say(f"log-rbd-io-error {found('log-rbd-io-error')[0]['device'] == name}")
    holder.kill()
    await _repaired(audit, name, target, verdicts)
    await audit.stop()

    each = matcher.Matcher(
        "kernel", [p for p in patterns.expressions(patterns.built_in()) if p.source == "kernel"],
        r"rbd\d+", 10**6,
    )  # fmt: skip
    lines = [record.text for record in kernel.read(10_000)]
    for line in lines:
        if line.startswith(("rbd:", "libceph:", "EXT4", "I/O error", "Buffer", "blk_")):
            print(f"kernel: {line}", flush=True)
    each.feed("".join(f"{line}\n" for line in lines).encode())
    say(f"patterns {json.dumps(sorted({hit.pattern for hit in each.flush()}))}")


async def _repaired(
    audit: service.Audit, name: str, target: Path, verdicts: dict[str, str]
) -> None:
    """The blocklisted mapping is taken away once it is unmounted; a new one reads what was there.
    The two other mappings have the same client, and nothing holds them."""
    audit.repairer.settings = constants.made(RepairSettings, mode="on", settle=1)
    audit.wake()

    def waits() -> dict[str, Any] | None:
        case = audit.repairer.shown.get(name)
        return case if case and "in use" in case["why"] else None

    case = await until(waits, "it waits")
    say(f"same client {len(case['same_client'])}")
    await until(lambda: len(list(Path("/sys/bus/rbd/devices").iterdir())) == 1, "the idle ones")
    say(f"mounted one stays {Path('/sys/block', name).exists()}")
    run("umount", str(target))
    await until(lambda: not any(Path("/sys/bus/rbd/devices").iterdir()), "the unmap")
    node = rbd("map", "-o", "noudev", "rbd/vol1").stdout.strip()
    new = node.removeprefix("/dev/")
    await until(lambda: audit.inventory and audit.inventory.device(new), "the new mapping")
    probing = prober.Prober(120.0)
    verdicts[new] = str((await probing.probe(node)).verdict)
    await probing.close()
    audit.wake()

    def steps() -> list[str]:
        return [
            f"{e['step']} {e['outcome']}"
            for e in audit.runner.last
            if e["action"] == "repair" and e["volume"] == "rbd/vol1"
        ]

    say(f"probed {verdicts}")
    try:
        await until(lambda: "release done" in steps(), "the case is closed")
    except AssertionError:
        say(f"open {steps()} {audit.repairer.shown} {audit.repairer._cases} {verdicts}")
        raise
    say(f"repair {', '.join(steps())}")
    run("mount", node, str(target))
    say(f"data {(target / 'file').read_text() == 'x' * 100}")
    run("umount", str(target))


def _view(audit: service.Audit) -> Any:
    return next(v for v in audit.clusters.views.values() if not isinstance(v, str))


asyncio.run(main())
