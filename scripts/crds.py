"""Write the CustomResourceDefinitions from the settings' models (``nodeagent.cluster.kinds``).

A structural schema knows less than a model: unions of models become one object, whose rules say
which fields belong to which kind. What only the model knows, the agent says in the status.
"""

import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import crds_doc
import settings_doc
import values_schema
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import kit.room
import kit.units
from nodeagent import rooms
from nodeagent.cluster import kinds

ROOT = Path(__file__).parent.parent
TARGETS = (ROOT / "deploy/chart/crds/crds.yaml", ROOT / "deploy/manifests/crds.yaml")
HEAD = "# Made from the settings' models by scripts/crds.py. Do not edit.\n"
# The API server estimates what a rule costs by the longest text and list.
LONGEST_TEXT = 1024
LONGEST_LIST = 500
_SHORTER = {"monitors": 64, "conditions": 8, "findings": 50, "reasons": 8}
_RESERVED = ("namespace", "package", "import", "const", "function", "for", "in", "if")
Schema = dict[str, Any]
# A number of bytes, or as people write it.
_SIZE: Schema = {
    "x-kubernetes-int-or-string": True,
    "minimum": 0,
    "pattern": values_schema.WRITTEN[kit.units.parse_size]["pattern"],
    "maxLength": 32,
}


def of_model(model: type[BaseModel], without: Sequence[str] = ()) -> Schema:
    """The schema of one model, as its fields are written."""
    plain = model.model_json_schema(by_alias=True, ref_template="{model}")
    definitions = plain.get("$defs", {})
    properties, required = {}, []
    for name, field in model.model_fields.items():
        if name in without:
            continue
        shown = str(field.alias or name)
        made = _of_field(field.annotation, plain["properties"][shown], definitions, shown)
        if any(getattr(each, "func", None) is kit.units.parse_size for each in field.metadata):
            made = _SIZE
        text = settings_doc.description(model, name).replace("\n", " ")
        default = field.default
        if isinstance(default, bool):
            text += f" Default: {str(default).lower()}."
        elif isinstance(default, int | str) and default and default is not PydanticUndefined:
            text += f" Default: {default}."
        properties[shown] = {"description": text, **made} if text else made
        if field.is_required():
            required.append(shown)
    found: Schema = {"type": "object", "properties": properties}
    return {**found, "required": required} if required else found


def _of_field(annotation: Any, plain: Schema, definitions: Schema, name: str) -> Schema:
    inner = settings_doc.models(annotation)
    if typing.get_origin(annotation) is tuple:
        items = of_model(inner[0]) if inner else _of_plain(plain["items"])
        found: Schema = {
            "type": "array",
            "items": items,
            "maxItems": _SHORTER.get(name, LONGEST_LIST),
        }
        if "minItems" in plain:
            found["minItems"] = plain["minItems"]
        return {**found, "x-kubernetes-list-type": "atomic"}
    if len(inner) == 1 and not _has_words(annotation):
        return of_model(inner[0])
    if len(inner) > 1:
        return _of_kinds(inner)
    if "anyOf" in plain:
        return _of_union(plain["anyOf"], definitions)
    if "additionalProperties" in plain:
        values = {"type": "string", "maxLength": LONGEST_TEXT}
        return {"type": "object", "additionalProperties": values, "maxProperties": 64}
    return _of_plain(plain)


def _has_words(annotation: Any) -> bool:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return any(_has_words(each) for each in typing.get_args(annotation))
    return isinstance(annotation, str)


def _of_plain(plain: Schema) -> Schema:
    found = {
        key: value
        for key, value in plain.items()
        if key in ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength")
    }
    if "const" in plain:
        found["enum"] = [plain["const"]]
    if "exclusiveMaximum" in plain:
        found |= {"maximum": plain["exclusiveMaximum"], "exclusiveMaximum": True}
    if plain.get("format") == "path":
        found["pattern"] = "^/"
    if found["type"] == "string" and "enum" not in found:
        found.setdefault("maxLength", LONGEST_TEXT)
    if found["type"] == "integer":
        found["format"] = "int64"
    return found


def _of_union(parts: list[Schema], definitions: Schema) -> Schema:
    """One type: an optional field, or words and the short form of a model with one duration."""
    found = [each for each in parts if each.get("type") != "null"]
    if len(found) == 1:
        return _of_plain(found[0])
    words = [word for each in found for word in each.get("enum", ())]
    (model,) = (definitions[each["$ref"]] for each in found if "$ref" in each)
    assert list(model["properties"]) == ["for"], model
    short = r"[0-9]+(\.[0-9]+)?(ms|s|m|h|d)"
    return {"type": "string", "pattern": f"^({'|'.join(words)}|{short})$", "maxLength": 32}


def _of_kinds(models: Sequence[type[BaseModel]]) -> Schema:
    """One object for several models that ``kind`` tells apart."""
    merged: Schema = {}
    owners: dict[str, list[str]] = {}
    needs: dict[str, list[str]] = {}
    texts: dict[str, dict[str, list[str]]] = {}
    words: dict[str, dict[str, list[str]]] = {}
    for model in models:
        schema = of_model(model)
        (kind,) = schema["properties"]["kind"]["enum"]
        needs[kind] = [each for each in schema["required"] if each != "kind"]
        for name, made in schema["properties"].items():
            owners.setdefault(name, []).append(kind)
            if "enum" in made and name != "kind":
                words.setdefault(name, {})[kind] = made["enum"]
            text = made.pop("description", "")
            texts.setdefault(name, {}).setdefault(text, []).append(kind)
            if name in merged and merged[name] != made:
                made = _wider(merged[name], made)
            merged[name] = made
    for name, made in merged.items():
        said = [f"({', '.join(which)}) {text}" for text, which in texts[name].items()]
        merged[name] = {"description": " ".join(said), **made}
    merged["kind"]["description"] = "Kind of source."
    rules = [
        {
            "rule": f"self.kind in {_words(which)} || !has(self.{_escaped(name)})",
            "message": f"{name} is only there with kind {' or '.join(which)}",
        }
        for name, which in owners.items()
        if len(which) < len(models)
    ]
    rules += [
        {
            "rule": f"self.kind != '{kind}' || has(self.{_escaped(name)})",
            "message": f"kind {kind} needs {name}",
        }
        for kind, names in needs.items()
        for name in names
    ]
    rules += [
        {
            "rule": f"self.kind != '{kind}' || !has(self.{name}) || self.{name} in {_words(each)}",
            "message": f"{name} of kind {kind} is one of {', '.join(each)}",
        }
        for name, by_kind in words.items()
        for kind, each in by_kind.items()
        if each != merged[name]["enum"]
    ]
    return {
        "type": "object", "properties": merged, "required": ["kind"],
        "x-kubernetes-validations": rules,
    }  # fmt: skip


def _escaped(name: str) -> str:
    """A field whose name is a word of CEL has another name there."""
    return f"__{name}__" if name in _RESERVED else name


def _words(values: Sequence[str]) -> str:
    return "[" + ", ".join(f"'{each}'" for each in values) + "]"


def _wider(one: Schema, other: Schema) -> Schema:
    """What either of both allows."""
    assert one["type"] == other["type"], (one, other)
    found = {key: value for key, value in one.items() if other.get(key) == value}
    if "enum" in one and "enum" in other:
        found["enum"] = list(dict.fromkeys([*one["enum"], *other["enum"]]))
    return found


def _spec(intent: kit.room.Intent) -> Schema:
    element = of_model(intent.model, intent.without)
    element["x-kubernetes-validations"] = [
        {"rule": each.expression, "message": each.message} for each in intent.rules
    ]
    if intent.secret:
        _by_reference(element, intent)
    if not element["x-kubernetes-validations"]:
        del element["x-kubernetes-validations"]
    spec = element
    if intent.many:
        spec = {
            "type": "object",
            "required": [intent.many],
            "properties": {
                intent.many: {
                    "description": element.get("description", intent.summary),
                    "type": "array",
                    "minItems": 1,
                    "maxItems": LONGEST_LIST,
                    "items": element,
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": [intent.key],
                }
            },
        }
    spec["properties"]["nodeSelector"] = {
        "description": "Only nodes with all these labels. Not set: every node with an agent.",
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {"type": "string", "maxLength": 63},
    }
    if intent.spread:
        spec["properties"]["spread"] = {
            "description": "How many of the selected nodes keep the dataset. Not set: all. "
            "status.chosen names these nodes.",
            "type": "integer",
            "format": "int64",
            "minimum": 1,
            "maximum": LONGEST_LIST,
        }
    spec["description"] = (
        f"What is wanted. Fields as in {rooms_name(intent)}.{intent.field}[] of the settings file "
        "(docs/settings.md)."
    )
    return spec


def rooms_name(intent: kit.room.Intent) -> str:
    return next(room.name for room in rooms.ROOMS if intent in room.intents)


def _by_reference(element: Schema, intent: kit.room.Intent) -> None:
    """``secretRef`` beside the field that names a file of the node."""
    outer, inner = intent.secret
    part = element["properties"][outer]
    element["properties"]["secretRef"] = {
        "description": f"Secret in the agent's namespace with the login of the {outer}. Set it "
        f"instead of {outer}.{inner}.",
        **of_model(kinds.SecretRef),
    }
    owned = next(
        r for r in part["x-kubernetes-validations"] if r["rule"].endswith(f"has(self.{inner})")
    )
    has = owned["rule"].partition(" || ")[0].replace("self.kind", f"self.{outer}.kind")
    part["x-kubernetes-validations"] = [
        each
        for each in part["x-kubernetes-validations"]
        if not each["message"].endswith(f"needs {inner}")
    ]
    element["x-kubernetes-validations"] += [
        {
            "rule": f"!({has}) || has(self.secretRef) != has(self.{outer}.{inner})",
            "message": f"this kind of {outer} needs secretRef or {outer}.{inner}, and not both",
        },
        {
            "rule": f"{has} || !has(self.secretRef)",
            "message": f"this kind of {outer} has no key: take secretRef away",
        },
    ]


def _columns(*rows: tuple[str, str, str, str]) -> list[Schema]:
    return [
        {"name": name, "type": kind, "jsonPath": path, "description": text}
        for name, kind, path, text in rows
    ]


def _definition(
    kind: str, plural: str, short: Sequence[str], text: str, properties: Schema,
    required: Sequence[str], columns: list[Schema], rules: Sequence[Schema] = (),
) -> Schema:  # fmt: skip
    schema: Schema = {"description": text, "type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    if rules:
        schema["x-kubernetes-validations"] = list(rules)
    age = ("Age", "date", ".metadata.creationTimestamp", "Since when it exists.")
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{kinds.GROUP}"},
        "spec": {
            "group": kinds.GROUP,
            "scope": "Cluster",
            "names": {
                "kind": kind, "listKind": f"{kind}List", "plural": plural,
                "singular": kind.lower(), "shortNames": list(short), "categories": ["nodeagent"],
            },
            "versions": [
                {
                    "name": kinds.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [*columns, *_columns(age)],
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }  # fmt: skip


def _of_intent(intent: kit.room.Intent) -> Schema:
    columns = _columns(
        ("Ready", "string", ".status.ready", "Ready and wanted nodes."),
        ("Percent", "integer", ".status.percent", "How much is on the nodes, on average."),
        ("Size", "string", ".status.size", "Size of all of it on a node."),
        (
            "Status",
            "string",
            '.status.conditions[?(@.type=="Ready")].reason',
            "Why it is not ready.",
        ),
    )
    status = of_model(kinds.IntentStatus)
    status["description"] = "How far the nodes are. Written by one agent for all."
    status["properties"]["conditions"] |= {
        "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
    }  # fmt: skip
    rules = []
    if not intent.many:
        rules.append(
            {
                "rule": "size(self.metadata.name) <= 63",
                "message": "the name has at most 63 characters: pods and paths carry it",
            }
        )
    return _definition(
        intent.kind, intent.plural, intent.short, intent.summary,
        {"spec": _spec(intent), "status": status}, ["spec"], columns, rules,
    )  # fmt: skip


def _of_node() -> Schema:
    status = of_model(kinds.NodeStatus)
    status["description"] = "What this node holds, as its own agent last said."
    columns = []
    for room in rooms.ROOMS:
        report = room.report
        if report is None:
            continue
        made = of_model(report.model)
        if report.many:
            made = {
                "type": "array", "items": made, "maxItems": LONGEST_LIST,
                "x-kubernetes-list-type": "atomic",
            }  # fmt: skip
        text = (report.model.__doc__ or "").strip()
        status["properties"][report.field] = {"description": text, **made}
        columns.append((report.field.title(), "string", f".status.summary.{report.field}", text))
    return _definition(
        kinds.NODE_STORAGE, kinds.NODE_STORAGES, ("nst",),
        "State and findings of one node. It has the node's name. Only the node's agent writes it.",
        {"status": status}, [],
        _columns(
            *columns,
            ("Critical", "integer", ".status.findingCounts.critical", "Critical findings."),
            ("Warnings", "integer", ".status.findingCounts.warning", "Warnings."),
            ("Version", "string", ".status.versions.agent", "Version of the agent."),
        ),
    )  # fmt: skip


def document() -> str:
    """All definitions, as YAML."""
    made = [_of_intent(intent) for _, intent in kinds.intents()] + [_of_node()]
    return HEAD + "---\n".join(
        yaml.safe_dump(each, sort_keys=False, width=100, allow_unicode=True) for each in made
    )


def write() -> None:
    for target in TARGETS:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(document())
    crds_doc.TARGET.write_text(crds_doc.document())


if __name__ == "__main__":
    write()
