"""Write docs/api.md from the OpenAPI document: every call with its role, body and answers."""

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
field. "Gives" names a schema of `GET /openapi.json`. `[]` means a list. A field without a type is
a string.
"""


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
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
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(document())
