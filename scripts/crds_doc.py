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

[Kubernetes](kubernetes.md) explains how to use these objects. Their `apiVersion` is
`nodeagent.io/v1alpha1`. They have no namespace. This page leaves out some inner fields. To see
them, use for example `kubectl explain nst.status.datasets`.

The parentheses hold the type, the allowed values, or "required". A field without a type is a string
or has inner fields.
"""

# Most fields of these specs are those of a section of the settings, with the same texts: the
# section, its address in docs/settings.md, where the spec has its fields, what differs in them.
SECTIONS = {
    "CachedDataset": ("cache.datasets[]", "cachedatasets", "spec.", ""),
    "ImageSet": (
        *("preheat.images[]", "preheatimages", "spec.images[]."),
        " Write a duration as `pin: 72h`, not as `pin: {for: 72h}`.",
    ),
}
SETTINGS = ROOT / "docs" / "settings.md"


def _rows(schema: dict[str, Any], prefix: str, *, deep: bool) -> dict[str, str]:
    """For each field below ``schema``, by its path, a row; ``deep``: for inner fields, too."""
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
            if each not in ("string", "object")
        ]
        text = field.get("description") or inner.get("description", "")
        if prefix.startswith("status"):
            text = text.removesuffix(" Default: false.")
        found[path] = pages.item(path, ", ".join(notes), text)
        if deep:
            found |= _rows(inner, f"{path}.", deep=True)
    return found


def _without_settings(
    rows: dict[str, str], section: str, anchor: str, prefix: str, differs: str
) -> list[str]:
    """The rows of a spec; one item stands for what docs/settings.md explains."""
    told = re.findall(rf"^\* `{re.escape(section)}\.([^`]+)`", SETTINGS.read_text(), re.MULTILINE)
    names = list(dict.fromkeys(re.sub(r"[(].*?[)]", "", each) for each in told))
    shared = {f"{prefix}{each}" for each in names}
    shared |= {each.rpartition(".")[0] for each in shared} - {"spec"}  # what only holds fields
    there = {each for each in rows if each.removesuffix("[]") in shared or each in shared}
    missing = [
        f"`{each}`"
        for each in names
        if not {f"{prefix}{each}", f"{prefix}{each}[]"} & there
        and each not in ("source.kind", "pin.for")
    ]
    link = f"[`{section}`](settings.md#{anchor})"
    text = f"the fields of {link}, without {', '.join(missing)}.{differs}"
    all_of = pages.item(f"{prefix}*", "", text)
    return [all_of, *(row for name, row in rows.items() if name not in there)]


def document() -> str:
    """The whole page."""
    lines = [HEAD]
    seen: dict[str, str] = {}
    for each in yaml.safe_load_all(SOURCE.read_text()):
        names, (version,) = each["spec"]["names"], each["spec"]["versions"]
        assert (each["spec"]["group"], version["name"]) == ("nodeagent.io", "v1alpha1")  # HEAD
        schema = version["schema"]["openAPIV3Schema"]
        short = ", ".join(f"`{name}`" for name in names.get("shortNames", []))
        lines += [f"## {names['kind']}", "", pages.text(schema.get("description", "")), ""]
        lines += [f"Short name: {short}.", ""]
        for part in ("spec", "status"):
            spec = part == "spec"
            fields = _rows(schema["properties"].get(part, {}), f"{part}.", deep=spec)
            rows = list(fields.values())
            if spec and fields:
                rows = _without_settings(fields, *SECTIONS[names["kind"]])
            rows = [row.removesuffix(f": {schema['description']}") for row in rows]
            known = seen.setdefault("\n".join(rows), names["kind"])
            if rows and known != names["kind"]:
                rows = [f"The same fields as in the status of {known}."]
            lines += [f"{part.capitalize()}:", "", *rows, ""] if rows else []
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(document())
