"""What scripts/openapi.py makes of models, and that answers are what the served document says."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import msgspec
import pytest

from cache.dataset import standing
from cache.store import health
from kit.room import Request
from nodeagent.api import own
from nodeagent.shown import overview
from tests.testbed import census, scripts

openapi = scripts.load("openapi")
pages = scripts.load("pages")
WHOLE = json.loads(own.OPENAPI.read_text())


@dataclasses.dataclass(frozen=True)
class Model:
    plain: int
    beside: int = 0  # how many, never "# none"
    # The first line above,
    # and the second.
    above: str = "a  # b"
    after: str = ""

    @property
    def local(self) -> int:
        counted: int = 1  # of no field
        return counted


def test_comments_describe_the_fields() -> None:
    assert pages.comments(Model) == {
        "plain": "",
        "beside": 'how many, never "# none"',
        "above": "The first line above, and the second.",
        "after": "",
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each route returns, by route; as JSON."""
    agent = census.agent(tmp_path_factory.mktemp("census"))

    async def ask(path: str, given: dict[str, str]) -> Any:
        for each in agent.state.running:
            for route in each.room.routes():
                if (route.method, route.path) == ("GET", path):
                    return await route.handler(each.component, Request(path=given))
        assert path == "/v1/status"
        return overview.of(agent.state, 1e9)

    return ask


def schema_of(path: str) -> dict[str, Any]:
    well = WHOLE["paths"][path]["get"]["responses"]["200"]
    schema: dict[str, Any] = well["content"]["application/json"]["schema"]
    return {**schema, "components": WHOLE["components"]}


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/status", {}),
        ("/v1/datasets", {}),
        ("/v1/datasets/{name}", {"name": "dataset-03"}),
        ("/v1/images", {}),
        ("/v1/audit", {}),
        ("/v1/audit/devices", {}),
        ("/v1/audit/devices/{device}", {"device": "rbd3"}),
        ("/v1/audit/findings", {}),
        ("/v1/volumes/ledger", {}),
    ],
)
async def test_answers_are_as_the_document_says(
    answers: Any, path: str, given: dict[str, str]
) -> None:
    answer = json.loads(json.dumps(msgspec.to_builtins(await answers(path, given))))
    jsonschema.validate(answer, schema_of(path))
    wrong = {name: object() for name in answer}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema_of(path))


@pytest.mark.parametrize(
    ("schema", "field", "words"),
    [
        ("Dataset", "state", " ".join(sorted(get_args(standing.State)))),
        ("Dataset", "phase", " evicting filling scanning verifying withdrawing"),
        ("Update", "state", "complete filling new partial stale"),
        ("Event", "kind", "changed cleared raised"),
        ("Event", "severity", "critical info warning"),
        ("Finding", "severity", "critical info warning"),
        ("Generation", "state", "current earlier next retired"),
        ("Image", "by", "operator policy retained"),
        ("Scrub", "reason", " crash round suspect"),
    ],
)
def test_the_document_lists_the_words_of(schema: str, field: str, words: str) -> None:
    shown = WHOLE["components"]["schemas"][schema]["properties"][field]
    assert sorted(shown.get("enum", [])) == words.split(" ")


def test_the_document_lists_the_states_of_the_store() -> None:
    shown = schema_of("/v1/datasets")["properties"]["store"]
    assert shown == {"$ref": "#/components/schemas/StoreState"}
    schema = WHOLE["components"]["schemas"]["StoreState"]
    assert schema["enum"] == [str(each) for each in health.State]


def test_a_route_of_two_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One would silently be the last one's."""
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "openapi.yaml").write_text("GET /v1/x: {summary: s, gives: string}\n")
    monkeypatch.setattr(openapi, "ROOT", tmp_path)
    monkeypatch.setattr(openapi, "PARTS", ("a", "b"))
    with pytest.raises(ValueError, match="GET /v1/x"):
        openapi.document()
