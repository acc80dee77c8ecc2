"""Learn the forms of the lines of a log, so that further lines of a known form need one match of an expression.

A form is literal text with slots: numbers, times and durations. It is learned by experiments with the parser of the
log: the numbers of a line are replaced by others, one of a kind each, and the parser reads the changed line. The place
of each number in the result shows its meaning; a number that is merely equal to another one cannot be confused with it.
A slot accepts only texts (whole numbers, decimals, exponents, signs) that have not changed the meaning of the line in
such an experiment. All other lines, such as those with NaN or with another unit, are left to the parser.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from rankscope_ingest.importers.common.row_layout import Template
from rankscope_ingest.importers.common.values import plain

MAX_FORMS: Final = 64
"""Largest number of forms of one log that are learned: a log whose lines rarely repeat a form is read without them."""
REPETITIONS: Final = 128
"""Number of similar lines after which their form is learned, a power of two. It is learned again after twice as many.

Learning takes as long as some 500 lines take the parser."""

_MAX_BYTES: Final = 4096
_MAX_SLOTS: Final = 60
_MAX_SIMILAR: Final = 1000
_PROBES: Final = 8
_MOST_DIGITS: Final = 15
_MOMENT: Final = (
    r"(?<![\w.])\d{4}(?:(?P<mark>[-/])\d\d(?P=mark)|\d\d)\d\d[ T,]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
    r"(?:Z\b|[-+]\d\d:?\d\d)?(?![\d:])"
    r"|(?<=\b[IWEF])\d{4} \d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?![\d:])"
    r"|(?<![\w./-])\d{1,2}/\d{1,2}(?:/(?:\d{4}|\d\d))?,? \d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?![\d:])"
)
_CLOCK: Final = r"(?<![\w.:/-])\d{1,6}(?::\d\d){1,2}(?:[.,]\d{1,9})?(?![\w:])"
_GROUPED_NUMBER: Final = r"(?<![\w.,])[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?!\d|[.,_:]\d)"
_NUMBER: Final = rf"{_GROUPED_NUMBER}|(?<![\w.,])(?:(?<![-+])-)?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\d|[.,_:]\d)"
LINE_END: Final = r"(?:\r?\n|\Z)"
"""The end of the expression of a form: it matches a line with its end, or the whole text of a line."""
_COLOUR: Final = r"\x1b\[[0-9;?]*[A-Za-z]"
_SLOT: Final = re.compile(
    rf"(?P<colour>{_COLOUR})|(?P<moment>{_MOMENT})|(?P<clock>{_CLOCK})|(?P<number>{_NUMBER})|(?P<blanks> {{2,}})"
)
_SIMILAR: Final = re.compile(rb"[-+]?\d[\d.:eE+-]*| +")
_DIGITS: Final = re.compile(r"\d+")

_WHOLE, _DECIMAL, _EXPONENT, _NEGATIVE, _GROUPED = "whole", "decimal", "exponent", "negative", "grouped"
_PADDED: Final = "padded"  # with zeros, which JSON does not allow
_VARIANTS: Final = (_WHOLE, _DECIMAL, _EXPONENT, _NEGATIVE, _PADDED)
"""Kinds of numbers that are tried in a slot; separators of thousands are tried in no other slot than that of one."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of the parser for one line.

    `document` has the values of the line by key. `effects` are all other effects on the parser, such as the names of
    numbers that are not stored; they are equal for all lines of a form. `given` has the values in the document that the
    line does not contain, such as the epoch of a heading before it.
    """

    document: Mapping[str, Any]
    effects: Hashable = ()
    given: Mapping[str, Any] = field(default_factory=dict)


Parse = Callable[[str], Reading | None]
"""A function that returns the reading of a line, without a change of its parser; None for a line that is no record."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A number, a clock, a moment or several blanks in a line, with the texts that have the same meaning there."""

    kind: str
    sample: str
    variants: frozenset[str] = frozenset()  # of a number
    digits: int = 4  # largest number of digits of a whole number

    def expression(self) -> str:
        """Return the regular expression for the texts of the slot; blanks are not captured."""
        if self.kind == "blanks":
            return " {1,60}"
        if self.kind == "moment":
            return f"({fixed(self.sample)})"
        if self.kind == "clock":
            first, rest = self.sample.split(":", 1)
            return f"([0-9]{{1,{max(2, len(first))}}}:{fixed(rest)})"
        sign = f"{'-?' if _NEGATIVE in self.variants else ''}{'' if _PADDED in self.variants else '(?!0[0-9])'}"
        whole, fraction = f"[0-9]{{1,{self.digits}}}+", r"\.[0-9]{1,30}+"
        exponent = rf"[0-9]{{1,15}}(?:{fraction})?[eE][-+]?[0-9]{{1,3}}"
        decimal = rf"[0-9]{{1,15}}{fraction}"
        grouped = rf"[1-9][0-9]{{0,2}}(?:,[0-9]{{3}}){{1,4}}(?:{fraction})?"
        known = {_EXPONENT: exponent, _GROUPED: grouped, _DECIMAL: decimal, _WHOLE: whole}
        numbers = [known[variant] for variant in known if variant in self.variants]
        if (
            self.variants >= {_WHOLE, _DECIMAL, _EXPONENT}
            and _GROUPED not in self.variants
            and self.digits == _MOST_DIGITS
        ):
            numbers = [rf"[0-9]{{1,15}}+(?:{fraction})?+(?:[eE][-+]?[0-9]{{1,3}}+)?+"]
        return f"({sign}(?:{'|'.join(numbers)}))" if len(numbers) > 1 else f"({sign}{numbers[0]})"

    def text(self, number: int, variant: str) -> str:
        """Return a text for this slot that is unlike all texts for other numbers; `number` has four digits."""
        match self.kind, variant:
            case "blanks", _:
                return " " * (1 + number % 4)
            case (("moment" | "clock"), _):
                return _other_time(self.sample, number)
            case _, "whole":
                return f"{number}"
            case _, "decimal":
                return f"{number}.25"
            case _, "grouped":
                return f"{number:,}"
            case _, "exponent":
                return f"{number / 1000:.3f}e-05"
        if variant == _PADDED:
            return f"00{number}" if _WHOLE in self.variants else f"00{number}.25"
        return f"-{number}.5" if _DECIMAL in self.variants else f"-{number}"

    def others(self) -> list[str]:
        """Return other texts of the kind of this slot, of several lengths: two digits may be a part of a time."""
        texts = [self.text(number, _variant_of(self.sample)) for number in (4711, 4712, 4838)]
        if self.kind == "clock":
            rest = self.sample.partition(":")[2]
            texts += [f"7:{rest}", f"11:{rest}"]
        if self.kind == "number" and _variant_of(self.sample) == _WHOLE:
            texts += ["7", "11"]
        return texts


def fixed(text: str) -> str:
    """Return a regular expression for texts like `text` with other digits."""
    return _DIGITS.sub(lambda digits: rf"[0-9]{{{len(digits[0])}}}", re.escape(text))


def _other_time(sample: str, number: int) -> str:
    """Return a valid time in the format of `sample`."""
    two = f"{1 + number % 12:02d}"
    by_length = {1: two[1], 2: two, 4: f"{2000 + number % 60}", 8: f"20{number % 60:02d}{two}11"}
    if sample[4:5] == " ":  # month and day without a year, as glog prints them
        by_length[4] = f"{two}{two}"
    return _DIGITS.sub(lambda digits: by_length.get(len(digits[0]), (f"{number:04d}" * 3)[: len(digits[0])]), sample)


@dataclass(slots=True, eq=False)
class LineForm:
    """The form of lines that have the same meaning: an expression that matches them, with a group for each slot."""

    expression: re.Pattern[bytes]


F = TypeVar("F", bound=LineForm)


@dataclass(slots=True, eq=False)
class Form(LineForm):
    """The form of lines of one meaning: an expression that matches them, and the template of their documents."""

    document: Template
    dashed: frozenset[int]  # slots of dates with slashes, which the document has with dashes
    effects: Any

    def values(self, groups: Sequence[bytes], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document of a line with the texts `groups` in its slots."""
        texts = [group.decode() for group in groups]
        for slot in self.dashed:
            texts[slot] = texts[slot].replace("/", "-")
        return self.document.value(texts, given)  # type: ignore[no-any-return]


Match = tuple[Form, tuple[bytes, ...]]
"""The form of a line, and the texts in its slots."""


class Forms(Generic[F]):
    """The learned forms of one log. They are a cache: a log is read in the same way without them.

    Forms are kept for each `context`: all of the state of the parser on which the meaning of a line depends.
    """

    def __init__(self, max_forms: int = MAX_FORMS, repetitions: int = REPETITIONS) -> None:
        self._forms: dict[Hashable, list[F]] = {}
        self._similar: Counter[Hashable] = Counter()
        self._experiments = 0
        self._max_forms = max_forms
        self._repetitions = repetitions

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Forms.__init__(self)

    def match(self, line: bytes, context: Hashable = None) -> tuple[F, tuple[bytes, ...]] | None:
        """Return the form of `line` and the texts in its slots; None if the form is not known."""
        forms = self._forms.get(context)
        if forms is None:
            return None
        for place, form in enumerate(forms):
            if (found := form.expression.match(line)) is not None:
                if place:  # the next line probably has this form, too
                    forms.insert(0, forms.pop(place))
                return form, found.groups()
        return None

    def is_due(self, line: bytes, context: Hashable = None) -> bool:
        """Count `line`, and return whether its form should be learned: enough similar lines were seen."""
        similar = context, _SIMILAR.sub(b"0", line[: _MAX_BYTES + 1])
        if len(self._similar) >= _MAX_SIMILAR:
            self._similar.clear()
        count = self._similar[similar] = self._similar[similar] + 1
        is_due = not (count < self._repetitions or count & (count - 1) or self._experiments >= self._max_forms)
        self._experiments += is_due
        return is_due and len(line) <= _MAX_BYTES

    def add(self, form: F | None, context: Hashable = None) -> None:
        """Add the form of a line; nothing if it is None, because the line has no form."""
        if form is not None:
            self._forms.setdefault(context, []).insert(0, form)


def learned(line: bytes, parses: Sequence[Parse]) -> Form | None:
    """Return the form of `line`; None if it has none. Functions in `parses` read lines in different parser states."""
    return _Experiment(line.decode(errors="replace"), parses).form()


class _Experiment:
    """Experiments with the numbers of one line: a parser reads the line with other numbers."""

    def __init__(self, line: str, parses: Sequence[Parse]) -> None:
        self._pieces = list(_pieces(line))
        self._parses = parses
        self._random = random.Random(len(line))  # noqa: S311 - no secret

    def form(self) -> Form | None:
        """Return the form of the line; None if the meaning of its numbers cannot be found.

        A slot in which other numbers change the meaning of the line becomes a part of the literal text.
        """
        slots = [place for place, piece in enumerate(self._pieces) if isinstance(piece, _Slot)]
        if not 0 < len(slots) <= _MAX_SLOTS:
            return None
        for place in slots:
            if not self._is_free(place):
                self._pieces[place] = self._slot(place).sample
        form = self._narrow_form()
        if form is None:
            return None
        for place in slots:
            self._widen(place, form)
        form.expression = self._expression()
        return form if self._holds(form, _PROBES) else None

    def _slot(self, place: int) -> _Slot:
        piece = self._pieces[place]
        assert isinstance(piece, _Slot)
        return piece

    def _is_free(self, place: int) -> bool:
        """Return whether the keys of the document and the other effects do not depend on the slot at `place`."""
        slot, before = self._slot(place), self._parses[0](self._line({}))
        for text in slot.others():
            after = self._parses[0](self._line({place: text}))
            if before is None or after is None or _outline(before) != _outline(after):
                return False
        return True

    def _narrow_form(self) -> Form | None:
        """Return the form with slots for numbers like those of the line; None if their meaning cannot be found."""
        texts, line = self._filled(4001)
        reading = self._parses[0](line)
        if reading is None:
            return None
        templates = _Templates(texts, reading.given)
        form = Form(self._expression(), templates.of(reading.document), frozenset(templates.dashed), reading.effects)
        return form if self._holds(form, 2) else None

    def _widen(self, place: int, form: Form) -> None:
        """Add to a number the kinds and the digits of numbers that the parser reads in the same way."""
        slot = self._pieces[place]
        if not isinstance(slot, _Slot) or slot.kind != "number":
            return
        before = self._pieces[place - 1] if place else ""
        is_signed = isinstance(before, str) and before.endswith(("-", "+"))
        for variant in _VARIANTS:
            wider = replace(slot, variants=slot.variants | {variant})
            is_tried = variant != _PADDED or bool({_WHOLE, _DECIMAL} & slot.variants)
            if (
                is_tried
                and not (is_signed and variant == _NEGATIVE)
                and self._reads(form, {place: wider.text(4711, variant)})
            ):
                slot = wider
        for digits in (6, 9, _MOST_DIGITS):
            if _WHOLE in slot.variants and self._reads(form, {place: "9" * digits}):
                slot = replace(slot, digits=digits)
        self._pieces[place] = slot

    def _reads(self, form: Form, texts: Mapping[int, str]) -> bool:
        """Return whether the parser reads the line with other texts as `form` does."""
        line = self._line(texts)
        slots = ((place, piece) for place, piece in enumerate(self._pieces) if isinstance(piece, _Slot))
        groups = [texts.get(place, slot.sample).encode() for place, slot in slots if slot.kind != "blanks"]
        return all(_is_equal(form, groups, parse(line)) for parse in self._parses)

    def _expression(self) -> re.Pattern[bytes]:
        pieces = (re.escape(piece) if isinstance(piece, str) else piece.expression() for piece in self._pieces)
        return re.compile(("".join(pieces) + LINE_END).encode())

    def _holds(self, form: Form, probes: int) -> bool:
        """Return whether `form` gives the same documents as the parser for lines with other numbers."""
        for probe in range(probes):
            _, line = self._filled(self._random.randrange(1000, 8000), is_random=probe > 0)
            if not all(_agrees(form, line, parse(line)) for parse in self._parses):
                return False
        return True

    def _filled(self, first: int, *, is_random: bool = False) -> tuple[list[str], str]:
        """Return unlike texts of the slots, from the number `first` on, and the line with these texts."""
        texts, line, number = [], [], first
        for piece in self._pieces:
            if isinstance(piece, _Slot):
                variant = (
                    self._random.choice(sorted(piece.variants) or [""]) if is_random else _variant_of(piece.sample)
                )
                text = piece.text(number, variant)
                if is_random and variant == _WHOLE and self._random.random() < 0.5:
                    text = str(self._random.randrange(10 ** self._random.randrange(1, piece.digits + 1)))
                texts += [] if piece.kind == "blanks" else [text]
                number += 13
            else:
                text = piece
            line.append(text)
        return texts, "".join(line)

    def _line(self, texts: Mapping[int, str]) -> str:
        """Return the line, with other texts in the slots at the places in `texts`."""
        pieces = (piece if isinstance(piece, str) else piece.sample for piece in self._pieces)
        return "".join(texts.get(place, piece) for place, piece in enumerate(pieces))


def _agrees(form: Form, line: str, reading: Reading | None) -> bool:
    found = form.expression.match(line.encode())
    return found is not None and _is_equal(form, found.groups(), reading)


def _is_equal(form: Form, groups: Sequence[bytes], reading: Reading | None) -> bool:
    if reading is None or form.effects != reading.effects:
        return False
    return bool(_typed(form.values(groups, reading.given)) == _typed(reading.document))


def _typed(value: Any) -> Any:
    """Return a value that is equal only for equal values, numbers or texts, and for objects with the same order."""
    if isinstance(value, Mapping):
        return [(key, _typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    return isinstance(value, str), value


def _outline(reading: Reading) -> Any:
    return [*reading.document], reading.effects


def _pieces(line: str) -> Iterator[str | _Slot]:
    """Yield the literal texts and the slots of `line`, in order."""
    end = 0
    for found in _SLOT.finditer(line):
        if found.start() > end:
            yield line[end : found.start()]
        text, kind, variants = found[0], found.lastgroup or "", set()
        end = found.end()
        if kind == "colour":
            yield text
            continue
        if kind == "number":
            variants = {_variant_of(text)} | ({_NEGATIVE} if text[0] == "-" else set())
        yield _Slot(kind, text, frozenset(variants), max(4, len(text.lstrip("-"))))
    if end < len(line):
        yield line[end:]


def _variant_of(text: str) -> str:
    if "," in text:
        return _GROUPED
    return _EXPONENT if "e" in text.lower() else _DECIMAL if "." in text else _WHOLE


class _Templates:
    """Finds the templates of the values of a document by the texts of the slots, each of which is unlike all others."""

    def __init__(self, texts: Sequence[str], given: Mapping[str, Any]) -> None:
        self.dashed: set[int] = set()
        """The slots of dates that the line has with slashes and the document with dashes."""
        self._texts = texts
        self._given = given
        self._slots = {text.replace("/", "-"): slot for slot, text in enumerate(texts)}
        self._slots |= {text: slot for slot, text in enumerate(texts)}
        numbers = {slot: plain(text.replace(",", "")) for slot, text in enumerate(texts)}
        self._numbers = {value: slot for slot, value in numbers.items() if not isinstance(value, str)}
        self._any = re.compile("|".join(sorted(map(re.escape, self._slots), key=len, reverse=True)))

    def of(self, value: Any, key: str = "") -> Template:
        """Return the template of a value of the document; a value without a number of the line is constant."""
        if isinstance(value, Mapping):
            return Template("object", items=tuple((key, self.of(item, key)) for key, item in value.items()))
        if isinstance(value, list | tuple):
            return Template("list", items=tuple(("", self.of(item)) for item in value))
        if isinstance(value, str):
            parts = tuple(self._parts(value))
            return Template("text", parts) if any(isinstance(part, int) for part in parts) else _constant(value)
        if value is None or isinstance(value, bool):
            return _constant(value)
        if key in self._given and self._given[key] == value:
            return Template("given", constant=key)
        slot = self._numbers.get(value)
        if slot is None:
            return _constant(value)
        if "," in self._texts[slot]:
            return Template("grouped", (slot,))
        return Template("number" if type(plain(self._texts[slot])) is type(value) else "float", (slot,))

    def _parts(self, text: str) -> Iterator[int | str]:
        end = 0
        for found in self._any.finditer(text):
            if found.start() > end:
                yield text[end : found.start()]
            slot = self._slots[found[0]]
            if found[0] != self._texts[slot]:
                self.dashed.add(slot)
            yield slot
            end = found.end()
        if end < len(text):
            yield text[end:]


def _constant(value: Any) -> Template:
    return Template("constant", constant=value)
