"""Reads YAML and TOML that people wrote. What is wrong is said with its line, and without a word of
the text: the libraries quote the place that they stumbled over, and that may be a password.
"""

import re
import tomllib
from typing import Any

import yaml

import kit.redact

# Quoted words of a problem, but for single characters and the names of YAML's own tokens.
_QUOTED = re.compile(r"'(?!<[a-z ]+>')[^']{3,}'|\"[^\"]{3,}\"")


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
        found = error.problem or error.context or "it cannot be read"
    elif isinstance(error, yaml.reader.ReaderError):
        found = f"{error.reason}, at position {error.position}"
    elif isinstance(error, UnicodeDecodeError):
        found = f"{error.reason}, at position {error.start}"
    else:
        found = str(error)
    return _QUOTED.sub(repr(kit.redact.HIDDEN), found)
