"""Write docs/api.md from the OpenAPI document: every call with the names of its fields."""

import re
from pathlib import Path
from typing import Any

import openapi
import pages

DOCS = Path(__file__).parent.parent / "docs"
TARGET = DOCS / "api.md"
COMMANDS = DOCS / "cli.md"
HEAD = """\
# The admin API

The agent answers with JSON on a unix socket. If you set `admin.api`, it also listens on TCP with
TLS and a bearer token ([security](security.md#who-may-do-what)).

* A call without a description does what the [command](cli.md) of the same name does.
* `GET /openapi.json` describes the fields, the answers and the errors.
* The parentheses name the fields of the request's body or query. `!` marks a required field.
* Every error has the body below, except the 503 of `/readyz`. `exit_code` is the
  [exit code](cli.md#exit-codes) of the command line:

```json
{"error": {"message": "…", "thing": "dataset coco", "cause": "…", "remedy": "…", "exit_code": 5}}
```
"""

# Parts of the agent with a section of their own.
_PARTS = ("datasets", "images", "volumes", "audit")


def _fields(item: dict[str, Any], call: dict[str, Any]) -> list[str]:
    """Parameters and fields of the body, by name."""
    found = [
        (each["name"], each.get("required", False))
        for each in [*item.get("parameters", []), *call.get("parameters", [])]
        if each["in"] != "path"
    ]
    for content in call.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        required = schema.get("required", [])
        found += [(name, name in required) for name in schema.get("properties", {})]
    return [f"`{name}`{'!' if required else ''}" for name, required in found]


def document() -> str:
    """The whole page."""
    parts: dict[str, list[str]] = {}
    whole = openapi.document()
    commands = COMMANDS.read_text(encoding="utf-8")
    for path, item in whole["paths"].items():
        words = path.split("/")
        part = words[2] if words[1] == "v1" else ""
        part = part.capitalize() if part in _PARTS else "The node"
        for method in sorted(openapi.METHODS & item.keys()):
            call = item[method]
            said = call["summary"].partition(". ")[0] + "."  # /openapi.json has the rest
            command = f"{part.removesuffix('s').lower()} {words[-1]}"
            if method != "get" and re.search(rf"^\* `{command}\b", commands, re.MULTILINE):
                said = ""
            row = pages.item(f"{method.upper()} {path}", ", ".join(_fields(item, call)), said)
            parts.setdefault(part, []).append(row)
    lines = [HEAD]
    for part, rows in parts.items():
        lines += [f"## {part}", "", *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(document())
