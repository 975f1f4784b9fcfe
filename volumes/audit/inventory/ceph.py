"""Asking a Ceph cluster. ``look`` runs in a child process (kit.child): librados can hang."""

import contextlib
import errno
import importlib
import json
import math
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

import kit.errors
from volumes.audit.inventory import cluster

_SLOW_BLOCKLIST = 20_000  # entries; more are not carried


def _secret(path: str) -> dict[str, str]:
    """rados options for a bare secret or a keyring file."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise kit.errors.SourceError(
            f"secret_file {path}", f"cannot be read ({error})", "mount the secret there"
        ) from error
    return {"keyring": path} if "[" in text else {"key": text}


def look(
    name: str,
    monitors: list[str],
    conf_file: str,
    user: str,
    secret_file: str,
    images: list[list[str]],
    patience: float,
) -> Any:
    """One look at a cluster as JSON of ``ClusterView``. ``images``: pool, namespace, name;
    ``patience``: seconds for each answer, well below the deadline of the child.

    SourceError when it does not answer. Commands that the key may not run are gaps, no errors.
    """
    try:
        rados = importlib.import_module("rados")
    except ImportError as error:
        raise kit.errors.HostError(
            "rados", "Ceph's Python bindings are missing", "install python3-rados and python3-rbd"
        ) from error
    conf = {
        "client_mount_timeout": str(math.ceil(patience)),
        "rados_mon_op_timeout": str(math.ceil(patience)),
        "rados_osd_op_timeout": str(math.ceil(patience)),
        **({"mon_host": ",".join(monitors)} if monitors else {}),
        **(_secret(secret_file) if secret_file else {}),
    }
    try:
        # Without a conffile librados reads none, /etc/ceph neither.
        client = rados.Rados(name=f"client.{user}", conffile=conf_file or None, conf=conf)
        client.connect(timeout=patience)
    except rados.Error as error:
        raise kit.errors.SourceError(
            f"cluster {name}", f"does not let us in ({error})", "see its monitors and the key"
        ) from error
    try:
        return msgspec.to_builtins(_view(name, client, rados, images, patience))
    finally:
        with contextlib.suppress(Exception):
            client.shutdown()


def view(answer: Any) -> cluster.ClusterView:
    """The view that ``look`` returned as JSON."""
    return msgspec.convert(answer, cluster.ClusterView)


def _view(
    name: str, client: Any, rados: Any, images: list[list[str]], patience: float
) -> cluster.ClusterView:
    denied: list[str] = []

    def told(prefix: str, *, older: str = "") -> bytes:
        """The answer; empty when this key may not ask. ``older``: the command's former name."""
        command = json.dumps({"prefix": prefix, "format": "json"})
        code, out, text = client.mon_command(command, b"", timeout=math.ceil(patience))
        if code == -errno.EINVAL and older:
            return told(older)
        if code in (-errno.EPERM, -errno.EACCES):
            denied.append(prefix)
            return b""
        if code:
            raise kit.errors.SourceError(
                f"cluster {name}", f"'ceph {prefix}' failed: {text or code}", "see its monitors"
            )
        return bytes(out)

    def ask(prefix: str) -> Any:
        return json.loads(told(prefix) or b"{}")

    versions = ask("versions")
    features = ask("features")
    health = ask("health")
    stats = ask("df").get("stats", {})
    monitors = ask("mon dump").get("mons", [])
    # Not 'osd dump', which has both: it is megabytes on a large cluster, from every node.
    blocked = told("osd blocklist ls", older="osd blacklist ls")  # before Ceph 16
    min_client = told("osd get-require-min-compat-client")  # one word, whatever format is asked
    return cluster.ClusterView(
        name=name,
        taken=time.time(),
        fsid=client.get_fsid(),
        versions=tuple(
            cluster.VersionCount(kind, version, int(count))
            for kind, counts in versions.items()
            if kind != "overall"
            for version, count in counts.items()
        ),
        features=tuple(
            cluster.FeatureGroup(
                kind, group["release"], int(str(group["features"]), 16), int(group["num"])
            )
            for kind, groups in features.items()
            if isinstance(groups, list)
            for group in groups
        ),
        min_client=min_client.decode().strip().strip('"'),
        checks=tuple(
            cluster.Check(code, check.get("severity", ""), check["summary"]["message"])
            for code, check in health.get("checks", {}).items()
        ),
        used=float(stats.get("total_used_raw_ratio", 0.0)),
        blocklist=blocklist(blocked.decode())[:_SLOW_BLOCKLIST],
        monitors_v1=_addresses(monitors, "v1"),
        monitors_v2=_addresses(monitors, "v2"),
        images=tuple(_image(client, rados, *image) for image in images),
        node_client=_node_client(),
        denied=tuple(denied),
    )


def blocklist(text: str) -> tuple[str, ...]:
    """Entries of 'osd blocklist ls': addresses, and ranges as ``cidr:10.1.0.0:0/24``.

    Since Ceph 16.2 the answer is two JSON arrays, one behind the other. Ranges come first here:
    one of them counts for many addresses.
    """
    addresses, ranges = [], []
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        entries, end = decoder.raw_decode(text)
        addresses += [str(entry["addr"]) for entry in entries if "addr" in entry]
        ranges += [
            f"cidr:{str(entry['range']).removeprefix('cidr:')}"
            for entry in entries
            if "range" in entry
        ]
        text = text[end:].lstrip()
    return (*ranges, *addresses)


def _addresses(monitors: list[dict[str, Any]], kind: str) -> tuple[str, ...]:
    return tuple(
        address["addr"]
        for monitor in monitors
        for address in monitor.get("public_addrs", {}).get("addrvec", [])
        if address.get("type") == kind
    )


def _image(client: Any, rados: Any, pool: str, namespace: str, name: str) -> cluster.ImageView:
    rbd = importlib.import_module("rbd")
    try:
        with contextlib.closing(client.open_ioctx(pool)) as ioctx:
            ioctx.set_namespace(namespace)
            with contextlib.closing(rbd.Image(ioctx, name, read_only=True)) as image:
                lockers = image.list_lockers() or {}
                return cluster.ImageView(
                    pool=pool,
                    namespace=namespace,
                    name=name,
                    features=image.features(),
                    watchers=tuple(
                        cluster.Watcher(f"client{watcher['id']}", watcher["addr"])
                        for watcher in image.watchers_list()
                    ),
                    locks=tuple(
                        cluster.Lock(owner.replace("client.", "client"), address, cookie)
                        for owner, cookie, address in lockers.get("lockers", [])
                    ),
                )
    except (rados.Error, rbd.Error) as error:
        return cluster.ImageView(pool, namespace, name, error=str(error) or type(error).__name__)


def _node_client() -> str:
    """Version of this node's Ceph client, as its own tool says it; empty without one."""
    try:
        done = subprocess.run(
            ("rados", "--version"), capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\d+\.\d+\.\d+", done.stdout)
    return found[0] if found else ""
