"""What schemathesis asks for in each request (its hooks; see test_fuzz.py)."""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import schemathesis

# A limit counts the calls of one caller: each request comes from another.
_TOKENS = itertools.cycle(os.environ["FUZZ_TOKENS"].split())
_DATASET, _IMAGE = os.environ["FUZZ_DATASET"], os.environ["FUZZ_IMAGE"]
_turns: dict[str, Iterator[int]] = defaultdict(itertools.count)  # of each operation


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """A caller; what exists here instead of what was made up.

    It stands in every third request of an operation that names something, the first one included:
    counted over all operations, it was left to chance whether a request for an image ever did.
    """
    case.headers = {**(case.headers or {}), "Authorization": f"Bearer {next(_TOKENS)}"}
    names = case.path_parameters or {}
    if "name" in names and case.path.endswith("/progress"):
        names["name"] += "-not-here"  # the stream of one that is here has no end
        return
    in_query = "ref" in (case.query or {})
    in_body = isinstance(case.body, dict) and isinstance(case.body.get("ref"), str)
    if not ("name" in names or in_query or in_body) or next(_turns[case.operation.label]) % 3:
        return
    if "name" in names:
        names["name"] = _DATASET
    if in_query:
        case.query["ref"] = _IMAGE
    if in_body:
        case.body["ref"] = _IMAGE
