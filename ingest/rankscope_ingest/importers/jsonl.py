"""Import logs that have one object per line, as JSON or as the `repr` of a Python dictionary.

Examples: `{"step": 10, "loss": 2.07}`, `{'loss': 2.07, 'epoch': 0.1}`, `[INFO:swift] {'loss': 2.07}`. The module
`common.object_reader` converts an object to a record. If the first record of a log is a JSON line, printed dictionaries
in the same log are assumed to repeat the same steps. They are counted as unreadable, like lines without an object.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.importers.common.bars import Bars
from rankscope_ingest.importers.common.decisions import is_typical
from rankscope_ingest.importers.common.forms import Match, Reading, learned
from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported
from rankscope_ingest.importers.common.lines import prefix_fields, sample_lines, shown
from rankscope_ingest.importers.common.log_names import Role, role_of
from rankscope_ingest.importers.common.log_records import LineParser, read_log
from rankscope_ingest.importers.common.pairs import has_values, parse
from rankscope_ingest.importers.common.records import opened, place_of, text_in
from rankscope_ingest.importers.common.values import DECODER, number, standard_numbers
from rankscope_ingest.importers.textlog import Lines

MAX_CHARACTERS: Final = 65_536
MAX_LINE_BYTES: Final = 1 << 24

_SUFFIXES: Final = {".jsonl", ".ndjson", ".json"}

_NAMES: Final = {"nan": math.nan, "NaN": math.nan, "inf": math.inf, "Infinity": math.inf, "null": None}
_FUNCTION: Final = re.compile(r"<[^<>']*>")  # grad_fn=<NllLossBackward0> is not valid Python
_NUMERIC: Final = re.compile(r"[Tt]ensor|Parameter|[Aa]rray|b?float\d*|u?int\d*|bool_?|Decimal|longdouble|half")
"""A regular expression for types whose `repr` contains a number.

Examples: tensor(2.3, device='cuda:0'), np.float64(2.3), array([1, 2]).
"""

_BETWEEN_OBJECTS: Final = re.compile(rb"(?<=\})\s*(?=[^{}\"',\[\]\r]{0,80}\{[\"'])")
_OPEN: Final = re.compile(rb"\{'\w[^{}]*,$|^\{$")
"""A regular expression for the first line of an object that is printed over several lines."""
_PART: Final = re.compile(rb"\s*(?:['\"\[\]{}\d-]|null|true|false|NaN|Infinity)")
"""A regular expression for the beginning of a further line of such an object."""
_ABOVE_CHARACTERS: Final = 400
_PRINTED: Final = "{'"  # no JSON object begins with it


Line = tuple[bool, Mapping[str, Any] | None]
"""True if a line is JSON as a whole, and the object on it, which is None if the line contains no object."""


class JsonLines:
    """The importer of logs that have one object per line."""

    name = "jsonl"
    options = ("loss", "year")

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that each line of the file contains an object.

        The confidence increases with the share of lines that contain an object. The lines are sampled from the
        beginning, the middle and the end of the file.
        """
        if path.is_dir():
            return NOT_MINE
        lines = sampled_objects(path, head)
        objects = [document for _, document in lines if document is not None]
        reader = _Objects(Faults())
        records = sum(any(map(_is_record, reader.opened(0, document))) for document in objects if document)
        share = len(objects) / max(1, len(lines))
        if not objects or (not records and share < 0.5):  # programs and prose contain braces, too
            return NOT_MINE
        because = f"{len(objects)} of {len(lines)} sampled lines contain an object, {records} are training records"
        if not records:
            return Detection(0.3 * share, because)
        usual = 0.05 if path.suffix in _SUFFIXES else 0.0
        return Detection(0.4 + 0.5 * share + usual, because)

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield one record per line with an object, then the facts about the run.

        If the first record is a JSON line, only JSON lines are imported as records. In a log of JSON without
        steps, the number of a record is its step.
        """
        yield from read_log(path, faults, _Objects(faults), max_bytes=MAX_LINE_BYTES)


class _Objects(LineParser):
    """The objects on the lines of one log, in order."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.counts = {"blank_lines": 0, "non_object_lines": 0, "unparsable_lines": 0}
        self._is_json: bool | None = None  # is the first record a JSON line
        self._bars = Bars()
        self._text = Lines(faults)
        self._open = ""  # the lines of a printed dictionary that ends on a later line
        self._above = ""  # the line before, if it ends with a colon

    def match(self, line: bytes) -> Match | None:
        match = None if self._open or self._above else self.forms.match(line)
        if match is None:
            return None
        is_json, is_plain = match[0].effects
        is_plain = is_plain and is_json is self._is_json and (is_json or not self._bars.has_position)
        return match if is_plain else None

    def documents(self, number: int, line: bytes) -> Sequence[Mapping[str, Any]]:
        was_open = bool(self._open)
        if self._above and line.lstrip().startswith(_PRINTED.encode()):
            line = b" ".join((self._above.encode(), line.strip()))
        is_above = len(line) <= _ABOVE_CHARACTERS and line.rstrip().endswith(b":")
        self._above = line.decode(errors="replace") if is_above else ""
        line, is_open = joined(self._open.encode(), line)
        self._open = line.decode(errors="replace") if is_open else ""
        if is_open:
            return ()
        if was_open and not _is_record(parse_line(line)[1] or {}):  # a configuration, or another program's lines
            return ()
        if len(rows := rows_on(line)) > 1:
            return [document for row in rows for document in self.documents(number, row)]
        is_json, document = self._parsed(line)
        is_bar = not is_json and self._bars.see(line.decode(errors="replace"))
        if document is None or (self._is_json and not is_json):
            kind = "non_object_lines" if is_json else "unparsable_lines" if line.strip() else "blank_lines"
            self.counts[kind] += 1
            if line.strip() and not is_bar:
                reason = "a printed dictionary among JSON lines" if document is not None else "not a JSON object"
                self.faults.add(number, f"{'JSON, but not an object' if is_json else reason}: {shown(line)}")
            return ()
        found = self.opened(number, document)
        if self._is_json is None and any(map(_is_record, found)):
            self._is_json = is_json
        return found if is_json else [self._bars.with_step(each) for each in found]

    def opened(self, number: int, document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the records in an object: itself, or those on the line of text that it carries."""
        text, is_driver = text_in(document) or ("", False)
        if not (is_driver or has_values(text)):
            return (opened(document),)
        line = text.encode(errors="replace").rstrip()
        _, inner = parse_line(line) if b"{" in line else (False, None)
        found = self._text.documents(number, line) if inner is None else self.opened(number, inner)
        if not (found or is_driver):
            return (opened(document),)
        return [{**place_of(document), **each} for each in found]

    def _parsed(self, line: bytes) -> Line:
        if (match := self.forms.match(line)) is not None:
            is_json, _ = match[0].effects
            return is_json, match[0].values(match[1], {})
        is_json, document = parse_line(line)
        if document is not None and b"\r" not in line and self.forms.is_due(line):
            self.forms.add(learned(line, [_reading]))
        return is_json, document


def _reading(text: str) -> Reading | None:
    """Return the reading of a line; its effects: is it JSON, and is the document the record, unopened."""
    is_json, document = parse_line(text.encode())
    if document is None:
        return None
    return Reading(document, (is_json, text_in(document) is None and opened(document) is document))


def sampled_objects(path: Path, head: bytes | None = None) -> list[Line]:
    """Return the lines that are sampled from a file, without blank lines. `head` is the beginning of the file.

    A dictionary over several lines is one line.
    """
    lines, before = [], b""
    for line in sample_lines(path, head):
        whole, is_open = joined(before, line)
        lines += [] if is_open else [whole]
        before = whole if is_open else b""
    return [parse_line(row) for line in lines if line.strip() for row in rows_on(line)]


def joined(before: bytes, line: bytes) -> tuple[bytes, bool]:
    """Return `line` behind the beginning `before` of its object, and whether further lines belong to the object."""
    if not (_PART.match(line) if before else _OPEN.search(line)):
        return line, False
    whole = b" ".join((before, line.strip())) if before else line
    return whole, whole.count(b"{") > whole.count(b"}") and len(whole) <= MAX_CHARACTERS


def parse_line(line: bytes) -> Line:
    """Return whether `line` is JSON as a whole, and the object on it; None if the line contains no object."""
    text = line.strip()
    if not text:
        return False, None
    decoded = text.decode(errors="replace")
    if decoded.startswith(_PRINTED):
        return False, _object_in_text(decoded)
    try:
        document = DECODER.decode(decoded)
    except (json.JSONDecodeError, RecursionError):
        standard = standard_numbers(decoded) if decoded.startswith("{") else decoded
        return (False, _object_in_text(decoded)) if standard == decoded else parse_line(standard.encode())
    return True, document if isinstance(document, dict) else None


def rows_on(line: bytes) -> Sequence[bytes]:
    """Return the objects on `line` if it has several, of two writers or between carriage returns; else the line."""
    if b"\r" in line:
        rows = [row for row in line.split(b"\r") if row.lstrip().startswith(b"{")]
        if len(rows) > 1 and all(is_json and document for is_json, document in map(parse_line, rows)):
            return rows
    if line.count(b"{") > 1 and len(rows := _BETWEEN_OBJECTS.split(line)) > 1 and parse_line(line)[1] is None:
        return rows if all(parse_line(row)[1] for row in rows) else (line,)
    return (line,)


def _object_in_text(text: str) -> Mapping[str, Any] | None:
    """Return the dictionary that is printed in a log line that is not JSON as a whole; None if it contains none.

    If a progress bar has printed several states on the line,
    separated by carriage returns, the dictionary of the last state is returned.
    """
    begin, end = text.find("{", text.rfind("\r{") + 1), text.rfind("}") + 1
    if begin < 0 or end <= begin:
        return None
    inner = text[begin:end]
    document: Any = None
    stop = -1
    if not inner.startswith(_PRINTED):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            standard = standard_numbers(inner)
            document, stop = DECODER.raw_decode(standard)
            inner = standard
    if stop < 0:
        document, stop = printed_dict(inner), len(inner)
    # Text behind an object comes from another writer, which interrupted this one: their parts cannot be separated.
    if stop != len(inner) or not isinstance(document, dict):
        return None
    return {**_fields_before(text[:begin], document), **document}


def _fields_before(text: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rank and the time in the text before an object; if only the text has counters, all its numbers."""
    if text.endswith("=") or any(role_of(key) is Role.STEP for key in document):
        return prefix_fields(text)
    line = parse(text)
    return prefix_fields(text) | (line.document() if line.counters else {})


def _is_record(document: Mapping[str, Any]) -> bool:
    """Return whether `document` is a training record: whether it has a step, an event or a typical quantity."""
    return any(
        role_of(key) in {Role.STEP, Role.STEP_OF_PLAN, Role.EVENT}
        or (is_typical(key) and (number(value) is not None or isinstance(value, str)))
        for key, value in document.items()
    )


def printed_dict(text: str) -> dict[str, Any] | None:
    """Return the dictionary whose `repr` is `text`; None for any other text."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # syntax warnings are about the log, not about the user's program
            tree = ast.parse(_FUNCTION.sub("None", text.strip()), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


def _value(node: ast.expr) -> Any:
    """Return the value of a node of a syntax tree: None, text, a number, a list or a dictionary; ... for another one.

    Other values in a dictionary are left out if it contains a number.
    """
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            found = {str(ast.literal_eval(key)): _value(each) for key, each in zip(keys, values, strict=True) if key}
            known = {key: each for key, each in found.items() if each is not ...}
            if len(known) == len(found) or any(isinstance(each, int | float) for each in known.values()):
                return known
        case ast.List(elts=items) | ast.Tuple(elts=items):
            listed = [_value(item) for item in items]
            return ... if ... in listed else listed
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _NAMES.get(name, ...)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _value(operand)
            if isinstance(value, int | float):
                return -value if isinstance(sign, ast.USub) else value
        case ast.Call(func=ast.Name(id=kind) | ast.Attribute(attr=kind), args=[first, *_]) if _NUMERIC.fullmatch(kind):
            return _value(first)
    return ...


IMPORTER = JsonLines()
