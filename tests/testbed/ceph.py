"""A real Ceph cluster on this machine: mon, mgr, osd, mds from Debian's packages, one folder.

It has a CephFS ``cephfs`` and a pool ``rbd``, listens on loopback only, and is made to be small and
to start quickly: one of each daemon, no replicas, no scrubbing.

The daemons are this machine's, or those of another release of Debian, from a root of their own
(scripts/ceph.sh). Clients are this machine's, unless they are started by ``inside``.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ceph import native
from tests.testbed import foreground, ports, waiting

START_SECONDS = 120.0
# A client that was killed holds up others for this long, and not for the minute of a session.
REVOKE_SECONDS = 10
DAEMONS = {"mon": "a", "mgr": "x", "osd": "0", "mds": "a"}
REPO = Path(__file__).parents[2]
ROOTS = REPO / "build" / "ceph"
ROOTED = REPO / "tests" / "testbed" / "rooted.sh"
RELEASE = os.environ.get("TEST_CEPH", "")  # for a run of tests by hand

_CONF = """\
[global]
fsid = {fsid}
mon host = [v2:{ip}:{v2}/0,v1:{ip}:{v1}/0]
public addr = {ip}
cluster addr = {ip}
public network = {ip}/32
ms bind ipv6 = false
ms bind port min = {first}
ms bind port max = {last}
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {d}/keyring
run dir = {d}/run
admin socket = {d}/run/$cluster-$name.$pid.asok
log file = {d}/log/$cluster-$name.log
crash dir = {d}/crash
exporter sock dir = {d}/run
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 16
osd pool default pgp num = 16
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon max pg per osd = 1000
[client]
log file =
admin socket =
[mon]
pid file = {d}/run/mon.$id.pid
mon data = {d}/mon.$id
mon initial members = a
mon allow pool delete = true
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail warn = 3
mon data avail crit = 1
mon osd full ratio = 0.97
mon osd nearfull ratio = 0.95
mon osd backfillfull ratio = 0.96
mon cluster log file = {d}/log/cluster.log
mon memory target = 134217728
mon osd cache size = 32
paxos propose interval = 0.05
mon mds skip sanity = true
[mgr]
pid file = {d}/run/mgr.$id.pid
mgr data = {d}/mgr.$id
mgr module path = /usr/share/ceph/mgr
mgr initial modules = status
mgr disabled modules = dashboard restful prometheus influx zabbix telegraf test_orchestrator \
diskprediction_local k8sevents alerts insights iostat localpool mds_autoscaler mirroring nfs \
osd_perf_query osd_support selftest snap_schedule stats cephadm rook
mgr tick period = 2
mgr stats period = 2
[osd]
pid file = {d}/run/osd.$id.pid
osd data = {d}/osd.$id
osd objectstore = bluestore
bluestore block size = {osd_size}
bluestore block create = true
bluestore block db create = false
bluestore block wal create = false
bluestore fsck on mount = false
bluestore cache autotune = false
bluestore cache size = 134217728
osd memory target = 939524096
osd op num shards = 2
osd op num threads per shard = 2
osd op num shards ssd = 2
osd op num shards hdd = 2
osd op num threads per shard hdd = 2
osd map cache size = 50
osd scrub begin hour = 0
osd scrub end hour = 1
osd max scrubs = 0
[mds]
pid file = {d}/run/mds.$id.pid
mds data = {d}/mds.$id
mds cache memory limit = 536870912
mds cap revoke eviction timeout = {revoke_seconds}
"""

_CAPS = {
    "client.admin": ("mon", "allow *", "osd", "allow *", "mds", "allow *", "mgr", "allow *"),
    "mon.": ("mon", "allow *"),
    "mgr.x": ("mon", "allow profile mgr", "osd", "allow *", "mds", "allow *"),
    "mds.a": (
        *("mon", "allow profile mds", "osd", "allow *"),
        *("mds", "allow *", "mgr", "allow profile mds"),
    ),
    "osd.0": ("mon", "allow profile osd", "mgr", "allow profile osd", "osd", "allow *"),
}

# Runs under the interpreter of the daemons' Debian, so that it needs nothing of the venv.
_MON_COMMANDS = """
import json, os, sys, rados
c = rados.Rados(conffile=os.environ['CEPH_CONF'], name='client.admin')
c.connect(timeout=30)
for command in json.loads(sys.argv[1]):
    r, out, err = c.mon_command(json.dumps(command), b'')
    if r:
        sys.exit(f'{command}: {r} {err}')
    print(out.decode().replace(chr(10), ' '))
sys.stdout.flush()
os._exit(0)  # librados' own end is not what is tested here
"""


class CephCluster:
    """One cluster. ``start`` creates it when absent and waits until it can be used.

    ``release``: of Debian, for the daemons; "": this machine's own. ``older_clients``: the clients
    of before Ceph 20.2.4, too, may use a cluster of after it.
    """

    def __init__(
        self,
        folder: Path,
        ip: str = "127.0.0.1",
        osd_bytes: int = 20 * 2**30,
        release: str = RELEASE,
        *,
        older_clients: bool = True,
    ) -> None:
        self.folder = folder.absolute()
        self.ip = ip
        self.release = release
        self._older_clients = older_clients
        self._osd_bytes = osd_bytes
        self.fsid = str(uuid.uuid4())
        self.port_v1 = self.port_v2 = 0

    @property
    def conf(self) -> Path:
        return self.folder / "ceph.conf"

    @property
    def monitor(self) -> str:
        """The monitor's v1 address, as settings and the kernel client take it."""
        return f"{self.ip}:{self.port_v1}"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self.conf)}

    def inside(self, *command: str) -> tuple[str, ...]:
        """The command with the programs of the daemons' release. It sees the cluster's folder and
        what lies beside it, and no other file of the machine."""
        if not self.release:
            return command
        root = ROOTS / self.release
        if not root.exists():
            raise RuntimeError(f"{root} is not there: scripts/ceph.sh {self.release} makes it")
        return (str(ROOTED), str(root.resolve()), str(self.folder.parent), "--", *command)

    @functools.cached_property
    def version(self) -> str:
        """What the daemons say of themselves: "ceph version 16.2.15 (...) pacific (stable)"."""
        return self.run(*self.inside("ceph-mon", "--version")).strip()

    def run(self, *command: str, timeout: float = waiting.limit(60.0)) -> str:
        """A command with this cluster's configuration; its output. Raises with its error text."""
        done = subprocess.run(
            command,
            env=self.environment,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(f"{command}: rc {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def mon_commands(self, *commands: dict[str, Any]) -> list[str]:
        text = json.dumps(commands)
        for attempt in range(3):
            try:
                asked = self.inside("/usr/bin/python3", "-c", _MON_COMMANDS, text)
                out = self.run(*asked, timeout=waiting.limit(60.0))
                return out.splitlines()
            except RuntimeError as error:
                # Seen in a few of many starts: librados 16.2 itself aborts (boost::bad_get) or
                # crashes in a new process while the cluster comes up. Our commands can be said
                # again.
                if not ("bad_get" in str(error) or "rc -" in str(error)) or attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def pid(self, kind: str) -> int:
        return int((self.folder / "run" / f"{kind}.{DAEMONS[kind]}.pid").read_text())

    def alive(self, kind: str) -> bool:
        try:
            comm = Path(f"/proc/{self.pid(kind)}/comm").read_text()
        except (OSError, ValueError):
            return False
        return comm.startswith("ceph")

    def start(self) -> None:
        fresh = not (self.folder / "created").exists()
        if fresh:
            self._create()
        self._daemon("mon", "ceph-mon", "-i", "a")
        self._daemon("mgr", "ceph-mgr", "-i", "x", "-k", f"{self.folder}/mgr.x/keyring")
        if fresh:
            osd_uuid = (self.folder / "osd.uuid").read_text()
            self.mon_commands({"prefix": "osd new", "uuid": osd_uuid, "id": 0})
        self._start_osd()
        self._daemon("mds", "ceph-mds", "-i", "a", "-k", f"{self.folder}/mds.a/keyring")
        if fresh:
            pools = (("cephfs_metadata", 8), ("cephfs_data", 16), ("rbd", 16))
            self.mon_commands(
                *({"prefix": "osd pool create", "pool": p, "pg_num": n} for p, n in pools),
                {"prefix": "osd pool application enable", "pool": "rbd", "app": "rbd"},
                {
                    "prefix": "fs new",
                    "fs_name": "cephfs",
                    "metadata": "cephfs_metadata",
                    "data": "cephfs_data",
                },
            )
            (self.folder / "created").touch()
        self._wait_usable()
        if self._older_clients and not self.secret().startswith("AQ"):
            self._allow_older_clients()

    def _allow_older_clients(self) -> None:
        """The administrator gets a key of a type that they know, and so do new users."""
        self.run(*self.inside("ceph", "mon", "set", "auth_allowed_ciphers", "aes,aes256k"))
        self.run(*self.inside("ceph", "mon", "set", "auth_preferred_cipher", "aes"))
        self.take_key(self.inside("ceph", "auth", "rotate", "client.admin", "--key-type", "aes"))

    def take_key(self, rotate: Sequence[str]) -> None:
        """The administrator's new key is in the keyring. A monitor applies what was set before the
        command a moment after it has answered."""

        def rotated() -> str:
            with contextlib.suppress(RuntimeError):
                return self.run(*rotate)
            return ""

        made = waiting.until(rotated, 20, "a new key", pause=0.5)
        (self.folder / "keyring").write_text(made)  # the monitor has its own in its data

    def _create(self) -> None:
        for name in ("run", "log", "crash", "mon.a", "mgr.x", "osd.0", "mds.a"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.port_v1, self.port_v2 = ports.free(2, self.ip)
        first, last = ports.free_range(40, self.ip)
        self.conf.write_text(
            _CONF.format(
                d=self.folder,
                fsid=self.fsid,
                ip=self.ip,
                v1=self.port_v1,
                v2=self.port_v2,
                first=first,
                last=last,
                osd_size=self._osd_bytes,
                revoke_seconds=REVOKE_SECONDS,
            )
        )
        # All keys made up front and given to the monitor at mkfs: no 'ceph auth' calls later.
        everything = self.folder / "all.keyring"
        for entity, caps in _CAPS.items():
            home = self.folder if entity in ("client.admin", "mon.") else self.folder / entity
            ring = home / "keyring"
            flags = ["-C"] if not ring.exists() else []
            pairs = [w for i in range(0, len(caps), 2) for w in ("--cap", caps[i], caps[i + 1])]
            made = ("ceph-authtool", *flags, str(ring), "-g", "-n", entity, *pairs)
            self.run(*self.inside(*made))
        shutil.copy(self.folder / "keyring", everything)
        for entity in ("mgr.x", "mds.a", "osd.0"):
            ring = self.folder / entity / "keyring"
            taken = ("ceph-authtool", str(everything), "--import-keyring", str(ring))
            self.run(*self.inside(*taken))
        monmap = str(self.folder / "monmap")
        addresses = f"[v2:{self.ip}:{self.port_v2},v1:{self.ip}:{self.port_v1}]"
        # A monitor ends at once when this is more than two releases before its own.
        name = re.findall(r"\) (\w+) \(", self.version)[0]
        drawn = (
            *("monmaptool", "--create", "--clobber", "--fsid", self.fsid),
            *("--addv", "a", addresses, "--set-min-mon-release", name, monmap),
        )
        self.run(*self.inside(*drawn))
        begun = ("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", str(everything))
        self.run(*self.inside(*begun))
        osd_uuid = str(uuid.uuid4())
        (self.folder / "osd.uuid").write_text(osd_uuid)
        store = (
            *("ceph-osd", "-i", "0", "--no-mon-config", "--mkfs", "--osd-uuid", osd_uuid),
            *("--monmap", monmap, "--keyring", f"{self.folder}/osd.0/keyring"),
        )
        self.run(*self.inside(*store))

    def _daemon(self, kind: str, *command: str) -> None:
        if not self.alive(kind):
            out = self.folder / "log" / f"{kind}.out"
            with out.open("ab") as stream:
                subprocess.run(
                    self.inside(*command),
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    timeout=waiting.limit(60),
                    check=True,
                    start_new_session=True,  # ceph-mds stays in its starter's, and gets its Ctrl-C
                )

    def _start_osd(self) -> None:
        self._daemon("osd", "ceph-osd", "-i", "0", "-k", f"{self.folder}/osd.0/keyring")

    def _osd_since(self) -> int:
        """The epoch in which the osd came up last."""
        dump = json.loads(self.mon_commands({"prefix": "osd dump", "format": "json"})[0])
        return int(next(each["up_from"] for each in dump["osds"] if each["osd"] == 0))

    def restart_osd(self) -> None:
        """Kill the osd (SIGKILL) and start it anew; it is up when this is over."""
        since, pid = self._osd_since(), self.pid("osd")
        os.kill(pid, signal.SIGKILL)
        waiting.until(lambda: _has_ended(pid), 10, "the osd's end")
        (self.folder / "run" / "osd.0.pid").unlink(missing_ok=True)
        self._start_osd()
        waiting.until(lambda: self._osd_since() > since, START_SECONDS, "the osd", pause=0.2)
        self._wait_usable()

    def _wait_usable(self) -> None:
        status: dict[str, Any] = {}

        def usable() -> bool:
            status.update(json.loads(self.mon_commands({"prefix": "status", "format": "json"})[0]))
            states = [s["state_name"] for s in status["pgmap"].get("pgs_by_state", [])]
            ranks = [rank["status"] for rank in status["fsmap"]["by_rank"]]
            return states == ["active+clean"] and "up:active" in ranks

        waiting.until(usable, START_SECONDS, "a usable cluster", detail=lambda: status)

    def stop(self) -> None:
        """SIGKILL to all: a clean end takes seconds, and hangs without a mon or when frozen."""
        pids = [self.pid(kind) for kind in DAEMONS if self.alive(kind)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        waiting.until(lambda: all(_has_ended(pid) for pid in pids), 10, "the cluster's end")
        for file in (self.folder / "run").iterdir():
            file.unlink(missing_ok=True)

    def add_osd_for(self, pool: str, share: float) -> int:
        """Start osd.1, which holds about this share of the pool, and of no other; its pid.

        Killed and marked down, it leaves the placement groups that it held inactive, for there are
        no replicas.
        """
        home = self.folder / "osd.1"
        home.mkdir()
        unique = str(uuid.uuid4())
        caps = ("--cap", "mon", "allow profile osd", "--cap", "mgr", "allow profile osd")
        ring = str(home / "keyring")
        key = ("ceph-authtool", "-C", ring, "-g", "-n", "osd.1", *caps, "--cap", "osd", "allow *")
        self.run(*self.inside(*key))
        self.run("ceph", "auth", "import", "-i", ring)
        self.run("ceph", "osd", "new", unique, "1")
        store = (
            *("ceph-osd", "-i", "1", "--no-mon-config", "--mkfs", "--osd-uuid", unique),
            *("--monmap", str(self.folder / "monmap")),
        )
        self.run(*self.inside(*store))
        # Every other pool stays on osd.0.
        self.run("ceph", "osd", "crush", "rm-device-class", "0")
        self.run("ceph", "osd", "crush", "set-device-class", "first", "0")
        rule = ("ceph", "osd", "crush", "rule", "create-replicated", "first", "default", "osd")
        self.run(*rule, "first")
        for other in json.loads(self.run("ceph", "osd", "pool", "ls", "--format", "json")):
            if other != pool:
                self.run("ceph", "osd", "pool", "set", other, "crush_rule", "first")
        subprocess.run(
            self.inside("ceph-osd", "-i", "1", "-k", ring), env=self.environment,
            timeout=waiting.limit(60), check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        tree = json.loads(self.run("ceph", "osd", "tree", "--format", "json"))
        weight = next(n["crush_weight"] for n in tree["nodes"] if n["id"] == 0)
        self.run("ceph", "osd", "crush", "reweight", "osd.1", f"{weight * share:.5f}")

        def moved() -> bool:
            return "pgid" in self.run("ceph", "pg", "ls-by-osd", "1", "--format", "json")

        waiting.until(moved, START_SECONDS, "placement groups on osd.1", pause=0.5)
        self._wait_usable()
        return int((self.folder / "run" / "osd.1.pid").read_text())

    @staticmethod
    def wait_until_not_recent() -> None:
        """Until a snapshot that is made now may be read past the mount."""
        over = time.time() + native.RECENT_SECONDS + 0.5
        waiting.until(lambda: time.time() > over, native.RECENT_SECONDS + 5, "some time to pass")

    @contextlib.contextmanager
    def frozen(self, *kinds: str) -> Iterator[None]:
        """The named daemons stopped (SIGSTOP) while the block runs; always continued after."""
        pids = [self.pid(kind) for kind in kinds]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            # Until it has arrived at each thread, a daemon still answers.
            waiting.until(lambda: all(_is_stopped(pid) for pid in pids), 10, "the daemons to stop")
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def secret(self, entity: str = "client.admin") -> str:
        ring = self.folder / "keyring"
        return self.run(*self.inside("ceph-authtool", str(ring), "-p", "-n", entity)).strip()

    @contextlib.contextmanager
    def mounted(self, target: Path, *options: str) -> Iterator[Path]:
        """CephFS by ceph-fuse at ``target`` with ceph-fuse's own defaults plus ``options``."""
        # In the foreground, as the agent does (cache.sources.cephfs_mount says why).
        command = (
            *("ceph-fuse", "-f", "-c", str(self.conf), "-n", "client.admin", str(target)),
            *options, *_ANY_PATH,
        )  # fmt: skip
        log = self.folder / "log" / f"ceph-fuse-{uuid.uuid4().hex[:8]}.log"
        with foreground.mounted(command, target, log):
            yield target


# ceph-fuse trims its cache by a remount through a shell that does not quote the path, and ends when
# that fails. The agent mounts where no path is odd; the tests need no trimming.
_ANY_PATH = (
    "--client_die_on_failed_remount=false", "--client_die_on_failed_dentry_invalidate=false",
)  # fmt: skip


def _is_stopped(pid: int) -> bool:
    """Whether each of its threads is. One that has just ended is left out."""
    states = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states == {"T"}


@contextlib.contextmanager
def running(
    folder: Path, release: str = RELEASE, *, older_clients: bool = True
) -> Iterator[CephCluster]:
    """A cluster that is stopped at the end."""
    made = CephCluster(folder, release=release, older_clients=older_clients)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _has_ended(pid: int) -> bool:
    """With all of its threads; it may be a zombie where nobody reaps it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True
