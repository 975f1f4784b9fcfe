"""Write the schema of ``settings`` into the chart's values.schema.json, from the settings' models.

So helm refuses what the agent would refuse, with the key's name. Of the models stays what a schema
can say of one value; what depends on several, the agent's check before an install says. Sections
may be given in part, because the chart and pools add to them; elements of lists are whole.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

import kit.units
import preheat.settings
from nodeagent.settings import Settings

TARGET = Path(__file__).parent.parent / "deploy" / "chart" / "values.schema.json"
# What the chart takes; the rest of the file's top is the chart's own.
SECTIONS = ("cache", "volumes", "preheat", "admin", "kubelet", "kubernetes")
TEXT = (
    "Made of the settings' models by scripts/values_schema.py. Do not edit. What depends on "
    "several values, the agent checks ('nodeagent config check FILE')."
)
_NUMBER = r"^\s*[0-9]+(\.[0-9]+)?\s*"
_DURATION = rf"{_NUMBER}(ms|s|m|h|d)?\s*$"
# How a value is written that the agent turns into a number.
WRITTEN: Mapping[Callable[..., Any], Mapping[str, Any]] = {
    kit.units.parse_size: {
        "type": ["string", "number"], "minimum": 0,
        "pattern": rf"{_NUMBER}([KMGTP]iB?|[kMGTP]B?|KB|B)?\s*$",
    },
    kit.units.parse_duration: {"type": ["string", "number"], "minimum": 0, "pattern": _DURATION},
    kit.units.parse_share: {
        "type": ["string", "number"], "minimum": 0, "pattern": rf"{_NUMBER}%?\s*$",
    },
}  # fmt: skip
(_SHORT_PIN,) = (each.func for each in preheat.settings.Pin.__metadata__)
# YAML reads these words as booleans where they have no quotes.
_BOOLEANS = {"on": True, "off": False}


class _Written(GenerateJsonSchema):
    """The schema of what people write, not of what becomes of it."""

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        function = schema["function"]["function"]
        if function is _SHORT_PIN:
            inner = self.generate_inner(schema["schema"])
            return {"anyOf": [{"type": ["string", "number"], "pattern": _DURATION}, inner]}
        written = WRITTEN.get(function)
        return dict(written) if written else super().function_before_schema(schema)


def _plain(node: Any, definitions: Mapping[str, Any], *, whole: bool = False) -> Any:
    """Without references, titles and defaults. ``whole``: what is required stays."""
    if "$ref" in node:
        node = {**definitions[node["$ref"].rpartition("/")[2]], **node}
    if "discriminator" in node:
        return _by_kind(node, definitions)
    parts = node.get("anyOf")
    if parts:
        others = [
            _plain(each, definitions, whole=whole) for each in parts if each.get("type") != "null"
        ]
        if len(others) > 1:
            return {"anyOf": others}
        (found,) = others
        if len(parts) > 1:
            found = _or_null(found)
        return found
    found = {
        key: value
        for key, value in node.items()
        if key
        in (
            "type", "enum", "const", "pattern", "minimum", "maximum", "exclusiveMinimum",
            "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems",
        )
    }  # fmt: skip
    if "properties" in node:
        found["additionalProperties"] = node.get("additionalProperties", False)
        found["properties"] = {
            name: _plain(each, definitions, whole=whole)
            for name, each in node["properties"].items()
        }
        if whole and node.get("required"):
            found["required"] = node["required"]
    elif isinstance(node.get("additionalProperties"), dict):
        found["additionalProperties"] = _plain(
            node["additionalProperties"], definitions, whole=True
        )
    if "items" in node:
        found["items"] = _plain(node["items"], definitions, whole=True)
    return _with_booleans(found)


def _or_null(found: dict[str, Any]) -> dict[str, Any]:
    if "enum" in found:
        found = {**found, "enum": [*found["enum"], None]}
    kinds = found.get("type")
    if kinds is None:
        return {"anyOf": [found, {"type": "null"}]}
    return {**found, "type": [*(kinds if isinstance(kinds, list) else [kinds]), "null"]}


def _with_booleans(found: dict[str, Any]) -> dict[str, Any]:
    more = [_BOOLEANS[word] for word in found.get("enum", ()) if word in _BOOLEANS]
    if not more:
        return found
    return {"enum": [*found["enum"], *more]}


def _by_kind(node: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions, not alternatives: an error then names the key of the kind that was meant."""
    kinds = node["discriminator"]["mapping"]
    return {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(kinds)}},
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": _plain({"$ref": ref}, definitions, whole=True),
            }
            for kind, ref in kinds.items()
        ],
    }


def settings() -> dict[str, Any]:
    made = Settings.model_json_schema(schema_generator=_Written)
    definitions = made["$defs"]
    return {
        "description": TEXT,
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _plain(made["properties"][name], definitions) for name in SECTIONS},
    }


def document() -> str:
    """The whole file, with this schema in the place of the earlier one."""
    text = TARGET.read_text()
    mark = '    "settings": '
    begin = text.index(mark, text.index('"definitions"')) + len(mark)
    _, length = json.JSONDecoder().raw_decode(text[begin:])
    shown = json.dumps(settings(), indent=2).replace("\n", "\n    ")
    return text[:begin] + shown + text[begin + length :]


if __name__ == "__main__":
    TARGET.write_text(document())
