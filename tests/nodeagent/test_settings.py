"""The joined settings model and the page of the docs that is made from it."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from nodeagent import rooms, settings
from nodeagent.settings import Settings
from tests.testbed import scripts

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
