"""Constants of the product in tests: who gets them, and who does not."""

import os
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

from nodeagent.settings import Settings
from tests.testbed import constants, starts
from volumes.settings import AuditSettings, LogSettings


def test_what_is_a_constant_is_taken_out_of_a_file() -> None:
    rules = {"leaked-mount": {"patience": "1s"}}
    given = {"volumes": {"audit": {"settle": "200ms", "names": ["a"], "rules": rules}}}
    rest, found = constants.divide(Settings, given)
    assert rest == {"volumes": {"audit": {"names": ["a"], "rules": rules}}}
    assert [each[1:] for each in found] == [(AuditSettings, "settle", 0.2)]
    with pytest.raises(pydantic.ValidationError):
        AuditSettings.model_validate({"settle": 0.2})


def test_an_object_has_its_own() -> None:
    made = constants.made(AuditSettings, settle="200ms", logs={"hold": "1s", "kernel": False})
    assert (made.settle, made.logs.hold, made.logs.kernel) == (0.2, 1.0, False)
    assert made.model_copy(update={"names": ("b",)}).settle == 0.2
    assert (AuditSettings().settle, LogSettings.hold) == (1.0, 900.0)


def test_a_process_gets_them_by_its_environment() -> None:
    _, found = constants.divide(Settings, {"volumes": {"audit": {"settle": 7}}})
    more = {"volumes.guard.kernel": {"OBJECT": "/elsewhere"}}
    environ = {**os.environ, **constants.environment(found, more)}
    environ["PYTHONPATH"] = os.pathsep.join(
        [starts.python_path(os.environ), str(Path(__file__).parents[2])]
    )
    code = (
        "from volumes.settings import AuditSettings; from volumes.guard import kernel;"
        "print(AuditSettings().settle, repr(kernel.OBJECT))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert said.stdout == "7.0 PosixPath('/elsewhere')\n"
