"""``nodeagent doctor``: what works on this node, what is missing, what that costs, how to get it.

It needs no running agent, and it changes nothing. A check of a room that the settings leave out is
made all the same, but is not *wanted*: its result does not count.
"""

import asyncio
import errno
import grp
import os
import socket as sockets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit.child
import kit.errors
import kit.files
import kit.units
from kit.room import Check
from kube import client
from kube.settings import AccessSettings, ThisNode
from linux import syscalls
from nodeagent import configfile, rooms
from nodeagent.api import listeners, rotation
from nodeagent.api.reviews import post
from nodeagent.settings import AdminSettings, Settings, address

AT_ONCE = 4
_NO_TCP = "nobody is admitted to the API over TCP"
# What the agent's account must be allowed to create.
_RIGHTS = (
    ("authentication.k8s.io", "tokenreviews"), ("authorization.k8s.io", "subjectaccessreviews"),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """``said``: what works, or what is missing."""

    room: str
    name: str
    well: bool
    wanted: bool
    said: str
    cost: str = ""
    remedy: str = ""

    @property
    def word(self) -> str:
        return "ok" if self.well else "MISSING" if self.wanted else "absent"


def root() -> str:
    if os.geteuid() != 0:
        raise kit.errors.HostError("root", "this is not run as root", "run it as root")
    bits = next(
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff")
    )
    if not bits >> 21 & 1:
        raise kit.errors.HostError("root", "it lacks CAP_SYS_ADMIN", "in a pod: privileged: true")
    return "root with CAP_SYS_ADMIN"


def _can_be_written(folder: str) -> bool:
    return not os.statvfs(folder).f_flag & os.ST_RDONLY and os.access(folder, os.W_OK)


def state(path: str) -> str:
    if not _can_be_written(kit.files.existing(path)):
        raise kit.errors.HostError(f"state_dir {path}", "cannot be written", "make it writable")
    return f"{path} can be written"


def clock() -> str:
    state = syscalls.clock_state()
    if not state.synchronised:
        raise kit.errors.HostError(
            "the clock", "the kernel says it is not synchronised", "run chrony or systemd-timesyncd"
        )
    return f"synchronised within {state.max_error_seconds:.3f}s"


def _own(settings: Settings) -> Sequence[Check]:
    return (
        Check("root", root, (), "the agent does not start"),
        Check("state", state, (str(settings.state_dir),), "the agent does not start"),
        # Everything works without, and most clocks go right that nothing synchronises.
        Check("clock", clock, (), "Ceph may refuse its keys; times in findings are wrong", False),
        *admin_checks(settings.admin, settings.this_node),
    )


async def _make(room: str, check: Check, wanted: bool, turn: asyncio.Semaphore) -> Result:
    wanted = wanted and check.wanted
    try:
        async with turn:
            said = await kit.child.call(check.look, *check.arguments, deadline=check.deadline)
    except kit.errors.AgentError as error:
        named = error.thing.removeprefix("the ") == check.name
        why = error.cause if named else f"{error.thing}: {error.cause}"
        return Result(room, check.name, False, wanted, why, check.cost, error.remedy)
    except (OSError, RuntimeError) as error:
        remedy = "see the kernel log"
        return Result(room, check.name, False, wanted, str(error), check.cost, remedy)
    return Result(room, check.name, True, wanted, said)


async def examine(config: Path) -> list[Result]:
    """Every check. The settings file decides what is wanted; without one nothing of a room is."""
    turn = asyncio.Semaphore(AT_ONCE)
    try:
        settings = configfile.load(config)
        file = Result("agent", "settings", True, True, f"{config} can be used")
    except kit.errors.SettingsError as error:
        settings = Settings()
        file = Result(
            "agent", "settings", False, config.exists(), f"{error.thing}: {error.cause}",
            "the defaults are looked at, and no room counts as wanted", error.remedy,
        )  # fmt: skip
    made = [_make("agent", check, True, turn) for check in _own(settings)]
    for room in rooms.ROOMS:
        section = getattr(settings, room.name)
        if room.checks is not None:
            found = room.checks(settings.room(room), settings.state_dir)
            made += [_make(room.name, check, section is not None, turn) for check in found]
    return [file, *await asyncio.gather(*made)]


# --- what the admin API needs on this node (docs/security.md)


def admin_checks(admin: AdminSettings, here: ThisNode) -> Sequence[Check]:
    path = str(admin.socket)
    found = [Check("admin socket", socket, (path, admin.group), "no command reaches the agent")]
    if admin.metrics is not None:
        given = ("admin.metrics", admin.metrics, path)
        found.append(Check("admin metrics", listen, given, "no metrics, and kubelet's probes fail"))
    if (api := admin.api) is None:
        return found
    pair = (str(api.cert_file), str(api.key_file))
    tokens = None if api.tokens_file is None else str(api.tokens_file)
    exposed = "who reads them may do what their holders may; who writes them, all"
    found += [
        Check("admin api", listen, ("admin.api.listen", api.listen, path), _NO_TCP),
        Check("admin certificate", certificate, pair, _NO_TCP),
        Check("admin files", files, (*pair, tokens), exposed),
    ]
    if tokens is not None:
        found.append(
            Check("admin tokens", tokens_file, (tokens,), "their holders are not admitted")
        )
    if api.kubernetes is not None:
        given_server = here.cluster.model_dump(mode="json")
        cost = "users of the cluster are not admitted"
        found.append(Check("admin reviews", reviews, (given_server,), cost))
    return found


def socket(path: str, group: str | None) -> str:
    """HostError when the agent could not make it, or would not find its group."""
    what = f"admin.socket {path}"
    if group is not None:
        try:
            grp.getgrnam(group)
        except KeyError:
            raise kit.errors.HostError(
                f"admin.group {group}",
                "this host (in a pod: the image) has no such group",
                "make it, or correct the name; a socket inside a pod needs none",
            ) from None
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        listeners.refuse_place(Path(path))
    if os.path.lexists(path) and listeners.living(Path(path)):
        return f"an agent listens on {path}"
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not _can_be_written(folder):
        raise kit.errors.HostError(what, f"{folder} cannot be written", "name another path")
    return f"{path} can be made, for {f'root and the group {group}' if group else 'root alone'}"


def listen(setting: str, given: str, own_socket: str) -> str:
    """HostError when the address cannot be had. That the agent itself has it is well."""
    host, port = address(given)
    try:
        (family, kind, _, _, where), *_ = sockets.getaddrinfo(
            host, port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE
        )
        with sockets.socket(family, kind) as probe:
            probe.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            probe.bind(where)  # and nobody listens: nothing changes
    except OSError as error:
        if error.errno == errno.EADDRINUSE and listeners.living(Path(own_socket)):
            return f"{given} is in use, and an agent runs"
        raise listeners.address_refused(setting, given, error) from None
    return f"{given} is free"


def certificate(cert: str, key: str) -> str:
    """HostError when no client would take it, or soon none will."""
    pair, problem = rotation.attempt(lambda: rotation.read_pair(Path(cert), Path(key)))
    what = f"admin.api.cert_file {cert} with key_file {key}"
    if pair is None:
        raise kit.errors.HostError(what, problem, "correct the file that is wrong")
    now = time.time()
    if pair.expires_soon(now):
        raise kit.errors.HostError(what, f"it expires in {pair.left(now)}", "renew it")
    return f"{cert} fits its key and is valid until {kit.units.format_time(pair.until)}"


def tokens_file(path: str) -> str:
    """HostError when it cannot be used."""
    known, problem = rotation.attempt(lambda: rotation.read_tokens(Path(path)))
    if known is None:
        raise kit.errors.HostError(f"admin.api.tokens_file {path}", problem, "correct the file")
    return f"{path} has the tokens of {len(known)} callers"


def files(cert: str, key: str, tokens: str | None) -> str:
    """HostError when others may read or write what only root should."""
    secret = [name for name in (key, tokens) if name is not None]
    found = [rotation.exposure(Path(name), secret=name != cert) for name in (cert, *secret)]
    if exposed := [str(each) for each in found if each is not None]:
        raise kit.errors.HostError("admin.api", "; ".join(exposed), rotation.EXPOSED_REMEDY)
    return "nobody else may read or write key, tokens and certificate"


def reviews(given: dict[str, Any]) -> str:
    """HostError when the API server does not answer, or refuses the agent's account."""
    return asyncio.run(may_review(AccessSettings.model_validate(given)))


async def may_review(asked: AccessSettings) -> str:
    server = client.ApiServer(asked)
    what = "admin.api.kubernetes"
    try:
        for group, resource in _RIGHTS:
            spec = {"resourceAttributes": {"group": group, "resource": resource, "verb": "create"}}
            answer = await post(server, "authorization.k8s.io", "SelfSubjectAccessReview", spec)
            if not answer.get("allowed"):
                raise kit.errors.HostError(
                    what,
                    f"the agent's account may not create {resource}.{group}",
                    "bind system:auth-delegator to it, as the chart does",
                )
    except client.KubeError as error:
        raise kit.errors.HostError(what, str(error), "mend the way or the login to it") from None
    except (LookupError, ValueError, TypeError):
        raise kit.errors.HostError(
            what, "the answer is no SelfSubjectAccessReview", "see that this is an API server"
        ) from None
    finally:
        await server.close()
    return "the agent's account may ask who a token belongs to and what its owner may do"
