"""Write docs/settings.md from the models: every setting with unit, default and reason."""

import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from nodeagent.settings import Settings

TARGET = Path(__file__).parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

One YAML file. `nodeagent --config FILE run`; without `--config`, `$NODEAGENT_CONFIG`, then
`/etc/nodeagent/nodeagent.yaml`. Unknown keys are refused. Sizes are written `500GiB`, times `30s`,
shares `10%`. `nodeagent config check FILE` prints the effective settings, or what is wrong and in
which line. The file is read again when it changes (a ConfigMap's swap included): what can change
while running does, what cannot is named in the log, at `/readyz` and on the status page.

This page is made from the models by `scripts/settings_doc.py`; a test keeps it current.
"""


def models(annotation: Any) -> list[type[BaseModel]]:
    """The settings models inside an annotation (unions, tuples, Annotated)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        return [m for part in typing.get_args(annotation) for m in models(part)]
    return []


def rows(model: type[BaseModel], prefix: str) -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        inner = models(field.annotation)
        many = typing.get_origin(field.annotation) is tuple
        path = f"{prefix}{name}{'[]' if many and inner else ''}"
        if field.default is PydanticUndefined and field.default_factory is None:
            default = "needed"
        elif inner or field.default is None or field.default == ():
            default = ""
        else:
            shown = model.model_construct().model_dump(mode="json", warnings=False).get(name)
            default = f"`{shown}`"
        meaning = (field.description or "").replace("<", "&lt;")
        found.append(f"| `{path}` | {default} | {meaning} |")
        for each in inner:
            kind = each.model_fields.get("kind")
            label = f"{path}({typing.get_args(kind.annotation)[0]})" if kind else path
            found += rows(each, f"{label}.")
    return found


def document() -> str:
    table = "\n".join(rows(Settings, ""))
    return f"{HEAD}\n| setting | default | meaning |\n| --- | --- | --- |\n{table}\n"


if __name__ == "__main__":
    TARGET.write_text(document())
    sys.exit(0)
