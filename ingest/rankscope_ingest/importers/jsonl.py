"""Step records printed one object a line, as JSON or as Python prints a dictionary, alone or behind other text.

`{"step": 10, "loss": 2.07}`, `{'loss': 2.07, 'epoch': 0.1}`, `[INFO:swift] {'loss': 2.07}`. What becomes of an object
is told in `objects`. A log speaks one dialect: where JSON stands alone on its lines, a dictionary in between is
another program's print of the same step, and is counted as a line that could not be read, like all that is no object.
"""

from __future__ import annotations

import ast
import enum
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.importers.common.aliases import canonical
from rankscope_ingest.importers.common.blocks import BlockBuilder
from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported
from rankscope_ingest.importers.common.json_text import DECODER
from rankscope_ingest.importers.common.keys import Role, role_of
from rankscope_ingest.importers.common.lines import read_lines, sample_lines, shown, told_before
from rankscope_ingest.importers.common.objects import ObjectReader
from rankscope_ingest.importers.common.values import number

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


MAX_LINE_BYTES: Final = 1 << 24

_SUFFIXES: Final = {".jsonl", ".ndjson", ".json"}
_TELLING: Final = {"loss", "learning_rate", "grad_norm", "epoch", "eval_loss", "samples_per_second", "step_seconds"}
_MOST: Final = 0.5
_WHOLE_DOCUMENT: Final = b'"log_history"'


class Kind(enum.StrEnum):
    """What a line is."""

    JSON = "objects"
    FOUND = "objects behind other text"
    PRINTED = "printed dictionaries"
    OTHER_JSON = "non_object_lines"
    BLANK = "blank_lines"
    NONE = "unparsable_lines"


@dataclass(frozen=True, slots=True)
class Line:
    """A line and the object on it, if any."""

    kind: Kind
    document: Mapping[str, Any] | None = None


class JsonLines:
    """The importer."""

    name = "jsonl"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Look at lines from the beginning, the middle and the end: how many are objects, and of a training."""
        if path.is_dir():
            return NOT_MINE
        lines = [understood(line) for line in sample_lines(path, head) if line.strip()]
        objects = [line for line in lines if line.document is not None]
        telling = sum(_is_record(line.document) for line in objects if line.document)
        share = len(objects) / max(1, len(lines))
        if not objects or (not telling and share < _MOST):  # braces stand in programs and in prose, too
            return NOT_MINE
        because = (
            f"{len(objects)} of {len(lines)} lines looked at are {objects[0].kind}, {telling} of them of a training"
        )
        if _WHOLE_DOCUMENT in head[:4096] or not telling:
            return Detection(0.3 * share, because)
        usual = 0.05 if path.suffix in _SUFFIXES else 0.0
        return Detection(0.4 + 0.5 * share + usual, because)

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield a record per line that is an object in the dialect of the log, and at last what they say of the run."""
        builder, objects = BlockBuilder(), ObjectReader()
        counts = dict.fromkeys(("lines", *(str(kind) for kind in (Kind.BLANK, Kind.OTHER_JSON, Kind.NONE))), 0)
        dialect: Kind | None = None
        number_of_line = 0
        for number_of_line, text in read_lines(path, faults, max_bytes=MAX_LINE_BYTES):
            line = understood(text)
            if line.kind is Kind.BLANK:
                counts[Kind.BLANK] += 1
                continue
            if line.document is None or (dialect is Kind.JSON and line.kind is not Kind.JSON):
                counts[Kind.OTHER_JSON if line.kind is Kind.OTHER_JSON else Kind.NONE] += 1
                faults.add(number_of_line, f"{_complaint(line)}: {shown(text)}")
                continue
            if dialect is None and _is_record(line.document):
                dialect = line.kind
            objects.add(line.document, builder)
            if builder.is_full and (block := builder.take()):
                yield block
        if block := builder.take():
            yield block
        if objects.keys:
            yield objects.run({**counts, "lines": number_of_line})


def understood(line: bytes) -> Line:
    """Return what stands on `line`."""
    text = line.strip()
    if not text:
        return Line(Kind.BLANK)
    decoded = text.decode(errors="replace")
    try:
        document = DECODER.decode(decoded)
    except (json.JSONDecodeError, RecursionError):
        return _found(decoded)
    return Line(Kind.JSON, document) if isinstance(document, dict) else Line(Kind.OTHER_JSON)


def _found(text: str) -> Line:
    """Return the object behind other text; of what a progress bar wrote over, the last."""
    begin, end = text.find("{", text.rfind("\r{") + 1), text.rfind("}") + 1
    if begin < 0 or end <= begin:
        return Line(Kind.NONE)
    inner = text[begin:end]
    kind = Kind.FOUND
    try:
        document, stop = DECODER.raw_decode(inner)
    except (json.JSONDecodeError, RecursionError):
        document, stop, kind = printed_dict(inner), end - begin, Kind.PRINTED
    # Two objects on a line are torn lines of two writers: which belongs where cannot be told.
    if stop != len(inner) or not isinstance(document, dict):
        return Line(Kind.NONE)
    return Line(kind, {**told_before(text[:begin]), **document})


def _is_record(document: Mapping[str, Any]) -> bool:
    """Return whether `document` looks like something a training printed: a step, or a quantity everybody logs."""
    return any(
        role_of(key) in {Role.STEP, Role.STEP_OF_PLAN, Role.EVENT}
        or (canonical(key).name in _TELLING and (number(value) is not None or isinstance(value, str)))
        for key, value in document.items()
    )


def _complaint(line: Line) -> str:
    if line.kind is Kind.OTHER_JSON:
        return "JSON, but no object"
    return "a printed dictionary among JSON lines" if line.document is not None else "not a JSON object"


IMPORTER = JsonLines()
