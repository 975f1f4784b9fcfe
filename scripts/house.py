"""Count the house: how much there is to read, against bounds that may only fall.

'make lint' runs it. It fails when a count is above its bound, when a class is larger than a class
may be, and when an exception is larger than it was or is one no more.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("cache", "volumes", "preheat", "nodeagent", "linux", "kit", "ceph", "kube", "fleet")
GENERATED = ("_pb2", "_pb2_grpc")
PARAMETERS = 6  # so many make a function hard to call

# What each count may be at most. Who makes one smaller writes the new figure here.
BOUNDS = {
    "lines of the product": 69_064,
    "modules": 297,
    "modules at the top of cache": 9,
    "modules at the top of preheat": 8,
    "modules at the top of volumes": 8,
    "class names with several meanings": 34,
    "writes to a dataset from outside its module": 49,
    "modules that write to a dataset": 9,
    f"functions with {PARAMETERS} parameters or more": 39,
    "settings (leaves of docs/settings.md)": 138,
}

ATTRIBUTES, METHODS = 15, 20  # of a class, at most; values that never change are not counted
# Larger ones, as large as they are today. They wait for the issue "One dataset", which gives each
# a frozen state; the bindings have one method for each call of what they bind.
LARGER = {
    "cache/component.py:Cache": (37, 30),
    "cache/dataset/dataset.py:Dataset": (55, 51),
    "cache/dataset/due.py:Due": (13, 22),
    "cache/dataset/succession.py:Succession": (13, 36),
    "cache/fill/fill.py:FillPass": (20, 34),
    "cache/fill/verify.py:VerifyPass": (19, 20),
    "cache/fill/worker.py:Worker": (17, 26),
    "cache/space/budgets.py:Budgets": (18, 20),
    "cache/store/index.py:Index": (1, 57),
    "cache/work/jobs.py:Jobs": (13, 27),
    "kube/watching.py:Watch": (18, 16),
    "volumes/audit/service.py:Audit": (26, 30),
    "volumes/guard/kernel.py:Kernel": (8, 26),
    "volumes/ledger/witness.py:Witness": (16, 18),
}


@dataclass(frozen=True)
class Module:
    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))


def modules() -> list[Module]:
    """The product's Python files, without what is generated."""
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        if not path.stem.endswith(GENERATED):
            text = path.read_text(encoding="utf-8")
            found.append(Module(path, text, ast.parse(text)))
    return found


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def attributes(made: ast.ClassDef) -> set[str]:
    """What methods of a class assign to ``self``."""
    return {
        node.attr
        for node in ast.walk(made)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def methods(made: ast.ClassDef) -> int:
    return sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in made.body)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without ``self``, ``*args`` and ``**kwargs``."""
    given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return sum(each.arg not in ("self", "cls") for each in given)


def writes(module: Module, owned: set[str]) -> int:
    """Assignments to attributes in ``owned`` of what a module calls a dataset."""
    names = ("dataset", "self.dataset", "self._dataset", "each", "one")
    return sum(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in owned
        and ast.unparse(node.value) in names
        for node in ast.walk(module.tree)
    )


def leaves(page: str) -> int:
    """Settings in docs/settings.md that have no settings below them."""
    names = [line.split("`")[1] for line in page.splitlines() if line.startswith("* `")]
    above = {name.rpartition(".")[0].removesuffix("[]") for name in names}
    return sum(name.removesuffix("[]") not in above for name in names)


def counts(house: list[Module]) -> dict[str, int]:
    """By the names of ``BOUNDS``."""
    places = defaultdict(set)
    functions = 0
    for module in house:
        for made in classes(module.tree):
            places[made.name].add(module.name)
        functions += sum(
            parameters(node) >= PARAMETERS
            for node in ast.walk(module.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
    plain = [module for module in house if module.path.name != "__init__.py"]
    dataset = next(
        made
        for module in house
        if module.name.startswith("cache/") and module.path.name == "dataset.py"
        for made in classes(module.tree)
        if made.name == "Dataset"
    )
    written = [
        number
        for module in plain
        if module.name.startswith("cache/") and module.path.name != "dataset.py"
        if (number := writes(module, attributes(dataset)))
    ]
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    return {
        "lines of the product": sum(len(module.text.splitlines()) for module in house),
        "modules": len(plain),
        **{
            f"modules at the top of {room}": sum(m.path.parent == ROOT / room for m in plain)
            for room in ("cache", "preheat", "volumes")
        },
        "class names with several meanings": sum(len(each) > 1 for each in places.values()),
        "writes to a dataset from outside its module": sum(written),
        "modules that write to a dataset": len(written),
        f"functions with {PARAMETERS} parameters or more": functions,
        "settings (leaves of docs/settings.md)": leaves(page),
    }


def larger(house: list[Module]) -> dict[str, tuple[int, int]]:
    """Attributes and methods of the classes that are larger than a class may be."""
    found = {}
    for module in house:
        for made in classes(module.tree):
            size = len(attributes(made)), methods(made)
            if size[0] > ATTRIBUTES or size[1] > METHODS:
                found[f"{module.name}:{made.name}"] = size
    return found


def slips(found: dict[str, int], large: dict[str, tuple[int, int]]) -> list[str]:
    """What is above its bound, in words."""
    told = [
        f"{name}: {number}, at most {BOUNDS[name]}"
        for name, number in found.items()
        if number > BOUNDS[name]
    ]
    for name, (owned, parts) in large.items():
        most_owned, most_parts = LARGER.get(name, (ATTRIBUTES, METHODS))
        if owned > max(most_owned, ATTRIBUTES) or parts > max(most_parts, METHODS):
            told.append(
                f"{name} has {owned} attributes and {parts} methods, "
                f"at most {most_owned} and {most_parts}: make its state a frozen value"
            )
    told += [f"{name} is in LARGER and is not larger" for name in LARGER.keys() - large.keys()]
    return told


def main() -> int:
    house = modules()
    found, large = counts(house), larger(house)
    for name, number in found.items():
        print(f"{number:7,}  {name}" + (f" (bound {b:,})" if (b := BOUNDS[name]) != number else ""))
    print(f"{len(large):7,}  classes above {ATTRIBUTES} attributes or {METHODS} methods")
    told = slips(found, large)
    for line in told:
        print(f"house: {line}", file=sys.stderr)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
