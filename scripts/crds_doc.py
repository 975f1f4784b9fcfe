"""Write docs/crds.md from the CustomResourceDefinitions: every field of the agent's objects."""

import re
from pathlib import Path
from typing import Any

import pages
import yaml

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "deploy" / "manifests" / "crds.yaml"
TARGET = ROOT / "docs" / "crds.md"
HEAD = """\
# Objects of the cluster

The fields of the agent's objects. `kubectl explain cds.spec` shows each field.
[kubernetes.md](kubernetes.md) explains how to use the objects.

How to read the lists: the parentheses hold the type or the allowed values. A field without a type
is a string. `[]` means a list. A time in RFC 3339 is like `2026-11-22T04:10:05Z`.
"""

# Most fields of a CachedDataset are those of this section of the settings, with the same texts.
SECTION = "cache.datasets[]"
SETTINGS = ROOT / "docs" / "settings.md"

# Objects whose fields need no explanation.
_PLAIN = ("status.conditions[]", "status.findingCounts", "status.versions")


def _rows(schema: dict[str, Any], prefix: str) -> dict[str, str]:
    """For each field below ``schema``, by its path, a row."""
    found = {}
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
        found[path] = pages.item(path, ", ".join(notes), text)
        if path not in _PLAIN:
            found |= _rows(inner, f"{path}.")
    return found


def _without_settings(rows: dict[str, str]) -> list[str]:
    """The rows of a CachedDataset's spec; one item names what docs/settings.md explains."""
    told = re.findall(rf"^\* `{re.escape(SECTION)}\.([^`]+)`", SETTINGS.read_text(), re.MULTILINE)
    shared = {f"spec.{re.sub(r'[(].*?[)]', '', each)}" for each in told}
    shared |= {each.rpartition(".")[0] for each in shared} - {"spec"}  # what only holds fields
    names = [each for each in rows if each.removesuffix("[]") in shared]
    inner = [f"`{each}`" for each in names if not any(row.startswith(f"{each}.") for row in rows)]
    others = f"* As [`{SECTION}`](settings.md#cachedatasets) in the settings: {', '.join(inner)}."
    return [pages.wrapped(others, "  "), *(row for name, row in rows.items() if name not in names)]


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
            fields = _rows(schema["properties"].get(part, {}), f"{part}.")
            shared = names["kind"] == "CachedDataset" and part == "spec"
            rows = _without_settings(fields) if shared else list(fields.values())
            rows = [row.removesuffix(f": {schema['description']}") for row in rows]
            known = seen.setdefault("\n".join(rows), names["kind"])
            if rows and known != names["kind"]:
                rows = [f"The same fields as in the status of {known}."]
            lines += [f"{part.capitalize()}:", "", *rows, ""] if rows else []
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(document())
