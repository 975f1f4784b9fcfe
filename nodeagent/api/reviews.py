"""Who a bearer token belongs to and what its owner may do, as the cluster's API server says.

A TokenReview names the owner. Then a SubjectAccessReview for each role asks whether the owner may
do ``read``, ``operate`` or ``dangerous`` (the verbs) to the resource ``agents`` of the group
``nodeagent``, named as this node. What comes back holds for a short time only. Whatever goes wrong,
nobody is admitted.

Strangers cannot make the agent ask without limit, and what they use up is not what users of the
cluster need (``nodeagent.api.shares``). A token that says itself that it has expired is not asked
about.
"""

import asyncio
import time
from typing import Any

import cachetools
import structlog

import kit.findings
from kit.room import Role
from kube import client
from kube.settings import ThisNode
from nodeagent.api import access, rotation, shares
from nodeagent.settings import ReviewSettings

log = structlog.get_logger("agent")

ANSWER_SECONDS = 5.0  # for all questions about one token
ADMITTED_SECONDS = 30.0  # for which an answer holds; also after a role was taken away
REFUSED_SECONDS = 5.0
TROUBLE_SECONDS = 60.0  # for which a question that failed is shown
MOST_ANSWERS = 1024
GROUP, RESOURCE = "nodeagent", "agents"


class ReviewError(Exception):
    """The API server could not be asked."""


class Reviews:
    """Asks this node's API server; ``close`` ends the connections."""

    def __init__(self, asked: ReviewSettings, here: ThisNode) -> None:
        self._asked = asked
        # One for each share: strangers take no connection from users, and a server that asks to be
        # left alone because of them is still asked about users.
        self._servers = {share: client.ApiServer(here.cluster) for share in shares.SHARES}
        self._node = here.name
        self._trouble = "", 0.0  # of the latest question, and when
        self._answers: cachetools.TLRUCache[bytes, access.Caller] = cachetools.TLRUCache(
            MOST_ANSWERS, ttu=self._holds_until, timer=time.monotonic
        )
        self._asking: dict[bytes, asyncio.Task[access.Caller]] = {}
        self._shares = shares.Shares()

    @staticmethod
    def _holds_until(_: bytes, caller: access.Caller, now: float) -> float:
        return now + (REFUSED_SECONDS if caller.role is None else ADMITTED_SECONDS)

    async def caller(self, token: str, peer: str) -> access.Caller:
        """Whose token it is. ReviewError when that cannot be known now."""
        key = rotation.digest(token)
        known = self._answers.get(key)
        if known is not None:
            return known
        task = self._asking.get(key)
        if task is None:
            said = shares.claims(token)
            if shares.expired(said, time.time()):
                return access.Caller("expired token", None, "unknown")
            asked = shares.question(key, peer, said)
            share = self._shares.take(asked)
            if share is None:
                raise ReviewError("too many unknown tokens")
            task = self._asking[key] = asyncio.create_task(
                self._ask(key, token, share), name="review"
            )
            task.add_done_callback(lambda done: self._end(asked, share, done))
        return await asyncio.shield(task)

    def _end(self, asked: shares.Question, share: str, done: asyncio.Task[access.Caller]) -> None:
        self._asking.pop(asked.token, None)
        answered = not done.cancelled() and done.exception() is None
        self._shares.end(asked, share, admitted=answered and done.result().role is not None)

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
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        for server in self._servers.values():
            await server.close()

    async def _ask(self, key: bytes, token: str, share: str) -> access.Caller:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await self._review(token, self._servers[share])
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
        status = await self._post(server, "authentication.k8s.io", "TokenReview", asked)
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
        status = await self._post(server, "authorization.k8s.io", "SubjectAccessReview", asked)
        return status.get("allowed") is True and not status.get("denied")

    async def _post(
        self, server: client.ApiServer, group: str, kind: str, spec: dict[str, Any]
    ) -> dict[str, Any]:
        body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
        path = f"/apis/{group}/v1/{kind.lower()}s"
        found = await server.request("POST", path, body, about=kind, deadline=ANSWER_SECONDS)
        status = found["status"]
        if not isinstance(status, dict):
            raise ValueError(f"{kind}: the answer has no status")
        return status
