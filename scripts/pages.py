"""What the scripts that write pages of docs/ share."""

import ast
import inspect
import io
import textwrap
import tokenize


def cell(text: str) -> str:
    """``text`` as it may stand in a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


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
