"""docs/promises.md: what is promised, and the tests that prove it, of each set.

A proof is a file of tests or a test, as pytest names it. One of ``make test`` is a
unit test, or a real one that tests/gate.txt names; after "long:" a real one that it does not name.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import gate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"
_REAL = rf"{gate.REAL}|^@real$"  # a module may give the mark a short name


@dataclass(frozen=True)
class Promise:
    """``soon``: its proofs in ``make test``; ``late``: those in ``make test-long``."""

    text: str
    soon: tuple[str, ...]
    late: tuple[str, ...]


def read(page: str) -> list[Promise]:
    """The items of all lists of the page; proofs of ``make test-long`` follow the word long."""
    found = []
    for item in re.split(r"^\* ", page, flags=re.MULTILINE)[1:]:
        soon: list[str] = []
        late: list[str] = []
        for line in item.splitlines():
            (late if line.strip().startswith("long:") else soon).extend(_proofs(line))
        text = item.partition("\n")[0].strip()
        found.append(Promise(text, tuple(soon), tuple(late)))
    return found


def _proofs(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`(tests/[^`]+)`", text))


def complaints(
    promises: Iterable[Promise], entries: Sequence[str], root: Path = ROOT
) -> Iterator[str]:
    """What is wrong: a promise without a proof, or a proof that is not there or in the other set.

    ``entries``: those of tests/gate.txt.
    """
    for promise in promises:
        if not (promise.soon or promise.late):
            yield f"nothing proves: {promise.text}"
        for proof in (*promise.soon, *promise.late):
            text = _of(root, proof)
            if text is None:
                yield f"{proof} is not there; it is to prove: {promise.text}"
            elif re.search(r"mark\.(skip|xfail)\b", text):
                yield f"{proof} is left out; it is to prove: {promise.text}"
            elif _is_soon(proof, entries, text) is not (proof in promise.soon):
                yield f"{proof} is in the other set; it proves: {promise.text}"


def _of(root: Path, proof: str) -> str | None:
    """Marks and head of a test, or a file's own marks; None when it is not there."""
    name, _, case = proof.partition("::")
    file = root / name
    if not file.exists():
        return None
    text = file.read_text()
    whole = gate.module_marks(text)
    if not case:
        return whole + "".join(re.findall(r"^@pytest\.mark\.real$", text, re.MULTILINE))
    found = re.search(rf"^(?:async )?def {case}\(", text, re.MULTILINE)
    if found is None:
        return None
    head = text[: found.start()]
    return whole + head[head.rindex("\n\n") :]


def _is_soon(proof: str, entries: Sequence[str], head: str) -> bool:
    if not re.search(_REAL, head, re.MULTILINE):
        return True
    return any(gate.names(each, proof) or each.startswith(proof) for each in entries)
