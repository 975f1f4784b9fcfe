"""Credential providers that want a service account's token, with a real provider and API server."""

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kube.settings import AccessSettings
from preheat.runtimes import base
from tests.preheat.registry.test_credentials import Plugin, answering
from tests.testbed import kubernetes

AUDIENCE = "registry.example"
WANTED: dict[str, Any] = {
    "serviceAccountTokenAudience": AUDIENCE,
    "cacheType": "ServiceAccount",
    "requireServiceAccount": True,
}
ANSWER = {"auth": {"reg.example": {"username": "u", "password": "p"}}, "cacheDuration": "1h"}
# Keeps each question beside itself.
KEEPING = answering(ANSWER).replace("cat >/dev/null", 'cat >>"$0.asked"; echo >>"$0.asked"')
# Gives the token as the password, as some registries take it.
ECHO = """#!/bin/sh
echo x >>"$0.calls"
token=$(sed 's/.*"serviceAccountToken": "\\([^"]*\\)".*/\\1/')
cat <<EOF
{"kind": "CredentialProviderResponse", "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
 "cacheKeyType": "Registry", "cacheDuration": "1h",
 "auth": {"reg.example": {"username": "oauth2", "password": "$token"}}}
EOF
"""


def questions(plugin: Plugin) -> list[dict[str, Any]]:
    file = Path(f"{plugin.file}.asked")
    return [json.loads(line) for line in file.read_text().splitlines() if line]


# --- without an account ---------------------------------------------------------------------------


async def test_a_provider_that_must_have_a_token_is_passed_over_and_named(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, KEEPING, tokenAttributes=WANTED)
    found = await plugin.ask()
    assert found.logins == ()
    (trouble,) = found.troubles
    assert "test-provider: was passed over: it wants the token of a service account" in trouble
    assert "preheat.credentials.service_account" in trouble
    assert not Path(f"{plugin.file}.asked").exists()


async def test_a_provider_that_can_do_without_is_asked_without(tmp_path: Path) -> None:
    wanted = WANTED | {"requireServiceAccount": False}
    plugin = Plugin(tmp_path, KEEPING, tokenAttributes=wanted)
    found = await plugin.ask()
    assert (found.logins, found.troubles) == ((base.Login("u", "p"),), ())
    assert "serviceAccountToken" not in questions(plugin)[0]


@pytest.mark.parametrize("bad", [{"cacheType": "x"}, {"serviceAccountTokenAudience": ""}])
async def test_what_kubelet_refuses_is_refused(tmp_path: Path, bad: dict[str, str]) -> None:
    plugin = Plugin(tmp_path, KEEPING, tokenAttributes=WANTED | bad)
    (trouble,) = (await plugin.ask()).troubles
    assert "tokenAttributes lack an audience or a cacheType" in trouble


# --- a real API server ----------------------------------------------------------------------------

_names = (f"puller-{number}" for number in itertools.count())


@pytest.fixture
def account(kube: kubernetes.Kubernetes, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The settings: an account to pull with, and the agent's own one without any right."""
    puller = next(_names)
    agent = f"agent-of-{puller}"
    for each in (puller, agent):
        kube.kubectl("create", "serviceaccount", each)
    token = tmp_path / "token"
    token.write_text(kube.kubectl("create", "token", agent))
    yield {
        "account": {"namespace": "default", "name": puller},
        "cluster": AccessSettings(
            server=f"https://127.0.0.1:{kube.api_port}",
            ca_file=kube.folder / "pki" / "ca.crt",
            token_file=token,
        ),
    }
    kube.kubectl("delete", "role,rolebinding", puller, "--ignore-not-found")
    kube.kubectl("delete", "serviceaccount", puller, agent)


def allow(kube: kubernetes.Kubernetes, puller: str) -> None:
    """What docs/preheat.md says: a token of this one account, and its annotations."""
    meta = {"name": puller, "namespace": "default"}
    rules = [
        {"verbs": ["create"], "resources": ["serviceaccounts/token"]},
        {"verbs": ["get"], "resources": ["serviceaccounts"]},
    ]
    group = "rbac.authorization.k8s.io"
    kube.apply(
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": meta,
            "rules": [each | {"apiGroups": [""], "resourceNames": [puller]} for each in rules],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": puller},
            "subjects": [
                {"kind": "ServiceAccount", "name": f"agent-of-{puller}", "namespace": "default"}
            ],
        },
    )


def claims(token: str) -> dict[str, Any]:
    part = token.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return found


@pytest.mark.real
@pytest.mark.timeout(300)
async def test_a_provider_gets_a_token_of_the_named_account_only(
    kube: kubernetes.Kubernetes, account: dict[str, Any], tmp_path: Path
) -> None:
    keys = {
        "requiredServiceAccountAnnotationKeys": ["example/role"],
        "optionalServiceAccountAnnotationKeys": ["example/more"],
    }
    named = account["account"]
    plugin = Plugin(tmp_path, KEEPING, tokenAttributes=WANTED | keys)
    plugin.cluster = account["cluster"]
    refused = await plugin.ask(service_account=named)
    allow(kube, named["name"])
    bare = await plugin.ask(service_account=named)
    kube.kubectl("annotate", "serviceaccount", named["name"], "example/role=pull", "other=x")
    found = await plugin.ask(service_account=named)
    again = await plugin.ask(service_account=named)
    (asked,) = questions(plugin)  # kept for the account, as the provider says
    other = await plugin.ask(service_account=named | {"name": f"agent-of-{named['name']}"})

    echo = tmp_path / "echo"
    echo.mkdir()
    direct = Plugin(echo, ECHO, tokenAttributes=WANTED | {"cacheType": "Token"})
    direct.cluster = account["cluster"]
    passed = [(await direct.ask(service_account=named)).logins[0].password for _ in range(2)]
    careless = Plugin(echo, ECHO, tokenAttributes=WANTED)
    careless.cluster = account["cluster"]
    (leak,) = (await careless.ask(service_account=named)).troubles

    assert "answers 403" in refused.troubles[0]
    assert "has no annotation example/role" in bare.troubles[0]
    assert found.logins == again.logins == (base.Login("u", "p"),)
    assert asked["serviceAccountAnnotations"] == {"example/role": "pull"}
    said = claims(asked["serviceAccountToken"])
    assert said["aud"] == [AUDIENCE]
    assert said["sub"] == f"system:serviceaccount:default:{named['name']}"
    assert other.logins == ()  # another account's login is not kept for it
    assert "answers 403" in other.troubles[0]
    # Logins that are good for one token are asked for each time.
    assert passed[0] != passed[1]
    assert {claims(each)["sub"] for each in passed} == {said["sub"]}
    assert "it gives the token itself" in leak
    for text in (*refused.troubles, *bare.troubles, leak):
        assert "eyJ" not in text
