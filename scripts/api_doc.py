"""Write docs/api.md from the OpenAPI document: every call with its role, body and answers."""

from pathlib import Path
from typing import Any

import openapi
import pages

TARGET = Path(__file__).parent.parent / "docs" / "api.md"
HEAD = """\
# The admin API

HTTP and JSON, over the agent's unix socket or over TLS with a bearer token;
[security.md](security.md) says who may call what. The agent serves the whole
document, OpenAPI 3.1 with every schema, at `/openapi.json`. `nodeagent` on the command line makes
the same calls ([cli.md](cli.md)).

An error has the same body everywhere, and says what it is about, why, and what to do:

```json
{"error": {"message": "…", "thing": "dataset coco", "cause": "…", "remedy": "…", "exit_code": 5}}
```

`scripts/api_doc.py` makes this page; a test checks that it is current.
"""


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for several in ("oneOf", "anyOf"):
        if several in schema:
            return " or ".join(_type(each) for each in schema[several])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items') or {})}"
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _field(name: str, schema: dict[str, Any], required: bool) -> str:
    notes = [_type(schema), "required" if required else ""]
    if "default" in schema:
        notes.append(f"default `{str(schema['default']).lower()}`")
    words = ", ".join(note for note in notes if note)
    text = schema.get("description", "")
    return f"`{name}` ({words}){': ' if text else ''}{text}"


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
    """The answer when all goes well."""
    status, answer = next((s, a) for s, a in call["responses"].items() if s < "400")
    kinds = {
        _type(content["schema"]) if "schema" in content else media
        for media, content in answer.get("content", {}).items()
    }
    return f"{status} {', '.join(sorted(kinds))}".strip()


def document() -> str:
    """The whole page."""
    parts: dict[str, list[str]] = {}
    whole = openapi.document()
    for path, item in whole["paths"].items():
        words = path.split("/")
        part = words[2] if words[1] == "v1" else "the process"
        for method in sorted(openapi.METHODS & item.keys()):
            call = item[method]
            asks = pages.cell("; ".join(_asks(item, call)))
            does = pages.cell(call["summary"])
            row = f"| `{method.upper()} {path}` | {does} | {asks} | {_gives(call)} |"
            parts.setdefault(part, []).append(row)
    lines = [HEAD]
    for part, rows in parts.items():
        lines += [f"## {part}", "", "| call | what it does | it takes | it gives |"]
        lines += ["| --- | --- | --- | --- |", *rows, ""]
    lines += ["## Schemas", ""]
    for name, schema in sorted(whole["components"]["schemas"].items()):
        fields = schema.get("properties", {})
        if not fields:
            continue
        required = schema.get("required", [])
        lines += [f"### {name}", ""]
        if "description" in schema:
            lines += [pages.cell(schema["description"]), ""]
        lines += ["| field | type | meaning |", "| --- | --- | --- |"]
        for field, inner in fields.items():
            kind = _type(inner) + ("" if field in required else ", may be absent")
            lines.append(
                f"| `{field}` | {pages.cell(kind)} | {pages.cell(inner.get('description', ''))} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(document())
