"""Write docs/crds.md from the CustomResourceDefinitions: every field of the agent's objects."""

from pathlib import Path
from typing import Any

import pages
import yaml

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "deploy" / "manifests" / "crds.yaml"
TARGET = ROOT / "docs" / "crds.md"
HEAD = """\
# Objects of the cluster

The fields of the agent's objects. `kubectl explain cds.spec` shows the same text.
[kubernetes.md](kubernetes.md) explains how to use them.

How to read the lists: the parentheses hold the type or the allowed values. A field without a type
is a string. A size is a number, or text like `500GiB` or `500Gi`. `[]` means a list. A text that
begins with `(cephfs)` is for this kind of source only. A time in RFC 3339 is like
`2026-11-22T04:10:05Z`.
"""


# Objects whose fields need no explanation.
_PLAIN = ("status.conditions[]", "status.findingCounts", "status.versions")


def _rows(schema: dict[str, Any], prefix: str) -> list[str]:
    """A row for each field below ``schema``."""
    found = []
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        inner, path = field, f"{prefix}{name}"
        if field.get("type") == "array":
            inner, path = field["items"], f"{path}[]"
        kind = inner.get("type", "size" if "x-kubernetes-int-or-string" in inner else "any")
        if "enum" in inner:
            kind = ", ".join(f"`{each}`" for each in inner["enum"])
        notes = [
            each
            for each in (kind, *["required"] * (name in required and prefix.startswith("spec")))
            if each != "string"
        ]
        text = field.get("description") or inner.get("description", "")
        if prefix.startswith("status"):
            text = text.removesuffix(" Default: false.")
        if kind == "object" and path.count(".") == 1 and field.get("type") != "array":
            notes = notes[1:]  # its fields follow
        found.append(pages.item(path, ", ".join(notes), text))
        if path not in _PLAIN:
            found += _rows(inner, f"{path}.")
    return found


def document() -> str:
    """The whole page."""
    lines = [HEAD]
    seen: dict[str, str] = {}
    for each in yaml.safe_load_all(SOURCE.read_text()):
        names, version = each["spec"]["names"], each["spec"]["versions"][0]
        schema = version["schema"]["openAPIV3Schema"]
        short = ", ".join(f"`{name}`" for name in names.get("shortNames", []))
        lines += [f"## {names['kind']}", "", pages.text(schema.get("description", "")), ""]
        api, scope = f"{each['spec']['group']}/{version['name']}", each["spec"]["scope"].lower()
        lines += [f"`{api}`, {scope}-wide, short: {short}.", ""]
        for part in ("spec", "status"):
            rows = _rows(schema["properties"].get(part, {}), f"{part}.")
            rows = [row.removesuffix(f": {schema['description']}") for row in rows]
            known = seen.setdefault("\n".join(rows), names["kind"])
            if rows and known != names["kind"]:
                rows = [f"The same fields as in the status of {known}."]
            lines += [f"{part.capitalize()}:", "", *rows, ""] if rows else []
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(document())
