"""What the scripts that write pages of docs/ share."""

import inspect
import re
import textwrap


def cell(text: str) -> str:
    """``text`` as it may stand in a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def comments(model: type) -> dict[str, str]:
    """What the comment beside or above each field of a model says of it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in textwrap.dedent(inspect.getsource(model)).splitlines():
        code, _, comment = line.partition("  # ")
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        if field := re.match(r"    (\w+): ", code):
            found[field[1]] = comment or " ".join(above)
        above = []
    return found
