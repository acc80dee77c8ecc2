"""Dictionaries as Python prints them: `{'loss': 2.06, 'grad_norm': nan, 'lr': tensor(1e-05)}`. Nothing is evaluated."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

MAX_CHARACTERS: Final = 65_536

_NAMES: Final = {"nan": math.nan, "NaN": math.nan, "inf": math.inf, "Infinity": math.inf, "null": None}
_FUNCTION: Final = re.compile(r"<[^<>']*>")  # grad_fn=<NllLossBackward0> is no Python


_NUMERIC: Final = re.compile(r"[Tt]ensor|Parameter|[Aa]rray|b?float\d*|u?int\d*|bool_?|Decimal|longdouble|half")
"""What numbers are printed in: tensor(2.3, device='cuda:0'), np.float64(2.3), array([1, 2])."""

_TEXT_CHARACTERS: Final = 200


class _NotPrintedError(ValueError):
    """Something else than a printed value."""


def printed_dict(text: str) -> dict[str, Any] | None:
    """Return the dictionary whose `repr` is `text`; None for everything else."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what looks odd as a program is not the user's program
            tree = ast.parse(_FUNCTION.sub("None", text.strip()), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Dict(keys=keys, values=values):
            return _items(keys, values)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(_value(operand))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _number(_value(operand))
        case ast.Call(func=ast.Name(id=kind) | ast.Attribute(attr=kind), args=[first, *_]) if _NUMERIC.fullmatch(kind):
            return _value(first)
    raise _NotPrintedError


def _items(keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> dict[str, Any]:
    """Return a dictionary; beside numbers, a value of any other type is its text."""
    items: dict[str, Any] = {}
    has_number = False
    unknown: dict[str, ast.expr] = {}
    for key, node in zip(keys, values, strict=True):
        name = _key(key)
        try:
            items[name] = _value(node)
        except _NotPrintedError:
            items[name] = None
            unknown[name] = node
        has_number = has_number or isinstance(items[name], int | float)
    if unknown and not has_number:
        raise _NotPrintedError
    return items | {name: ast.unparse(node)[:_TEXT_CHARACTERS] for name, node in unknown.items()}


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return str(node.value)
    raise _NotPrintedError


def _number(value: Any) -> int | float:
    if isinstance(value, int | float):
        return value
    raise _NotPrintedError
