"""The places of step, rank, time and numbers in the rows of a log that have the same keys, and their stored series.

Rows of a known layout are stored without another look at their keys. The values of a row are texts in the slots of a
line, or values of an object that a program has logged.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope_ingest.importers.common.log_names import EPOCH, Alias, Named, Role, role_of
from rankscope_ingest.importers.common.values import micros, plain, quantity, seconds

Series = tuple[str, str | None, str | None]
"""The stored name, the unit and the labels (JSON) of a scalar."""


@dataclass(frozen=True, slots=True)
class Template:
    """The rule by which a value of a document is made of the texts in the slots of a line.

    `parts` has literal texts and the numbers of slots. `items` are the templates of the values of a list or an object.
    """

    kind: str  # number, grouped, float, text, constant, given, list or object
    parts: tuple[int | str, ...] = ()
    items: tuple[tuple[str, Template], ...] = ()
    constant: Any = None

    def value(self, texts: Sequence[str], given: Mapping[str, Any]) -> Any:
        """Return the value for the texts of the slots of a line."""
        match self.kind:
            case "number":
                return plain(texts[self.slot])
            case "grouped":
                return plain(texts[self.slot].replace(",", ""))
            case "float":
                return float(texts[self.slot])
            case "text":
                return "".join(part if isinstance(part, str) else texts[part] for part in self.parts)
            case "given":
                return given[self.constant]
            case "list":
                return [item.value(texts, given) for _, item in self.items]
            case "object":
                return {key: item.value(texts, given) for key, item in self.items}
        return self.constant

    @property
    def slot(self) -> int:
        """The number of the only slot of a number."""
        return self.parts[0]  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The values of some rows of one layout, one per row in each column."""

    steps: Sequence[int | None]
    planned: Sequence[int | None]
    ranks: Sequence[int | None]
    times: Sequence[int | None]  # UTC µs
    epochs: Sequence[float | None]
    firsts: Sequence[float | None]  # the first number of each row as the log has it
    numbers: array[float]  # in the stored units: all values of the first series, of the second one, and so on

    def __len__(self) -> int:
        return len(self.steps)


_LARGEST: Final = 1 << 53
_LARGEST_RANK: Final = 1 << 31
_FEW: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The places of step, rank, time and numbers among the values of a row. A place is None if rows have no such value.

    All values of a row are at one of these places.
    """

    step: int | None
    planned: int | None  # of the planned number of steps of the run
    epoch: int | str | None  # a text is the name of a constant or given value
    rank: int | str | None
    time: int | None
    numbers: tuple[int | str, ...]
    durations: frozenset[int]  # the places of durations such as `0:10:00`
    grouped: frozenset[int]  # the places of numbers with separators of thousands
    constants: Mapping[str, float]
    aliases: tuple[Alias, ...]
    series: tuple[Series, ...]
    has_first: bool  # the first number is not a text

    def rows(self, columns: Sequence[Sequence[Any]], given: Mapping[str, Any]) -> Rows:
        """Return the rows with the values in `columns`; `given` has further values, which are equal in all rows.

        Raises ValueError or OverflowError if a value is of another kind than that of the layout.
        """
        count = len(columns[0])
        absent = [None] * count

        def column(place: int | str) -> Sequence[Any]:
            if isinstance(place, str):
                return [given.get(place, self.constants.get(place))] * count
            return [text.replace(b",", b"") for text in columns[place]] if place in self.grouped else columns[place]

        steps, planned, ranks = (
            absent if place is None else whole_numbers(column(place), largest)
            for place, largest in ((self.step, _LARGEST), (self.planned, _LARGEST), (self.rank, _LARGEST_RANK))
        )

        logged = [
            array("d", map(seconds_of, column(place))) if place in self.durations else numbers_of(column(place))
            for place in self.numbers
        ]
        numbers = array("d")
        for values, alias in zip(logged, self.aliases, strict=True):
            numbers.extend(_converted(values, alias))
        return Rows(
            steps=steps,
            planned=planned,
            ranks=ranks,
            times=absent if self.time is None else times_of(columns[self.time]),
            epochs=absent if self.epoch is None else list(map(float, column(self.epoch))),
            firsts=logged[0] if self.has_first else absent,
            numbers=numbers,
        )


def numbers_of(column: Sequence[Any]) -> array[float]:
    """Return a column as floats. Raises ValueError or OverflowError if one of the values is no number."""
    if len(column) >= _FEW and isinstance(column[0], bytes):
        with contextlib.suppress(pa.ArrowInvalid):  # a number in a form that only Python reads
            return array("d", pa.array(column, pa.binary()).view(pa.string()).cast(pa.float64()).to_numpy().tobytes())
    return array("d", map(float, column))


def whole_numbers(column: Sequence[Any], largest: int = _LARGEST) -> list[int]:
    """Return a column as integers. Raises ValueError if one is not between -`largest` and `largest`, or no rank."""
    found = [*map(int, column)]
    if not -largest < min(found) <= max(found) < largest or (largest == _LARGEST_RANK and min(found) < 0):
        raise ValueError("a number is too large")
    return found


def seconds_of(text: str | bytes) -> float:
    """Return a duration in seconds. Raises ValueError for any other text."""
    found = seconds(text if isinstance(text, str) else text.decode())
    if found is None:
        raise ValueError(f"no duration: {text!r}")
    return found


def times_of(column: Sequence[str | bytes]) -> list[int]:
    """Return times as UTC µs. Raises ValueError if one of the texts is no time."""
    if len(column) >= _FEW and isinstance(first := column[0], bytes):
        texts = pa.array(column, pa.binary()).view(pa.string())
        if b"/" in first:
            texts = pc.replace_substring(texts, "/", "-")
        if b"," in first:
            texts = pc.replace_substring(texts, ",", ".")
        try:
            return texts.cast(pa.timestamp("us")).cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
        except pa.ArrowInvalid:
            pass  # with a time zone, or no time
    found = [micros(text if isinstance(text, str) else text.decode().replace("/", "-")) for text in column]
    if None in found:
        raise ValueError("no time")
    return found  # type: ignore[return-value]


def _converted(values: array[float], alias: Alias) -> array[float]:
    if alias.factor == 1.0:
        return values
    return array("d", alias.converted(np.frombuffer(values)).tobytes())  # type: ignore[attr-defined,arg-type]


MAX_LAYOUTS: Final = 256


class Layouts:
    """A cache of the layouts of rows, by form of line, or by keys and types of objects.

    It is emptied when stored names change, and is no part of the state of a reader.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, RowLayout] = {}
        self._version = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Layouts.__init__(self)

    def get(self, kind: Hashable) -> RowLayout | None:
        """Return the layout of rows of this kind, or None if it is not known."""
        return self._known.get(kind)

    def learn(self, kind: Hashable, layout: RowLayout | None) -> None:
        """Add the layout of rows of this kind; None if they have none."""
        if layout is not None and len(self._known) < MAX_LAYOUTS:
            self._known[kind] = layout

    def names_changed(self, version: int) -> None:
        """Forget the layouts if `version`, that of the stored names, is another one than in the call before."""
        if version != self._version:
            self._known.clear()
            self._version = version


def of_document(values: Mapping[str, Any]) -> Template:
    """Return the template of an object whose values are the values of its row."""
    kinds = {int: "number", float: "number", str: "text"}
    items = ((key, kinds.get(type(value), "constant"), place) for place, (key, value) in enumerate(values.items()))
    return Template("object", items=tuple((key, Template(kind, (place,))) for key, kind, place in items))


def layout_of(
    document: Mapping[str, Any],
    template: Template,
    step_key: str | None,
    named: Sequence[tuple[str, Named, float | list[float | None]]],
    *,
    has_plan: bool,
) -> RowLayout | None:
    """Return the layout of rows like `document`; None unless all values are step, rank, time and numbers in `named`.

    `named` has the key, the stored name and the value of each number; a number may be stored under two names.
    `has_plan` states whether the total of the step is the planned number of steps of the run.
    """
    places = dict(template.items)
    roles = {key: role_of(key) for key in document}
    ranks = [key for key in document if roles[key] is Role.RANK]
    times = [key for key in document if roles[key] is Role.TIME]
    ignored = [key for key in document if roles[key] is Role.SOURCE]
    used = {*ranks, *times, *ignored, *(key for key, _, _ in named), *([] if step_key is None else [step_key])}
    if not named or used != document.keys() or len(ranks) > 1 or len(times) > 1:
        return None
    step, planned = (None, None) if step_key is None else _step_and_total(places[step_key])
    if step_key is not None and step is None:
        return None
    rank = time = None
    constants = {key: float(item.constant) for key, item in template.items if _is_number(item.constant)}
    if ranks and (rank := _place(ranks[0], places[ranks[0]])) is None:
        return None
    if times and (time := _single(places[times[0]], "text")) is None:
        return None
    numbers: list[int | str] = []
    durations = set()
    for key, _, value in named:
        at = None if isinstance(value, list) or roles[key] in {Role.RANK, Role.TIME} else _place(key, places[key])
        if at is None:
            return None
        if isinstance(document[key], str):
            kind = _kind_of_text(document[key], places[key], value)
            if kind is None:
                return None
            durations |= {at} if kind == "duration" else set()
        numbers.append(at)
    return RowLayout(
        step=step,
        planned=planned if has_plan else None,
        epoch=_place(EPOCH, places[EPOCH]) if EPOCH in places else None,
        rank=rank,
        time=time,
        numbers=tuple(numbers),
        durations=frozenset(durations),  # type: ignore[arg-type]
        grouped=frozenset(item.slot for item in places.values() if item.kind == "grouped"),
        constants=constants,
        aliases=tuple(alias for _, (alias, _), _ in named),
        series=tuple((alias.name, alias.unit, labels) for _, (alias, labels), _ in named),
        has_first=not isinstance(document[named[0][0]], str),
    )


def _step_and_total(template: Template) -> tuple[int | None, int | None]:
    """Return the slots of the step and of the planned number of steps; None for an absent one."""
    match template:
        case Template("number" | "grouped", (int(step),)):
            return step, None
        case Template("text", (int(step), "/", int(total))):
            return step, total
    return None, None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _single(template: Template, kind: str) -> int | None:
    """Return the only slot of a template of this kind, or None."""
    match template:
        case Template(found, (int(slot),)) if found == kind:
            return slot
    return None


def _place(key: str, template: Template) -> int | str | None:
    match template:
        case Template("number" | "grouped" | "float" | "text", (int(slot),)) | Template("text", (int(slot), str())):
            return slot
        case Template("given"):
            return key
    return key if _is_number(template.constant) else None


def _kind_of_text(text: str, template: Template, value: Any) -> str | None:
    """Return whether `value` is the duration or the number at the begin of `text`; None if it is neither.

    0 may also be a number in a unit that is converted, such as `0K`.
    """
    if len(template.parts) == 1 and ":" in text:
        return "duration" if seconds(text) == value else None
    behind = template.parts[1] if len(template.parts) > 1 else ""
    before = plain(text.removesuffix(str(behind)))
    return "number" if before == value != 0 and quantity(text) is not None else None
