"""Write docs/api.md from the OpenAPI document: every call with its role, body and answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openapi
import pages

TARGET = Path(__file__).parent.parent / "docs" / "api.md"
HEAD = """\
# The admin API

HTTP and JSON. The agent listens on a unix socket, and over TCP with TLS and a bearer token if you
set `admin.api`. The command line makes the same calls ([cli.md](cli.md)).

* Who may call what: [security.md](security.md#who-may-do-what).
* The OpenAPI 3.1 document has all schemas and error codes: `GET /openapi.json`.
* Every error has the same body. `exit_code` is the exit code of the command line.

```json
{"error": {"message": "…", "thing": "dataset coco", "cause": "…", "remedy": "…", "exit_code": 5}}
```

How to read the lists: "Takes" names the fields of the body or the query; `!` marks a required
field. "Gives" names a schema. The most important schemas are below, the others in
`GET /openapi.json`. `[]` means a list. A field without a type is a string.
"""


# Schemas of objects inside others: the page has what they are, the whole document their fields.
# Those that most callers need; the others are in the document.
ON_PAGE = ("Dataset", "Finding", "Image", "Overview")
INNER = {name: each for name, each in openapi.models().items() if name not in openapi.SHOWN}


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return "object" if name in INNER else name
    for several in ("oneOf", "anyOf"):
        if several in schema:
            return ", ".join(_type(each) for each in schema[several])
    if "enum" in schema:
        return ", ".join(f"`{each}`" if each else "empty" for each in schema["enum"])
    if schema.get("type") == "array":
        kind = _type(schema.get("items") or {})
        return f"({kind})[]" if " " in kind else f"{kind}[]"
    kind = schema.get("type", "any")
    return ", ".join(kind) if isinstance(kind, list) else str(kind)


def _field(name: str, schema: dict[str, Any], required: bool) -> str:
    notes = [kind for kind in [_type(schema)] if kind != "string"]
    if "default" in schema:
        notes.append(f"default `{str(schema['default']).lower()}`")
    said = ": ".join(filter(None, (", ".join(notes), schema.get("description", ""))))
    return f"`{name}`{'!' if required else ''}{f' ({said})' if said else ''}"


def _asks(item: dict[str, Any], call: dict[str, Any]) -> list[str]:
    """Parameters and fields of the body."""
    found = [
        _field(each["name"], {**each["schema"], "description": each.get("description", "")},
               each.get("required", False))
        for each in [*item.get("parameters", []), *call.get("parameters", [])]
        if each["in"] != "path"
    ]  # fmt: skip
    for content in call.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        required = schema.get("required", [])
        for name, field in schema.get("properties", {}).items():
            found.append(_field(name, field, name in required))
    return found


def _gives(call: dict[str, Any]) -> str:
    """The schema of the answer when all goes well; empty for what has no name."""
    answer = next(a for s, a in call["responses"].items() if s < "400")
    kinds = {
        _type(content["schema"])
        for content in answer.get("content", {}).values()
        if "$ref" in content.get("schema", {})
    }
    return ", ".join(sorted(kinds))


def _of_inner(schema: dict[str, Any]) -> str:
    """What is said of the object that a field holds."""
    for each in [schema, *schema.get("anyOf", [])]:
        if found := INNER.get(str(each.get("$ref")).rpartition("/")[2]):
            return str(found.get("description", ""))
    return ""


def _items(fields: dict[str, Any], required: list[str]) -> Iterator[str]:
    """An item for each field; one for several that have no description."""
    plain: list[str] = []
    for name, schema in fields.items():
        shown, kind = name if name in required else f"{name}?", _type(schema)
        text = schema.get("description") or _of_inner(schema)
        if text:
            yield from _together(plain)
            plain = []
            yield pages.item(shown, "" if kind == "string" else kind, text)
        else:
            plain.append(f"`{shown}`" + ("" if kind == "string" else f" ({kind})"))
    yield from _together(plain)


def _together(plain: list[str]) -> Iterator[str]:
    """One item for fields without a description. ``plain``: names with types."""
    if plain:
        yield pages.wrapped(f"* {', '.join(plain)}", "  ")


def document() -> str:
    """The whole page."""
    parts: dict[str, list[str]] = {}
    whole = openapi.document()
    for path, item in whole["paths"].items():
        words = path.split("/")
        part = (words[2] if words[1] == "v1" else "the process").capitalize()
        for method in sorted(openapi.METHODS & item.keys()):
            call = item[method]
            said = [call["summary"]]
            said += [f"Takes {', '.join(asks)}" for asks in [_asks(item, call)] if asks]
            said += [f"Gives {gives}" for gives in [_gives(call)] if gives]
            row = pages.item(f"{method.upper()} {path}", "", f"{'. '.join(said)}.")
            parts.setdefault(part, []).append(row)
    lines = [HEAD]
    for part, rows in parts.items():
        lines += [f"## {part}", "", *rows, ""]
    lines += ["## Schemas", ""]
    for name, schema in sorted(whole["components"]["schemas"].items()):
        fields = schema.get("properties", {})
        if name not in ON_PAGE:
            continue
        required = schema.get("required", [])
        lines += [f"### {name}", ""]
        if "description" in schema:
            lines += [pages.text(schema["description"]), ""]
        lines += _items(fields, required)
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(document())
