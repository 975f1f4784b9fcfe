"""Constants of the product that a test wants shorter, or longer.

A settings model holds them as class variables, which no file can set. Tests give them among the
settings, by the same names. ``divide`` takes them out of what becomes a file: the agent under test
gets them by its environment, and ``hook/sitecustomize.py`` sets them there (``ENVIRONMENT``,
``install``). ``made`` makes a model of this process in which they count for that object alone.
"""

import importlib.abc
import importlib.util
import json
import os
import sys

TYPE_CHECKING = False  # as in typing, whose import costs a child's start
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from kit.settings import Section

ENVIRONMENT = "NODEAGENT_TEST_CONSTANTS"  # JSON: {"module": {"Class.name": value}}


def divide(
    model: "type[Section]", given: "Mapping[str, Any]"
) -> "tuple[dict[str, Any], list[Any]]":
    """``given`` without constants, and the constants: (path of fields, class, name, value)."""
    import typing

    import pydantic

    rest: dict[str, Any] = {}
    constants: list[Any] = []
    for name, value in given.items():
        if name in model.__class_vars__:
            owner = next(each for each in model.__mro__ if name in vars(each))
            (wanted,) = typing.get_args(typing.get_type_hints(owner, include_extras=True)[name])
            constant = pydantic.TypeAdapter(wanted).validate_python(value)
            constants.append(((), owner, name, constant))
        elif isinstance(value, dict) and name in model.model_fields:
            rest[name] = value
            for inner in _models(model.model_fields[name].annotation):
                rest[name], below = divide(inner, value)
                constants += [((name, *path), *more) for path, *more in below]
        else:
            rest[name] = value
    return rest, constants


def _models(annotation: object) -> "Iterator[type[Section]]":
    """The one model that a field is, perhaps beside None; none for mappings and lists of models."""
    import types
    import typing

    from kit.settings import Section

    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if union else [annotation]
    yield from [each for each in parts if isinstance(each, type) and issubclass(each, Section)][:1]


def made(model: "type[Section]", **given: object) -> "Any":
    """A ``model`` with these fields and constants, also of the models in it. ValidationError.

    For pydantic two of them that differ in a constant alone are equal.
    """
    parts = {
        name: made(inner, **value)
        for name, value in given.items()
        if isinstance(value, dict) and name in model.model_fields
        for inner in _models(model.model_fields[name].annotation)
    }
    rest, constants = divide(model, {**given, **parts})
    section = model.model_validate(rest)
    vars(section).update({name: value for _, _, name, value in constants})
    return section


def environment(constants: "Sequence[Any]", more: "Mapping[str, dict[str, Any]]") -> dict[str, str]:
    """For an agent: those of settings, and others by module and name."""
    wanted: dict[str, dict[str, Any]] = {**more}
    for _, owner, name, value in constants:
        wanted.setdefault(owner.__module__, {})[f"{owner.__name__}.{name}"] = value
    return {ENVIRONMENT: json.dumps(wanted)} if wanted else {}


class _Finder(importlib.abc.MetaPathFinder):
    """Sets the constants of a module when it is imported."""

    def __init__(self, wanted: "dict[str, dict[str, Any]]") -> None:
        self._wanted = wanted

    def find_spec(self, name: str, *_: object) -> "ModuleSpec | None":
        wanted = self._wanted.pop(name, None)
        if wanted is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            run(module)
            for path, value in wanted.items():
                holder, _, last = path.rpartition(".")
                owner = getattr(module, holder) if holder else module
                setattr(owner, last, type(getattr(owner, last))(value))

        # Of this loader alone: the module is run as always, and then given its constants.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """In a process of an agent under test."""
    wanted = os.environ.get(ENVIRONMENT)
    if wanted:
        sys.meta_path.insert(0, _Finder(json.loads(wanted)))
