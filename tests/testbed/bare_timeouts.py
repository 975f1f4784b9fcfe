"""Find timeouts that a slow machine does not stretch: numbers where ``waiting.limit`` belongs.

Such is a number as the argument ``timeout`` of any call, as the limit of ``asyncio.timeout`` and
``asyncio.wait_for``, as the only argument of a method ``wait``, ``join`` or ``result``, or as the
default of a parameter ``timeout``. So are the product's ``deadline`` and ``silence`` of SHORTEST or
more; a shorter one is meant to pass. Marks of pytest are stretched by tests/conftest.py. A number
of 0 does not wait.
"""

import ast
import re
from collections.abc import Iterable, Iterator

_ASYNC = {"timeout": 0, "wait_for": 1}  # of asyncio: which argument
_METHODS = {"wait", "join", "result"}
_OURS = {"deadline", "silence"}
SHORTEST = 5.0
# What none of this matches has no such number. To parse a file takes much longer.
_MAY_HAVE = re.compile(
    r"(timeout|deadline|silence)[\w: |]*=\s*[\d.]|(timeout|wait|join|result)\(\s*[\d.]|wait_for\("
)


def numbers(source: str) -> Iterator[ast.Constant]:
    """The nodes of such numbers, in no order."""
    if not _MAY_HAVE.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        found: Iterable[ast.expr] = ()
        if isinstance(node, ast.Call) and not _is_mark(node.func):
            found = _limits(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = _defaults(node.args)
        for each in found:
            if isinstance(each, ast.Constant) and _seconds(each):
                yield each


def _limits(call: ast.Call) -> Iterator[ast.expr]:
    for each in call.keywords:
        if each.arg == "timeout" or (each.arg in _OURS and _seconds(each.value) >= SHORTEST):
            yield each.value
    if not isinstance(call.func, ast.Attribute):
        return
    name, of = call.func.attr, call.func.value
    if name in _ASYNC and isinstance(of, ast.Name) and of.id == "asyncio":
        yield from call.args[_ASYNC[name] : _ASYNC[name] + 1]
    elif name in _METHODS and len(call.args) == 1:
        yield call.args[0]


def _defaults(of: ast.arguments) -> Iterator[ast.expr]:
    named = [*of.posonlyargs, *of.args]
    given = [
        *zip(named[len(named) - len(of.defaults) :], of.defaults, strict=True),
        *zip(of.kwonlyargs, of.kw_defaults, strict=True),
    ]
    for parameter, default in given:
        if parameter.arg == "timeout" and default is not None:
            yield default


def _seconds(node: ast.expr) -> float:
    value = node.value if isinstance(node, ast.Constant) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _is_mark(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function) == "pytest.mark.timeout"
