"""Who a bearer token belongs to and what its owner may do, as the cluster's API server says.

A TokenReview names the owner. Then a SubjectAccessReview for each role asks whether the owner may
do ``read``, ``operate`` or ``dangerous`` (the verbs) to the resource ``agents`` of the group
``nodeagent``, named as this node. What comes back holds for a short time only. Whatever goes wrong,
nobody is admitted.

Strangers cannot make the agent ask without limit, neither from one address nor together. A token
that was good within a day is asked about all the same, so what strangers use up is not missing to
users of the cluster.
"""

import asyncio
import functools
import ipaddress
import time
from typing import Any

import cachetools
import structlog

import kit.findings
import kit.tasks
from kit.pause import Bucket
from kit.room import Role
from kube import client
from kube.settings import ThisNode
from nodeagent.api import access, rotation
from nodeagent.settings import ReviewSettings

log = structlog.get_logger("agent")

ANSWER_SECONDS = 5.0  # for all questions about one token
ADMITTED_SECONDS = 30.0  # for which an answer holds; also after a role was taken away
REFUSED_SECONDS = 5.0
TROUBLE_SECONDS = 60.0  # for which a question that failed is shown
MOST_ANSWERS = 1024
REVIEWS_PER_SECOND, REVIEWS_AT_ONCE = 5.0, 25  # of unknown tokens, all together
QUESTIONS_PER_SECOND, QUESTIONS_AT_ONCE = 1.0, 10  # of those, from one address
KNOWN_PER_SECOND, KNOWN_AT_ONCE = 1.0, 10  # of one token that was good
MOST_AT_ONCE = 8  # questions under way, of known tokens and of others
GOOD_SECONDS = 86400.0  # for which it is remembered that a token was good, and whose
MOST_OF_OWNER = 16
GROUP, RESOURCE = "nodeagent", "agents"


class ReviewError(Exception):
    """The API server could not be asked."""


@functools.lru_cache(access.MOST_CALLERS)
def place(peer: str) -> str:
    """What limits count of an address: of IPv6 the /64, all of which one host may have."""
    try:
        found = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback:
        return "loopback"
    if found.version == 4:
        return str(found)
    return str(ipaddress.IPv6Network((found.packed, 64), strict=False))


class Reviews:
    """Asks this node's API server; ``close`` ends the connections."""

    def __init__(self, asked: ReviewSettings, here: ThisNode) -> None:
        self._asked = asked
        # Strangers take no connection from users. By whether the token was good before.
        self._servers = {known: client.ApiServer(here.cluster) for known in (False, True)}
        self._node = here.name
        self._trouble = "", 0.0  # of the latest question, and when
        self._answers: cachetools.TLRUCache[bytes, access.Caller] = cachetools.TLRUCache(
            MOST_ANSWERS,
            ttu=lambda _, it, now: now + (ADMITTED_SECONDS if it.role else REFUSED_SECONDS),
            timer=time.monotonic,
        )
        self._good: cachetools.TTLCache[bytes, str] = cachetools.TTLCache(
            MOST_ANSWERS, GOOD_SECONDS, timer=time.monotonic
        )
        self._asking: dict[bytes, asyncio.Task[access.Caller]] = {}
        self._of_all = Bucket(REVIEWS_PER_SECOND, REVIEWS_AT_ONCE)
        self._of_known = access.Rate(KNOWN_PER_SECOND, KNOWN_AT_ONCE)
        self._of_one = access.Rate(QUESTIONS_PER_SECOND, QUESTIONS_AT_ONCE)

    async def caller(self, token: str, peer: str) -> access.Caller:
        """Whose token it is. ReviewError when that cannot be known now."""
        key, at = rotation.digest(token), place(peer)
        known = self._answers.get(key)
        if known is not None:
            return known
        task = self._asking.get(key)
        if task is None:
            if not self._may_ask(key, at):
                raise ReviewError("too many unknown tokens")
            task = self._asking[key] = asyncio.create_task(self._ask(key, token), name="review")
            task.add_done_callback(lambda done: self._end(key, at, done))
        return await asyncio.shield(task)

    def _may_ask(self, key: bytes, at: str) -> bool:
        known = key in self._good
        if sum((each in self._good) is known for each in self._asking) >= MOST_AT_ONCE:
            return False
        if known:
            return self._of_known.of(key.hex()).take()
        # Neither rate pays when the other one refuses.
        one = self._of_one.of(at)
        return one.level >= 1 and self._of_all.take() and one.take()

    def _end(self, key: bytes, at: str, done: asyncio.Task[access.Caller]) -> None:
        self._asking.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        if done.result().role is None:
            self._good.pop(key, None)
            return
        owner = done.result().name
        others = [each for each, whose in self._good.items() if whose == owner and each != key]
        if len(others) >= MOST_OF_OWNER:  # or one who makes tokens would push all others out
            del self._good[others[0]]
        elif key not in self._good:  # whoever is admitted has used up nothing
            self._of_one.of(at).give_back()
            self._of_all.give_back()
        self._good[key] = owner

    def finding(self) -> kit.findings.Finding | None:
        why, when = self._trouble
        if not why or time.monotonic() - when > TROUBLE_SECONDS:
            return None
        return kit.findings.Finding(
            id="admin.api.kubernetes",
            rule="no-token-review",
            severity=kit.findings.Severity.WARNING,
            subject="API server",
            message=f"admin.api.kubernetes: {why}; users of the cluster are not admitted",
            advice="see docs/security.md for the rights that the agent needs",
        )

    async def close(self) -> None:
        await kit.tasks.end(*self._asking.values())
        for server in self._servers.values():
            await server.close()

    async def _ask(self, key: bytes, token: str) -> access.Caller:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await self._review(token, self._servers[key in self._good])
        except (client.KubeError, TimeoutError, ValueError, LookupError, TypeError) as error:
            why = str(error) or f"no answer within {ANSWER_SECONDS:g}s"
            log.error("the API server cannot be asked about a token", why=why)
            self._trouble = why, time.monotonic()
            raise ReviewError("the cluster cannot be asked about the token") from None
        self._trouble = "", 0.0
        self._answers[key] = found
        return found

    async def _review(self, token: str, server: client.ApiServer) -> access.Caller:
        asked = {"token": token, **({"audiences": list(a)} if (a := self._asked.audiences) else {})}
        status = await post(server, "authentication.k8s.io", "TokenReview", asked)
        if status.get("authenticated") is not True or (
            self._asked.audiences and not set(self._asked.audiences) & set(status["audiences"])
        ):
            return access.Caller("unknown token", None, "unknown")
        user = status["user"]
        allowed = await asyncio.gather(*(self._may(server, user, role) for role in Role))
        roles = [role for role, may in zip(Role, allowed, strict=True) if may]
        name = f"user {user['username']}"
        return access.Caller(name, roles[-1] if roles else None, name, authenticated=True)

    async def _may(self, server: client.ApiServer, user: dict[str, Any], role: Role) -> bool:
        asked = {
            "user": user["username"],
            **{name: user[name] for name in ("uid", "groups", "extra") if user.get(name)},
            "resourceAttributes": {
                "group": GROUP,
                "resource": RESOURCE,
                "name": self._node,
                "verb": str(role),
            },
        }
        status = await post(server, "authorization.k8s.io", "SubjectAccessReview", asked)
        return status.get("allowed") is True and not status.get("denied")


async def post(
    server: client.ApiServer, group: str, kind: str, spec: dict[str, Any]
) -> dict[str, Any]:
    """The status of the answer. KubeError; ValueError, LookupError, TypeError for a strange one."""
    body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
    path = f"/apis/{group}/v1/{kind.lower()}s"
    found = await server.request("POST", path, body, about=kind, deadline=ANSWER_SECONDS)
    status = found["status"]
    if not isinstance(status, dict):
        raise ValueError(f"{kind}: the answer has no status")
    return status
