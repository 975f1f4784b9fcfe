"""Who may call what, and what a request may name: docs/security.md, call by call.

``CALLS`` is the whole matrix. A call or a field that it lacks fails here, so that a new one is
looked at before anybody gets it.
"""

import re
import urllib.parse
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from kit.room import Role
from nodeagent import app
from tests.nodeagent import served as api
from tests.testbed import scripts

openapi = scripts.load("openapi")

SECURITY = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


class Names(StrEnum):
    """What a field names; the list below the table in docs/security.md."""

    DATASET = "a dataset"
    IMAGE = "an image"
    SNAPSHOT = "a snapshot"
    WATCHED = "a watched device"  # looked for in a list
    DEVICE = "a block device"
    PATH = "a path of the node"
    VOLUME = "a volume"  # of the ledger
    FINDING = "a finding"
    NOTHING = ""  # a number, a truth value, one of some words, or a text for people


@dataclass(frozen=True)
class Call:
    """``words``: of the role's row in docs/security.md."""

    role: Role
    words: str
    names: dict[str, Names] = field(default_factory=dict)


def _read(**names: Names) -> Call:
    return Call(Role.READ, "every GET", names)


def _operate(words: str, **names: Names) -> Call:
    return Call(Role.OPERATE, words, names)


def _dangerous(words: str, **names: Names) -> Call:
    return Call(Role.DANGEROUS, words, names)


_SAID = {"by": Names.NOTHING, "reason": Names.NOTHING}
_SET = "/v1/datasets/{name}"
CALLS = {
    **{
        f"GET {path}": _read()
        for path in (
            *("/", "/openapi.json", "/metrics", "/healthz", "/readyz", "/runbook", "/v1/status"),
            *("/v1/events", "/v1/events/follow", "/v1/findings", "/v1/datasets", "/v1/audit"),
            *(
                "/v1/volumes/guard",
                "/v1/volumes/guard/rehearsal",
                "/v1/volumes/ledger",
                "/v1/audit/devices",
                "/v1/audit/findings",
            ),
            *("/v1/images", "/v1/images/plan"),
        )
    },
    f"GET {_SET}": _read(name=Names.DATASET),
    f"GET {_SET}/generations": _read(name=Names.DATASET),
    f"GET {_SET}/failures": _read(name=Names.DATASET, limit=Names.NOTHING, after=Names.NOTHING),
    f"GET {_SET}/progress": _read(name=Names.DATASET),
    "GET /v1/audit/devices/{device}": _read(device=Names.WATCHED),
    "GET /v1/images/one": _read(ref=Names.IMAGE),
    "GET /v1/images/watch": _read(ref=Names.IMAGE),
    f"POST {_SET}/warm": _operate("warm", name=Names.DATASET, now=Names.NOTHING),
    f"POST {_SET}/pause": _operate("pause", name=Names.DATASET),
    f"POST {_SET}/resume": _operate("resume", name=Names.DATASET),
    f"POST {_SET}/cancel": _operate("cancel", name=Names.DATASET),
    f"POST {_SET}/verify": _operate("verify", name=Names.DATASET, source=Names.NOTHING),
    f"POST {_SET}/update": _operate("update", name=Names.DATASET, snapshot=Names.SNAPSHOT),
    f"POST {_SET}/rollback": _operate("roll back", name=Names.DATASET),
    f"POST {_SET}/rescan": _operate("rescan a dataset", name=Names.DATASET),
    "POST /v1/images/preheat": _operate("preheat", ref=Names.IMAGE, pin=Names.NOTHING),
    **{
        f"POST /v1/images/{word}": _operate(word, ref=Names.IMAGE)
        for word in ("pin", "unpin", "pause", "resume", "cancel")
    },
    "POST /v1/volumes/probe": _operate("probe a device", device=Names.DEVICE),
    "POST /v1/audit/pass": _operate("scan now"),
    f"DELETE {_SET}": _dangerous("remove a dataset", name=Names.DATASET),
    f"POST {_SET}/evict": _dangerous(
        "evict its files", name=Names.DATASET, to=Names.NOTHING, force=Names.NOTHING
    ),
    f"POST {_SET}/manifest": _dangerous("publish its manifest", name=Names.DATASET, to=Names.PATH),
    "PUT /v1/volumes/guard/mode": _dangerous("guard mode", mode=Names.NOTHING, **_SAID),
    "POST /v1/volumes/guard/detach": _dangerous("detach", **_SAID),
    "POST /v1/volumes/allow-format": _dangerous(
        "allow-format", device=Names.DEVICE, volume=Names.VOLUME, **_SAID
    ),
    "POST /v1/volumes/ledger/accept": _dangerous(
        "accept a ledger entry", volume=Names.VOLUME, by=Names.NOTHING
    ),
    "POST /v1/audit/act": _dangerous(
        "act on a finding", finding=Names.FINDING, dry_run=Names.NOTHING
    ),
}

# No call takes any of these for what the field names.
_PATHS = ("/etc/shadow", "../x", "..", "oci:/srv/x", "oci:coco/x", "file:///x", "a\n", "x" * 5000)
HOSTILE = {
    Names.DATASET: ("../x", "a/b", "a\n", "\0", "x" * 300),
    Names.WATCHED: ("../x", "a/b", "a\n", "\0", "x" * 300),
    Names.IMAGE: (*_PATHS, "ubuntu", "fw/torch:v1", "docker://r.example/a:v1", "r.example/../a:v1"),
    Names.SNAPSHOT: (*_PATHS[:5], "a/b", "a\n", "x" * 300),
    Names.DEVICE: (*_PATHS, "/dev/null", "/dev/watchdog", "/proc/self/mem", "/"),
}


def _table(head: str) -> list[list[str]]:
    """The rows below a table's head."""
    _, found, rest = SECURITY.partition(f"{head}\n")
    assert found, head
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _operations() -> dict[str, set[str]]:
    """Every call of the document, with its placeholders, its query and the fields of its body."""
    found: dict[str, set[str]] = {}
    for path, item in openapi.document()["paths"].items():
        for method in openapi.METHODS & item.keys():
            call: dict[str, Any] = item[method]
            names = {
                each["name"] for each in [*item.get("parameters", []), *call.get("parameters", [])]
            }
            for content in call.get("requestBody", {}).get("content", {}).values():
                names |= content["schema"].get("properties", {}).keys()
            found[f"{method.upper()} {path}"] = names
    return found


def test_every_call_and_every_field_is_in_the_matrix(whole: app.Agent) -> None:
    served = {
        f"{route.method} {route.path}"
        for each in whole.state.running
        for route in each.room.routes()
    }
    assert served <= CALLS.keys()
    assert _operations() == {call: set(known.names) for call, known in CALLS.items()}


def test_roles_of_the_routes_are_those_of_the_matrix(whole: app.Agent) -> None:
    for each in whole.state.running:
        for route in each.room.routes():
            assert route.role is CALLS[f"{route.method} {route.path}"].role, route.path


def test_the_matrix_is_what_the_documentation_says() -> None:
    rows = {row[0]: row[1] for row in _table("| role | may |")}
    assert list(rows) == [str(role) for role in Role]
    for call, known in CALLS.items():
        assert known.words in rows[known.role], call
        lower = [row for role, row in rows.items() if not Role(role).includes(known.role)]
        assert not any(known.words in row for row in lower), call
    _, _, below = SECURITY.partition("\nA request may name these things:\n")
    told = {
        names: role
        for role, listed in re.findall(rf"^\* ({'|'.join(Role)}): (.*)$", below, re.MULTILINE)
        for names in listed.split(", ")
    }
    lowest: dict[Names, Role] = {}
    for known in CALLS.values():
        for names in known.names.values():
            if names and (names not in lowest or lowest[names].includes(known.role)):
                lowest[names] = known.role
    assert told == {str(names): str(role) for names, role in lowest.items()}
    # What may be anything on the node is nothing for a role that is not root.
    assert lowest[Names.PATH] is Role.DANGEROUS


@pytest.mark.parametrize("role", [None, *Role], ids=str)
async def test_each_role_gets_what_the_matrix_says_and_no_more(
    whole: app.Agent, role: Role | None
) -> None:
    async with api.served(whole.state, role) as client:
        for call, known in CALLS.items():
            method, path = call.split()
            answer = await client.request(method, re.sub(r"{\w+}", "none", path))
            answer.close()
            admitted = role is not None and role.includes(known.role)
            expected = set() if admitted else {401 if role is None else 403}
            assert ({answer.status} & {401, 403}) == expected, (call, role)


async def test_no_field_is_taken_for_more_than_it_names(whole: app.Agent) -> None:
    """As dangerous, so that nothing but the field itself is in the way."""
    for each in whole.state.running:
        each.started = True
    tried = 0
    async with api.served(whole.state) as client:
        for call, known in CALLS.items():
            method, path = call.split()
            for name, names in known.names.items():
                for value in HOSTILE.get(names, ()):
                    if f"{{{name}}}" in path:
                        url = path.replace(f"{{{name}}}", urllib.parse.quote(value, safe=""))
                        answer = await client.request(method, url)
                    elif method == "GET":
                        answer = await client.get(path, params={name: value})
                    else:
                        others = {
                            n: "x" for n, k in known.names.items() if not k or k is Names.VOLUME
                        }
                        sent = others if "by" in known.names else {}
                        url = path.replace("{name}", "none")
                        answer = await client.request(method, url, json={**sent, name: value})
                    refused = {400} if names is not Names.DEVICE else {400, 404, 409}
                    assert answer.status in refused, (call, name, value, await answer.text())
                    tried += 1
    assert tried > 150


async def test_image_of_the_callers_own_is_refused(whole: app.Agent) -> None:
    """Whoever may preheat could else put one under the name of another."""
    for each in whole.state.running:
        each.started = True
    asked = {"ref": "registry.example/ceph-csi:v3", "source": "oci:/srv/own"}
    async with api.served(whole.state) as client:
        answer = await client.post("/v1/images/preheat", json=asked)
        text = await answer.text()
    assert answer.status == 400
    assert "'source'" in text
