"""The joined settings model and the page of the docs that is made from it."""

import enum
import typing
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from cache.settings import ViewAccessSettings
from ceph.settings import ClusterSettings
from kube.settings import AccessSettings
from nodeagent import rooms, settings
from nodeagent.cluster.kinds import SecretRef
from nodeagent.settings import AdminSettings, Settings
from preheat.settings import ImageSettings, PreheatSettings
from tests.testbed import scripts
from volumes.settings import GuardSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """scripts/settings_doc.py."""
    return scripts.load("settings_doc")


def test_every_room_has_a_section() -> None:
    fields = Settings.model_fields
    for room in rooms.ROOMS:
        assert fields[room.name].default is None
        assert fields[room.name].description == room.summary
        assert getattr(Settings(), room.name) is None
        section = getattr(Settings.model_validate({room.name: {}}), room.name)
        assert isinstance(section, room.settings)


def test_every_setting_is_described(generator: Any) -> None:
    seen: set[type[BaseModel]] = set()

    def missing(model: type[BaseModel]) -> list[str]:
        if model in seen:
            return []
        seen.add(model)
        found = []
        for name, field in model.model_fields.items():
            if not generator.description(model, name):
                found.append(f"{model.__name__}.{name}")
            for inner in generator.models(field.annotation):
                found += missing(inner)
        return found

    assert missing(Settings) == []
    assert len(seen) >= 15


def test_every_word_that_a_setting_takes_is_in_its_description(generator: Any) -> None:
    """Of settings that take one of a few words."""
    missing: list[str] = []
    seen = 0

    def look(model: type[BaseModel]) -> None:
        nonlocal seen
        for name, field in model.model_fields.items():
            for part in (field.annotation, *typing.get_args(field.annotation)):
                words = typing.get_args(part) if typing.get_origin(part) is Literal else ()
                if isinstance(part, type) and issubclass(part, enum.Enum):
                    words = tuple(each.value for each in part)
                text = generator.description(model, name)
                seen += bool(words) and name != "kind"
                if name != "kind":
                    missing.extend(f"{model.__name__}.{name}: {w}" for w in words if w not in text)
            for inner in generator.models(field.annotation):
                look(inner)

    look(Settings)
    assert seen >= 8
    assert missing == []


@pytest.mark.parametrize(
    ("listen", "host", "port", "loopback"),
    [
        ("127.0.0.1:9470", "127.0.0.1", 9470, True),
        ("[::1]:80", "::1", 80, True),
        ("localhost:1", "localhost", 1, True),
        ("10.0.0.1:80", "10.0.0.1", 80, False),
        ("node.example:80", "node.example", 80, False),
    ],
)
def test_address_is_taken_apart(listen: str, host: str, port: int, loopback: bool) -> None:
    assert settings.address(listen) == (host, port)
    assert settings.is_loopback(host) is loopback


def test_docs_page_is_current(generator: Any) -> None:
    current = generator.document() == generator.TARGET.read_text()
    assert current, "run .venv/bin/python scripts/settings_doc.py"


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (SecretRef, {"name": "a"}),
        (SecretRef, {"name": "a", "key": "b"}),
        (ViewAccessSettings, {"mode": "0755"}),
        (AccessSettings, {"server": "https://a:1"}),
        (ImageSettings, {"ref": "r.test/a:1"}),
        (PreheatSettings, {"windows": ["01:00-02:00"]}),
        (GuardSettings, {"drivers": ["rbd"]}),
        (Settings, {"node": "n1"}),
        (AdminSettings, {"metrics": "127.0.0.1:9470"}),
        (ClusterSettings, {"name": "c", "monitors": ["10.0.0.1:1"], "secret_file": "/k"}),
        (ClusterSettings, {"monitors": ["a:1"], "secret_file": "/k", "name": "c"}),
        (ClusterSettings, {"name": "c", "monitors": ["a:1"], "secret_file": "/k", "user": "u"}),
    ],
)
def test_name_is_matched_whole(model: type[BaseModel], given: dict[str, str | list[str]]) -> None:
    """'$' of Python's patterns lets one newline through: a name that no command can write."""
    model.model_validate(given)
    *_, (key, value) = ((k, v) for k, v in given.items() if k != "secret_file")
    wrong = f"{value}\n" if isinstance(value, str) else [f"{value[0]}\n"]
    with pytest.raises(ValueError, match=key):
        model.model_validate({**given, key: wrong})
