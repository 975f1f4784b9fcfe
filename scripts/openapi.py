"""Write nodeagent/api/openapi.json, the document that the agent serves, and docs/api.md of it.

Each part of the agent has an openapi.yaml with its routes. ``must``: the fields of the body that a
caller has to send, ``may``: the others, ``query``: parameters; all of them as JSON Schema.
``gives`` is the answer, 200 unless a number stands before it: a JSON type, the name of a schema, a
list of one, an object with such fields, ``lines of`` a schema, or media types of text. ``also``:
another status with the same answer.

Schemas are made of what the routes return (``SHOWN``): a field's text is the comment beside it or
above it. ``schemas`` of an openapi.yaml has those of answers that are no dataclass.
"""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pages
import yaml

import cache.status
import kit.findings
import nodeagent.state
import preheat.status
import volumes.audit.status
import volumes.ledger.store
from nodeagent.shown import overview

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "nodeagent/api/openapi.json"
PARTS = ("nodeagent/api", "cache", "preheat", "volumes")
METHODS = {"get", "post", "put", "delete", "patch"}
SHOWN = {
    "Overview": overview.Overview,
    "Finding": kit.findings.Finding,
    "Event": nodeagent.state.Event,
    "Dataset": cache.status.ShownDataset,
    "Generation": cache.status.ShownGeneration,
    "Image": preheat.status.Status,
    "ImagePlan": preheat.status.ImagePlan,
    "LedgerEntry": volumes.ledger.store.Entry,
    "AuditFinding": volumes.audit.status.AuditFinding,
    "AuditDevice": volumes.audit.status.AuditDevice,
}
HEAD: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {
        "title": "nodeagent admin API",
        "version": "1",
        "description": "One agent on one node, over its unix socket, or over TLS with a bearer "
        "token. Every error has the same body, the schema Error. Names in paths have at most 255 "
        "printable characters and no slash.",
    },
    "security": [{"bearer": []}],
}
LOGIN = {
    "type": "http",
    "scheme": "bearer",
    "description": "Over TLS (admin.api). The unix socket knows its callers by their uid.",
}
# What each route may answer beside its own.
ERRORS = {
    "400": "not understood: a name, the query or the body",
    "401": "no role: no token, or one that nobody knows",
    "403": "the caller's role does not allow it, or the request comes from a web page",
    "408": "the request did not arrive in time",
    "421": "the Host header names another host",
    "429": "too many changing calls or streams of this caller; Retry-After says when to come back",
    "500": "this node cannot do it (the body says why), or a fault of the agent (its log says why)",
    "503": "this part of the agent does not run now, or the cluster cannot be asked who calls",
    "504": "it takes too long; a change continues, and its end is logged",
}
OF_CHANGES = {"413": "the body is larger than 256 KiB"}
OF_ROOMS = {
    "404": "no such thing, or the settings leave this part of the agent out",
    "409": "refused in the present state; the body says why",
    "502": "what the answer comes from (a source, the runtime, a cluster) does not answer",
}
NAME = {"type": "string", "minLength": 1, "maxLength": 255}
Schema = dict[str, Any]


# --- schemas


def dataclasses_in(model: type) -> list[type]:
    """``model`` and every dataclass that it is made of."""
    found: dict[type, None] = {}
    waiting: list[Any] = [model]
    while waiting:
        each = waiting.pop()
        if isinstance(each, type) and dataclasses.is_dataclass(each) and each not in found:
            found[each] = None
            waiting += inspect.get_annotations(each, eval_str=True).values()
        waiting += getattr(each, "__args__", ())
    return list(found)


def models() -> dict[str, Schema]:
    """The schema of each answer that is a dataclass, and of those inside it."""
    names = {model.__name__: name for name, model in SHOWN.items()}
    parts = {each.__name__: each for model in SHOWN.values() for each in dataclasses_in(model)}
    _, made = msgspec.json.schema_components(list(SHOWN.values()), ref_template="{name}")

    def named(name: str) -> str:
        return names.get(name, name.removeprefix("Shown"))

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" not in value:
            return {key: plain(each) for key, each in value.items()}
        if "enum" in (there := made[value["$ref"]]):
            return {"type": "string", "enum": sorted(there["enum"])}
        return {"$ref": f"#/components/schemas/{named(value['$ref'])}"}

    found = {}
    for name, model in parts.items():
        schema = plain(made[name])
        del schema["title"]
        if "description" in schema:
            schema["description"] = schema["description"].replace("``", "`")
        for field, text in pages.comments(model).items():
            shown = schema["properties"][field]
            shown.pop("default", None)
            if text:
                shown["description"] = text.replace("``", "`")
        schema["required"] = list(schema["properties"])  # all of them are always there
        found[named(name)] = schema
    return found


# --- routes


def answer(given: Any) -> Schema:
    """The schema of what ``gives`` says."""
    if isinstance(given, list):
        return {"type": "array", "items": answer(given[0])}
    if isinstance(given, dict):
        fields = {name: answer(each) for name, each in given.items()}
        return {"type": "object", "required": list(fields), "properties": fields}
    kinds = given.split(" or ")
    if kinds[0][:1].isupper():
        return {"$ref": f"#/components/schemas/{given}"}
    return {"type": kinds if len(kinds) > 1 else given}


def content(given: Any) -> dict[str, Schema]:
    text = {"schema": {"type": "string"}}
    if isinstance(given, str) and given.startswith("lines of "):
        return {"application/x-ndjson": text}
    if isinstance(given, str) and "/" in given:
        return dict.fromkeys(given.split(" or "), text)
    return {"application/json": {"schema": answer(given)}}


def error(status: str, text: str) -> Schema:
    """aiohttp itself answers what is not HTTP, or has too long a first line."""
    body: dict[str, Any] = {"application/json": {"schema": answer("Error")}}
    if status == "400":
        body["text/plain"] = {"schema": {"type": "string"}}
    return {"description": text, "content": body}


def parameter(name: str, place: str, given: Schema) -> Schema:
    schema = dict(given)
    found = {"name": name, "in": place, "required": schema.pop("required", False)}
    if text := schema.pop("description", ""):
        found["description"] = text
    return {**found, "schema": schema}


def operation(route: str, given: Schema, of_room: bool) -> Schema:
    method, path = route.split()
    made: Schema = {"summary": given["summary"]}
    names = {name: {**NAME, "required": True} for name in re.findall(r"{(\w+)}", path)}
    asked = [parameter(name, "path", each) for name, each in names.items()]
    asked += [parameter(name, "query", each) for name, each in given.get("query", {}).items()]
    if asked:
        made["parameters"] = asked
    must, may = given.get("must", {}), given.get("may", {})
    if must or may:
        body = {"type": "object", "additionalProperties": False, "properties": {**must, **may}}
        body |= {"required": list(must)} if must else {}
        made["requestBody"] = {
            "required": bool(must),
            "content": {"application/json": {"schema": body}},
        }
    gives, status = given["gives"], "200"
    if isinstance(gives, str) and gives[0].isdigit():
        status, _, gives = gives.partition(" ")
    about = gives if isinstance(gives, str) else ", ".join(gives)
    well = {"description": about, "content": content(gives)}
    errors = ERRORS | (OF_CHANGES if method != "GET" else {}) | (OF_ROOMS if of_room else {})
    answers = {each: {"$ref": f"#/components/responses/{each}"} for each in errors}
    answers[status] = well
    if also := given.get("also"):
        answers[also] = well
    made["responses"] = dict(sorted(answers.items()))
    return made


def document() -> Schema:
    """The whole document. ValueError for what two parts name."""
    paths: Schema = {}
    schemas = models()
    for part in PARTS:
        routes = yaml.safe_load((ROOT / part / "openapi.yaml").read_text(encoding="utf-8"))
        own = routes.pop("schemas", {})
        if twice := schemas.keys() & own.keys():
            raise ValueError(f"{part}/openapi.yaml has schemas that are there already: {twice}")
        schemas |= own
        for route, given in routes.items():
            method, path = route.split()
            item = paths.setdefault(path, {})
            if method.lower() in item:
                raise ValueError(f"{part}/openapi.yaml has a route that is there already: {route}")
            item[method.lower()] = operation(route, given, part != PARTS[0])
    errors = ERRORS | OF_CHANGES | OF_ROOMS
    parts = {
        "securitySchemes": {"bearer": LOGIN},
        "responses": {status: error(status, errors[status]) for status in sorted(errors)},
        "schemas": dict(sorted(schemas.items())),
    }
    return {**HEAD, "paths": paths, "components": parts}


def text() -> str:
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    import api_doc  # it is made of this file

    api_doc.TARGET.write_text(api_doc.document())
