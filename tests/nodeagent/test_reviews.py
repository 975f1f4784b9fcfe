"""Callers that the cluster knows: an API server that fails in every way, and the real one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kit.room import Role
from kube.settings import AccessSettings, ThisNode
from nodeagent import app
from nodeagent.api import access, listeners, reviews, rotation
from nodeagent.settings import ApiSettings, ClusterSettings, ReviewSettings
from tests.nodeagent.test_listeners import Asker, certify, readyz, with_admin
from tests.testbed import kubernetes, ports, waiting

USER = {"username": "alice", "uid": "7", "groups": ["ops"], "extra": {"scopes": ["a"]}}


class Cluster:
    """Answers reviews as told, and counts them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.roles: set[str] = set()
        self.answer: Callable[[str], web.Response] | None = None
        self.silent = False
        self.good = {"good"}
        self.hanging: tuple[str, ...] = ()  # how tokens begin that get no answer

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((body["kind"], body["spec"]))
        assert request.headers["Authorization"] == "Bearer the-agents-own"
        if self.silent or body["spec"].get("token", "").startswith(self.hanging):
            await asyncio.Event().wait()
        if self.answer is not None:
            return self.answer(body["kind"])
        if body["kind"] == "TokenReview":
            good = body["spec"]["token"] in self.good
            found = {"authenticated": good, **({"user": USER, "audiences": ["x"]} if good else {})}
        else:
            found = {"allowed": body["spec"]["resourceAttributes"]["verb"] in self.roles}
        return web.json_response({"status": found}, status=201)


@contextlib.asynccontextmanager
async def served(cluster: Cluster, folder: Path, **more: Any) -> AsyncIterator[reviews.Reviews]:
    made = web.Application()
    made.router.add_post("/{path:.*}", cluster.handle)
    runner = web.AppRunner(made, shutdown_timeout=0.1)
    await runner.setup()
    (port,) = ports.free(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    certify(folder, "ca")
    (folder / "own").write_text("the-agents-own\n")
    asked = reviews.Reviews(
        ReviewSettings(audiences=more.get("audiences", ())),
        ThisNode.model_construct(
            name="n1",
            cluster=AccessSettings.model_construct(
                server=f"http://127.0.0.1:{port}",
                ca_file=folder / "tls.crt",
                token_file=folder / "own",
            ),
        ),
    )
    try:
        yield asked
    finally:
        await asked.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("verbs", "role"),
    [
        ((), None), (("read",), Role.READ), (("read", "operate"), Role.OPERATE),
        (("dangerous",), Role.DANGEROUS), (tuple(Role), Role.DANGEROUS),
    ],
)  # fmt: skip
async def test_verbs_become_the_role(
    tmp_path: Path, verbs: tuple[str, ...], role: Role | None
) -> None:
    cluster = Cluster()
    cluster.roles = set(verbs)
    async with served(cluster, tmp_path) as asked:
        found = await asked.caller("good", "p")
        assert found.role is role
        assert found.name == "user alice"
        again = await asked.caller("good", "p")
    assert again == found
    assert [kind for kind, _ in cluster.asked] == ["TokenReview", *["SubjectAccessReview"] * 3]
    resource = {"group": "nodeagent", "resource": "agents", "name": "n1"}
    for verb in Role:
        assert ("SubjectAccessReview", {
            "user": "alice", "uid": "7", "groups": ["ops"], "extra": {"scopes": ["a"]},
            "resourceAttributes": {**resource, "verb": str(verb)},
        }) in cluster.asked  # fmt: skip


async def test_unknown_token_has_no_role(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.roles = set(Role)
    async with served(cluster, tmp_path) as asked:
        for _ in range(5):
            assert (await asked.caller("bad", "p")).role is None
    assert len(cluster.asked) == 1


async def test_token_for_another_audience_has_no_role(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.roles = set(Role)
    for audience, role in (("x", Role.DANGEROUS), ("other", None)):
        async with served(cluster, tmp_path, audiences=(audience,)) as asked:
            assert (await asked.caller("good", "p")).role is role
        assert cluster.asked[-1 if role is None else -4][1]["audiences"] == [audience]


async def test_answers_hold_for_a_short_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "ADMITTED_SECONDS", 0.0)
    cluster = Cluster()
    cluster.roles = {"read"}
    async with served(cluster, tmp_path) as asked:
        assert (await asked.caller("good", "p")).role is Role.READ
        cluster.roles = set()
        assert (await asked.caller("good", "p")).role is None


def _status(found: Any) -> Callable[[str], web.Response]:
    return lambda _: web.json_response({"status": found}, status=201)


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: web.Response(status=500), lambda _: web.Response(status=403),
        lambda _: web.Response(status=201, text="not JSON"), lambda _: web.Response(status=201),
        lambda _: web.Response(status=302, headers={"Location": "/elsewhere"}),
        lambda _: web.json_response([], status=201), lambda _: web.json_response({}, status=201),
        _status(None), _status([]), _status({"authenticated": True}),
        _status({"authenticated": True, "user": None}),
        _status({"authenticated": True, "user": {}}),
        lambda _: web.Response(status=201, body=b" " * 1_000_000),
        lambda kind: web.json_response(
            {"status": {"authenticated": True, "user": USER}}, status=201
        ) if kind == "TokenReview" else web.Response(status=500),
    ],
)  # fmt: skip
async def test_bad_answer_admits_nobody(
    tmp_path: Path, answer: Callable[[str], web.Response]
) -> None:
    cluster = Cluster()
    cluster.answer = answer
    async with served(cluster, tmp_path) as asked:
        with pytest.raises(reviews.ReviewError):
            await asked.caller("good", "p")
        assert asked.finding() is not None
        cluster.answer = None
        cluster.roles = {"read"}
        assert (await asked.caller("good", "p")).role is Role.READ
        assert asked.finding() is None


@pytest.mark.parametrize("user", ["yes", 1, {"authenticated": "true", "user": USER}])
async def test_only_true_is_true(tmp_path: Path, user: Any) -> None:
    cluster = Cluster()
    sent = user if isinstance(user, dict) else {"authenticated": user, "user": USER}
    cluster.answer = _status(sent)
    async with served(cluster, tmp_path) as asked:
        assert (await asked.caller("good", "p")).role is None
    cluster.answer = lambda kind: web.json_response(
        {"status": {"authenticated": True, "user": USER} if kind == "TokenReview"
         else {"allowed": "true"}}, status=201,
    )  # fmt: skip
    async with served(cluster, tmp_path) as asked:
        assert (await asked.caller("good", "p")).role is None


async def test_silent_server_meets_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "ANSWER_SECONDS", 0.1)
    cluster = Cluster()
    cluster.silent = True
    async with served(cluster, tmp_path) as asked:
        with pytest.raises(reviews.ReviewError):
            await asked.caller("good", "p")
        found = asked.finding()
        assert found is not None
        assert "no answer within" in found.message


async def flood(asked: reviews.Reviews, peers: list[str], each: int = 20) -> int:
    """Made-up tokens from each peer, in turn. How many were not asked about."""
    refused = 0
    for number in range(each * len(peers)):
        try:
            await asked.caller(f"t{number}", peers[number % len(peers)])
        except reviews.ReviewError:
            refused += 1
    return refused


async def test_strangers_do_not_make_the_agent_ask_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "QUESTIONS_PER_SECOND", 0.001)
    monkeypatch.setattr(reviews, "REVIEWS_PER_SECOND", 0.001)
    cluster = Cluster()
    async with served(cluster, tmp_path) as asked:
        await flood(asked, ["p"])
        assert len(cluster.asked) == reviews.QUESTIONS_AT_ONCE
        assert (await asked.caller("good", "other")).role is None
        await flood(asked, [f"10.0.0.{n}" for n in range(20)])
        assert len(cluster.asked) < reviews.REVIEWS_AT_ONCE + 5


async def test_made_up_tokens_do_not_lock_out_whose_token_was_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers behind the operator's own address, and from ever new ones."""
    monkeypatch.setattr(reviews, "QUESTIONS_PER_SECOND", 0.001)
    monkeypatch.setattr(reviews, "REVIEWS_PER_SECOND", 0.001)
    monkeypatch.setattr(reviews, "ADMITTED_SECONDS", -1.0)  # each call is a new question
    cluster = Cluster()
    cluster.roles = {"read"}
    async with served(cluster, tmp_path) as asked:
        assert (await asked.caller("good", "p")).role is Role.READ
        assert await flood(asked, ["p", *(f"p{n}" for n in range(20))]) > 300
        assert (await asked.caller("good", "p")).role is Role.READ


async def test_who_once_was_admitted_does_not_make_the_agent_ask_without_limit(
    tmp_path: Path,
) -> None:
    cluster = Cluster()
    cluster.roles = {"read"}
    async with served(cluster, tmp_path) as asked:
        await asked.caller("good", "p")
        before = len(cluster.asked)
        cluster.answer = lambda _: web.Response(status=500)
        asked._answers.clear()
        for _ in range(100):
            with contextlib.suppress(reviews.ReviewError):
                await asked.caller("good", "p")
        assert len(cluster.asked) - before < 2 * reviews.KNOWN_AT_ONCE
        cluster.answer, cluster.good = None, set()
        assert (await asked.caller("another", "p")).role is None
        asked._answers.clear()
        asked._of_known = access.Rate(100.0, 100)
        assert (await asked.caller("good", "p")).role is None
        assert not asked._good, "a token that admits nobody is known no more"


async def test_who_is_admitted_uses_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "QUESTIONS_PER_SECOND", 0.001)
    monkeypatch.setattr(reviews, "REVIEWS_PER_SECOND", 0.001)
    cluster = Cluster()
    cluster.roles = {"read"}
    cluster.good = {f"good{n}" for n in range(reviews.MOST_OF_OWNER)}
    async with served(cluster, tmp_path) as asked:
        for token in cluster.good:
            assert (await asked.caller(token, "p")).role is Role.READ


async def test_one_who_makes_tokens_pushes_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "QUESTIONS_PER_SECOND", 0.001)
    monkeypatch.setattr(reviews, "REVIEWS_PER_SECOND", 0.001)
    cluster = Cluster()
    cluster.roles = {"read"}
    cluster.good = {f"t{n}" for n in range(100)}
    async with served(cluster, tmp_path) as asked:
        await flood(asked, ["p"], each=100)
        known = set(asked._good)
        assert len(known) == reviews.MOST_OF_OWNER
        assert len(cluster.asked) < 4 * (reviews.MOST_OF_OWNER + reviews.QUESTIONS_AT_ONCE + 1)


async def test_questions_without_an_answer_keep_no_user_waiting(tmp_path: Path) -> None:
    """An API server that asks somebody else about some tokens, who hangs."""
    cluster = Cluster()
    cluster.roles = {"read"}
    cluster.hanging = ("slow",)
    async with served(cluster, tmp_path) as asked:
        await asked.caller("good", "p")
        slow = [asyncio.create_task(asked.caller(f"slow{n}", f"10.0.0.{n}")) for n in range(90)]
        while len(asked._asking) < reviews.MOST_AT_ONCE:
            await asyncio.sleep(0.01)
        asked._answers.clear()
        assert (await asked.caller("good", "p")).role is Role.READ
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_one_host_with_many_ipv6_addresses_is_one_stranger(tmp_path: Path) -> None:
    cluster = Cluster()
    async with served(cluster, tmp_path) as asked:
        refused = await flood(asked, [f"2001:db8::{n}" for n in range(1, 5)])
    assert refused > 40


async def test_many_calls_with_one_token_are_one_question(tmp_path: Path) -> None:
    cluster = Cluster()
    async with served(cluster, tmp_path) as asked:
        found = await asyncio.gather(*(asked.caller("bad", "p") for _ in range(50)))
    assert {each.role for each in found} == {None}
    assert len(cluster.asked) == 1


# --- the door with a cluster behind it


def behind(agent: app.Agent, folder: Path, **asked: Any) -> ApiSettings:
    certify(folder, "door")
    (port,) = ports.free(1)
    api = ApiSettings(
        listen=f"127.0.0.1:{port}", cert_file=folder / "tls.crt", key_file=folder / "tls.key",
        kubernetes=ReviewSettings(),
    )  # fmt: skip
    with_admin(agent, api=api)
    changes = {"node": "n1", "kubernetes": ClusterSettings(**asked)}
    agent.state.settings = agent.state.settings.model_copy(update=changes)
    return api


async def test_door_stays_shut_while_the_cluster_does_not_answer(
    agent: app.Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "RECHECK_SECONDS", 0.02)
    (closed,) = ports.free(1)
    (tmp_path / "own").write_text("x")
    api = behind(
        agent, tmp_path, server=f"https://127.0.0.1:{closed}",
        ca_file=tmp_path / "tls.crt", token_file=tmp_path / "own",
    )  # fmt: skip
    async with listeners.serving(agent.state):
        ask = Asker(api).status
        assert await ask("GET", "/v1/datasets", "a-token") == 503
        assert await ask("GET", "/v1/datasets") == 401
        assert await ask("DELETE", "/v1/datasets/a", "a-token") == 503

        async def degraded() -> bool:
            return (await readyz(agent))["degraded"] is True

        await waiting.until_async(degraded, 10, "the door to be reported")


VERBS = {role: list(Role)[: list(Role).index(role) + 1] for role in Role}


def account(name: str, verbs: list[Role], node: str) -> list[dict[str, Any]]:
    """A service account that may do ``verbs`` to the agent of ``node``."""
    group = "rbac.authorization.k8s.io"
    named = {"metadata": {"name": name}}
    rule = {"apiGroups": ["nodeagent"], "resources": ["agents"], "verbs": [str(v) for v in verbs]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount",
         "metadata": {"name": name, "namespace": "default"}},
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", **named,
         "rules": [{**rule, "resourceNames": [node]}] if verbs else []},
        {"apiVersion": f"{group}/v1", "kind": "ClusterRoleBinding", **named,
         "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
         "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}]},
    ]  # fmt: skip


@pytest.mark.real
@pytest.mark.timeout(240)
async def test_real_api_server_decides(
    kube: kubernetes.Kubernetes, agent: app.Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "ADMITTED_SECONDS", 0.0)
    monkeypatch.setattr(reviews, "REFUSED_SECONDS", 0.0)
    group = "rbac.authorization.k8s.io"
    delegator = {
        "apiVersion": f"{group}/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "door-agent"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "system:auth-delegator"},
        "subjects": [{"kind": "ServiceAccount", "name": "agent-none", "namespace": "default"}],
    }  # fmt: skip
    made = [*account("agent-none", [], "n1"), *account("other-node", list(Role), "n2"), delegator]
    for role, verbs in VERBS.items():
        made += account(f"may-{role}", verbs, "n1")
    await asyncio.to_thread(kube.apply, *made)

    def token(name: str, *words: str) -> str:
        return kube.kubectl("create", "token", name, *words).strip()

    own = tmp_path / "own"
    own.write_text(await asyncio.to_thread(token, "agent-none"))
    api = behind(
        agent, tmp_path, server=f"https://127.0.0.1:{kube.api_port}",
        ca_file=kube.folder / "pki" / "ca.crt", token_file=own,
    )  # fmt: skip
    calls = (
        ("GET", "/v1/datasets", Role.READ),
        ("POST", "/v1/datasets/a/warm", Role.OPERATE),
        ("DELETE", "/v1/datasets/a", Role.DANGEROUS),
    )
    async with listeners.serving(agent.state):
        ask = Asker(api).status
        for holder in Role:
            held = await asyncio.to_thread(token, f"may-{holder}")
            for method, path, needed in calls:
                status = await ask(method, path, held)
                assert (status == 403) is not holder.includes(needed), (holder, method, status)
                assert status in (200, 403, 404)
        assert await ask("GET", "/v1/datasets", held[:-4] + "AAAA") == 401
        for stranger in ("agent-none", "other-node"):
            assert await ask("GET", "/v1/datasets", await asyncio.to_thread(token, stranger)) == 403
        elsewhere = await asyncio.to_thread(token, "may-read", "--audience=elsewhere")
        assert await ask("GET", "/v1/datasets", elsewhere) == 401
        kube.kubectl("delete", "clusterrolebinding", "may-dangerous")
        assert await ask("GET", "/v1/datasets", held) == 403  # a role that was taken away
        own.write_text(elsewhere)  # the agent itself is nobody now
        assert await ask("GET", "/v1/datasets", held) == 503
        record = (agent.state.settings.state_dir / "api-refused.log").read_text()
    assert "system:serviceaccount:default:may-operate" in record
    assert held not in record
