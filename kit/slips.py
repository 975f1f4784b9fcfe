"""Reads YAML and TOML that people wrote. What is wrong is said with its line, and without a word of
the text: the libraries quote the place that they stumbled over, and that may be a password.

``cause`` says what is wrong with a value of the settings, which hold no passwords.
"""

import datetime
import re
import reprlib
import tomllib
from collections.abc import Sequence
from typing import Any

import yaml

import kit.redact

# Quoted words of a problem, each from its own first quote; an apostrophe in a word begins none.
_QUOTED = re.compile(r"""(?<!\w)(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""")
_TOKEN = re.compile(r"<[a-z ]+>|.{0,2}")  # of YAML itself: single characters and names of tokens
LONGEST_NAME = 64  # of what may be misspelt; to compare costs the square of it
_BOUNDS = {
    "greater_than_equal": "at least",
    "less_than_equal": "at most",
    "greater_than": "more than",
    "less_than": "less than",
}
_WORDS = re.compile(r"'([^']+)'")


def load_yaml(data: str | bytes) -> Any:
    """Raises ValueError with the problem and its line, without a cause that would say more."""
    try:
        return yaml.safe_load(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # Beside its own errors yaml lets through what made a malformed date or number fail.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"it is not valid YAML ({_said(error)})") from None


def load_toml(text: str) -> dict[str, Any]:
    """Raises ValueError with the problem and its line, without a cause that would say more."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not valid TOML ({_said(error)})") from None


def _said(error: Exception) -> str:
    number = line(error) if isinstance(error, yaml.MarkedYAMLError) else 0
    return problem(error) + (f", line {number}" if number else "")


def line(error: yaml.MarkedYAMLError) -> int:
    """The line of the problem, from 1; 0 when the error has none."""
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 0


def problem(error: Exception) -> str:
    """What is wrong, by an error of YAML or TOML; nothing of the text."""
    if isinstance(error, yaml.MarkedYAMLError):
        found = _plainer(error, error.problem or error.context or "it cannot be read")
    elif isinstance(error, yaml.reader.ReaderError):
        found = f"{error.reason}, at position {error.position}"
    elif isinstance(error, UnicodeDecodeError):
        found = f"{error.reason}, at position {error.start}"
    else:
        found = str(error)
    return _QUOTED.sub(_shown, found)


def _shown(quoted: re.Match[str]) -> str:
    inner = quoted[1] if quoted[1] is not None else quoted[2]
    return quoted[0] if _TOKEN.fullmatch(inner) else repr(kit.redact.HIDDEN)


def _plainer(error: yaml.MarkedYAMLError, found: str) -> str:
    """The problem in words of the file, where YAML speaks of its tokens."""
    begun = f" of line {error.context_mark.line + 1}" if error.context_mark else ""
    if found.startswith("expected ',' or") and begun:
        return f"the {'{' if '}' in found else '['!r}{begun} is not closed"
    if found.startswith("found unexpected end of stream") and begun:
        return f"the quote{begun} is not closed"
    if found.startswith("mapping values are not allowed"):
        return f"{found}: put a text with ': ' in quotes"
    if "'\\t'" in found:
        return f"{found}: indent with spaces, not tabs"
    return found


def cause(problem: Any, written: str | None = None, keys: Sequence[str] = ()) -> str:
    """What is wrong with a value that pydantic refused, in words of the file and not of its models.

    ``problem``: one of the error's; ``written``: the value as the file has it; ``keys``: what a
    section may have there.
    """
    context, kind, given = problem.get("ctx", {}), problem["type"], problem.get("input")
    # Aliases of aliases make a value that no text can hold.
    shown = reprlib.repr(given) if written is None else repr(written[:100])
    match kind:
        case "extra_forbidden":
            return "there is no such setting" + _meant(str(problem["loc"][-1]), keys)
        case "missing":
            return "this setting is missing"
        case "model_type" | "model_attributes_type" | "dict_type" if given is None:
            return "it is empty; write {} for its defaults, or leave it out"
        case "model_type" | "model_attributes_type" | "dict_type":
            known = f"; KEY is one of {', '.join(keys)}" if keys else ""
            return f"it is no section: write KEY: VALUE{known}"
        case "tuple_type" if isinstance(given, str | int | float):
            return f'it has to be a list: write ["{given if written is None else written}"]'
        case "tuple_type":
            return "it has to be a list: begin each element with '- '"
        case "too_short" if not context["actual_length"]:
            return f"the list is empty; name at least {context['min_length']}"
        case "too_short":
            return f"it has {context['actual_length']}, and needs {context['min_length']} at least"
        case "too_long":
            return f"it has more than {context['max_length']}, which is the most"
        case "string_too_short" | "string_too_long":
            most = context.get("max_length")
            bound = f"most {most}" if most else f"least {context['min_length']}"
            return f"it has to have at {bound} characters"
        case "string_type" | "path_type" if isinstance(given, bool | int | float | datetime.date):
            return (
                f'it has to be a text: put it in quotes, "{given if written is None else written}"'
            )
        case "string_type" | "path_type":
            return "it has to be a text"
        case "greater_than_equal" | "less_than_equal" | "greater_than" | "less_than":
            than, bound = _BOUNDS[kind], next(iter(context.values()))
            return f"{shown} is not allowed: it has to be {than} {bound:g}"
        case "literal_error" | "enum":
            return f"{shown} is not one of {context['expected']}"
        case "union_tag_not_found":
            key = context["discriminator"]
            near = close(key.strip("'"), [*map(str, given)] if isinstance(given, dict) else [])
            asked = f"; did you write {near[0]!r} for it?" if near else ""
            return f"{key} is missing: it says what this is{asked}"
        case "union_tag_invalid":
            key, value, known = (
                context[each] for each in ("discriminator", "tag", "expected_tags")
            )
            return f"there is no {key} {value!r}{_meant(value, re.findall(_WORDS, known))}"
    for begin, wanted in (("int_", "a whole number"), ("float_", "a number")):
        if kind.startswith(begin):
            return f"{shown} is not {wanted}"
    if kind.startswith("bool_"):
        return f"{shown} is neither true nor false"
    return str(problem["msg"]).removeprefix("Value error, ")


def close(word: str, known: Sequence[str]) -> list[str]:
    """The known word that a misspelt one is like; empty where none is."""
    import difflib  # only where something is wrong

    return difflib.get_close_matches(word[:LONGEST_NAME], known, 1)


def _meant(word: str, known: Sequence[str]) -> str:
    """``; did you mean 'budget'?``, or what there is."""
    if near := close(word, known):
        return f"; did you mean {near[0]!r}?"
    one_of = "one of " if len(known) > 1 else ""
    return f"; use {one_of}{', '.join(map(repr, known))}" if known else ""
