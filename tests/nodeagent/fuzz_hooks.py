"""What schemathesis asks for in each request (its hooks; see test_fuzz.py)."""

import itertools
import os
from typing import Any

import schemathesis

# A limit counts the calls of one caller: each request comes from another.
_TOKENS = itertools.cycle(os.environ["FUZZ_TOKENS"].split())
_DATASET, _IMAGE = os.environ["FUZZ_DATASET"], os.environ["FUZZ_IMAGE"]
_turns = itertools.count()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """A caller; in every third request what exists here instead of what was made up."""
    case.headers = {**(case.headers or {}), "Authorization": f"Bearer {next(_TOKENS)}"}
    named = "name" in (case.path_parameters or {})
    if named and case.path.endswith("/progress"):
        case.path_parameters["name"] += "-not-here"  # the stream of one that is here has no end
    if next(_turns) % 3:
        return
    if named and not case.path.endswith("/progress"):
        case.path_parameters["name"] = _DATASET
    if "ref" in (case.query or {}):
        case.query["ref"] = _IMAGE
    if isinstance(case.body, dict) and isinstance(case.body.get("ref"), str):
        case.body["ref"] = _IMAGE
