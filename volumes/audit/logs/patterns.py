"""Reads and checks the pattern file."""

import importlib.resources
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pydantic
import yaml
from pydantic import Field, field_validator, model_validator

import kit.errors
import kit.settings
from volumes.audit.logs.matcher import Expression
from volumes.audit.types import Severity

_MOST_PATTERNS = 200
_LONGEST_REGEX = 2000


class Pattern(kit.settings.Section):
    """One kind of line. The head of patterns.yaml explains the fields."""

    id: str
    source: Literal["kernel", "userspace"]
    anchor: str = Field(min_length=3)
    regex: str = Field(max_length=_LONGEST_REGEX)
    severity: Severity
    meaning: str
    advice: str
    at_least: tuple[int, float] = (1, 3600.0)
    hint: Literal["", "unmap-failed", "busy"] = ""
    examples: tuple[str, ...] = ()
    near_misses: tuple[str, ...] = ()

    @field_validator("id")
    @classmethod
    def _name(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,50}", value):
            raise ValueError(f"{value!r} is not an id: use lower-case letters, digits and '-'")
        return value

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value

    @field_validator("at_least")
    @classmethod
    def _positive(cls, value: tuple[int, float]) -> tuple[int, float]:
        if not 1 <= value[0] <= 1000 or not 1 <= value[1] <= 86400:
            raise ValueError("give [times from 1 to 1000, seconds from 1 to 86400]")
        return value

    @model_validator(mode="after")
    def _examples_hold(self) -> "Pattern":
        compiled = re.compile(self.regex)
        for example in self.examples:
            if self.anchor not in example or not compiled.search(example):
                raise ValueError(f"does not match its own example {example!r}")
        return self


def built_in() -> tuple[Pattern, ...]:
    """The patterns that come with the agent."""
    file = importlib.resources.files(__package__) / "patterns.yaml"
    return _parse(file.read_text(encoding="utf-8"), "patterns.yaml")


def load(own: Path | None) -> tuple[Pattern, ...]:
    """The built-in patterns and the operator's. SettingsError names the file and the pattern."""
    patterns = {pattern.id: pattern for pattern in built_in()}
    if own is not None:
        try:
            text = own.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise kit.errors.SettingsError(
                f"volumes.audit.logs.patterns {own}", f"cannot be read ({error})", "mount it there"
            ) from error
        patterns |= {pattern.id: pattern for pattern in _parse(text, str(own))}
    if len(patterns) > _MOST_PATTERNS:
        raise kit.errors.SettingsError(
            str(own),
            f"{len(patterns)} patterns, built-in ones included",
            f"use at most {_MOST_PATTERNS}",
        )
    return tuple(patterns.values())


def _parse(text: str, origin: str) -> tuple[Pattern, ...]:
    try:
        entries = yaml.safe_load(text) or []
    except yaml.YAMLError as error:
        raise kit.errors.SettingsError(
            origin, f"it is not valid YAML ({error})", "correct it"
        ) from error
    if not isinstance(entries, list):
        raise kit.errors.SettingsError(origin, "it is not a list of patterns", "see docs/audit.md")
    found = []
    for number, entry in enumerate(entries, 1):
        name = entry.get("id", f"pattern {number}") if isinstance(entry, dict) else f"{number}"
        try:
            found.append(Pattern.model_validate(entry))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise kit.errors.SettingsError(
                f"{origin}: {name}",
                f"{where}: {first['msg'].removeprefix('Value error, ')}",
                "correct it; docs/audit.md lists the fields",
            ) from error
    return tuple(found)


def expressions(patterns: Iterable[Pattern]) -> tuple[Expression, ...]:
    """The part of the patterns that the log child needs."""
    return tuple(Expression(p.id, p.source, p.anchor, p.regex) for p in patterns)
