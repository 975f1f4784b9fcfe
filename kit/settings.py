"""The base of every settings model, and the field types that several rooms use."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kit import units

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Section(BaseModel):
    """Frozen; unknown keys are refused, so that a misspelt setting never passes silently.

    The text below a field describes it in docs/settings.md. Only scripts/settings_doc.py reads it:
    pydantic's own use_attribute_docstrings makes each start 60 ms longer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Shown(BaseModel):
    """A part of what the agent writes into objects of the cluster; there in camelCase.

    The comment beside or above a field describes it in their schemas (scripts/crds.py).

    Agents read each other's: what a newer one writes and this one does not know is left out.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )


def absolute(path: Path) -> Path:
    """``path`` when it is absolute, else ValueError: no working directory counts."""
    if not path.is_absolute():
        raise ValueError(f"{str(path)!r} is relative; give an absolute path")
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} has a NUL character, which no path can have")
    return path


def one_line(text: str) -> str:
    """``text`` when it has no control characters, else ValueError: it becomes an argument of a
    program or a line of a file."""
    if _CONTROL.search(text):
        raise ValueError(f"{text!r} has control characters")
    return text


def misplaced(said: str, *place: str | int) -> ValueError:
    """A mistake that a check of the whole section found at ``place`` below it."""
    return PydanticCustomError("misplaced", "{said}", {"said": said, "place": place})


def again(names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Each of ``names`` that is there before, and its number."""
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            yield number, name
        seen.add(name)


def _word_of(value: object) -> object:
    """YAML reads ``on`` and ``off`` as booleans where they have no quotes."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


# Beside a Literal that has one of the two words.
OnOrOff = BeforeValidator(_word_of)


def matching(pattern: str, what: str) -> Callable[[str], str]:
    """Gives back a text that is all ``pattern``; else ValueError: it is not ``what``."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not {what}")
        return text

    return check


word = matching(r"[\w.+-]+", "a plain name (letters, digits and _.+-)")

AbsolutePath = Annotated[Path, AfterValidator(absolute)]
Word = Annotated[str, AfterValidator(word)]
Bytes = Annotated[int, BeforeValidator(units.parse_size), PlainSerializer(units.exact_size)]
Seconds = Annotated[
    float, BeforeValidator(units.parse_duration), PlainSerializer(units.exact_duration)
]
Share = Annotated[float, BeforeValidator(units.parse_share), PlainSerializer(units.exact)]
