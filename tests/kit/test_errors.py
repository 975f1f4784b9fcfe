"""One line for people, one exit code for programs."""

import pytest

from kit import errors


def test_exit_codes_differ() -> None:
    classes: list[type[errors.AgentError]] = errors.AgentError.__subclasses__()
    ours = [c for c in classes if c.__module__ == "kit.errors"]
    codes = [errors.AgentError.exit_code, *(c.exit_code for c in ours)]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes
    assert 2 not in codes  # click's for bad usage


def test_text_is_thing_cause_remedy() -> None:
    error = errors.SourceError("dataset a", "it does not answer", "look at it")
    assert str(error) == "dataset a: it does not answer; look at it"
    assert str(errors.AgentError("a", "b", "")) == "a: b"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a; b"),
        (["a", "b", "c"], "a; b and 1 more"),
        (["a", "b", "c", "d", "e"], "a; b and 3 more"),
    ],
)
def test_a_list_is_bounded_and_says_how_many_more(texts: list[str], said: str) -> None:
    assert errors.some(texts, 2) == said
    assert errors.some(texts, 2, ", ") == said.replace(";", ",")
