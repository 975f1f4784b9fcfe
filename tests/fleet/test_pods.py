"""How a command in a pod ended, by what the API server says last."""

import pytest

import kit.errors
from fleet import pods


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (b'{"metadata": {}, "status": "Success"}', 0),
        (
            (
                b'{"status": "Failure", "reason": "NonZeroExitCode", "message": "exit code 13", '
                b'"details": {"causes": [{"reason": "ExitCode", "message": "13"}]}}'
            ),
            13,
        ),
    ],
)
def test_exit_codes(result: bytes, code: int) -> None:
    assert pods._code("pod a/b", result) == code


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (b"", kit.errors.UnreachableError, "pod a/b: the connection ended before the command did"),
        (b"boom", kit.errors.UnreachableError, "the connection ended before the command did"),
        (
            (
                b'{"status": "Failure", "reason": "InternalError", "message": "not\\nfound", '
                b'"details": {"causes": [{"message": "not found"}]}}'
            ),
            kit.errors.RefusedError,
            "pod a/b: the command could not be run: not found",
        ),
    ],
    ids=["cut off", "no JSON", "not started"],
)
def test_a_command_that_did_not_run(result: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        pods._code("pod a/b", result)
    assert str(raised.value).startswith(words) or words in str(raised.value)
