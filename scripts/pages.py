"""What the scripts that write pages of docs/ share."""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator

WIDTH = 120
_TIED = "\0"  # a space at which no line ends


def text(given: str) -> str:
    """One line without what Markdown takes for HTML."""
    return " ".join(given.split()).replace("<", "&lt;")


def item(name: str, notes: str = "", meaning: str = "") -> str:
    """An item of a list: a name, in parentheses what is short, and a meaning; wrapped."""
    whole = f"* `{name}`{f' ({notes})' if notes else ''}{': ' if meaning else ''}{text(meaning)}"
    return wrapped(whole, "  ")


def wrapped(given: str, indent: str = "") -> str:
    """No line ends inside code, unless that is longer than a line can be."""
    tied = re.sub(r"`[^`]{1,100}`", lambda code: code[0].replace(" ", _TIED), given)
    return textwrap.fill(
        tied, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).replace(_TIED, " ")


def reflowed(page: str) -> str:
    """Paragraphs and items of plain Markdown without blocks, wrapped again."""
    return "\n".join(wrapped(each, "  " if each[:1] == "*" else "") for each in _joined(page))


def _joined(page: str) -> Iterator[str]:
    """Each paragraph and each item as one line; empty lines stay."""
    whole = ""
    for line in page.split("\n"):
        if whole and line and not line.startswith(("* ", "#")):
            whole += f" {line.strip()}"
            continue
        if whole:
            yield whole
        whole = line
        if not line:
            yield ""
    if whole:
        yield whole


def comments(model: type) -> dict[str, str]:
    """What the comment beside or above each field of a model says of it."""
    source = textwrap.dedent(inspect.getsource(model))
    beside, alone = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            kind = beside if token.line[: token.start[1]].strip() else alone
            kind[token.start[0]] = token.string.removeprefix("# ")
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    found = {}
    for field in made.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above: list[str] = []
            while (line := field.lineno - len(above) - 1) in alone:
                above.insert(0, alone[line])
            found[field.target.id] = beside.get(field.lineno) or " ".join(above)
    return found
