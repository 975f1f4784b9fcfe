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

The fields of the agent's objects, as `kubectl explain` shows them; [kubernetes.md](kubernetes.md)
says how they work together. `[]`: a list.

`scripts/crds_doc.py` makes this page from the CustomResourceDefinitions, which `scripts/crds.py`
makes from the settings' models; a test checks that it is current.
"""


def _rows(schema: dict[str, Any], prefix: str) -> list[str]:
    """A row for each field below ``schema``."""
    found = []
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        inner, path = field, f"{prefix}{name}"
        if field.get("type") == "array":
            inner, path = field["items"], f"{path}[]"
        kind = inner.get("type", "any")
        if "enum" in inner:
            kind = ", ".join(f"`{each}`" for each in inner["enum"])
        if name in required:
            kind += ", required"
        text = field.get("description") or inner.get("description", "")
        found.append(f"| `{path}` | {kind} | {pages.cell(text)} |")
        found += _rows(inner, f"{path}.")
    return found


def document() -> str:
    """The whole page."""
    lines = [HEAD]
    for each in yaml.safe_load_all(SOURCE.read_text()):
        names, version = each["spec"]["names"], each["spec"]["versions"][0]
        schema = version["schema"]["openAPIV3Schema"]
        short = ", ".join(f"`{name}`" for name in names.get("shortNames", []))
        lines += [f"## {names['kind']}", "", pages.cell(schema.get("description", "")), ""]
        api, scope = f"{each['spec']['group']}/{version['name']}", each["spec"]["scope"].lower()
        lines += [f"`{api}`, {scope}-wide, short: {short}.", ""]
        for part in ("spec", "status"):
            rows = _rows(schema["properties"].get(part, {}), f"{part}.")
            if rows:
                lines += ["| field | type | meaning |", "| --- | --- | --- |", *rows, ""]
        rules = schema["properties"].get("spec", {}).get("x-kubernetes-validations", [])
        if rules:
            lines += ["Rules that the API server keeps:", ""]
            lines += [f"* {pages.cell(rule['message'])}" for rule in rules if "message" in rule]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(document())
