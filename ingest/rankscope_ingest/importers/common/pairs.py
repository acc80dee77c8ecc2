"""Split a line of a text log into its prefix, its counters, and its pairs of a name and a value.

A line is split by its own separators. A name is followed by a colon, an equals sign, the word `is`, or a space. If a
space follows the name, it must be the name of a known quantity, or only such pairs may be between two separators.
Numbers of a line that belong to no pair are returned by the words before them, so that they can be counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers.common.decisions import AVERAGE
from rankscope_ingest.importers.common.lines import prefix_fields
from rankscope_ingest.importers.common.log_names import (
    BATCH,
    COUNTER_NAME,
    EPOCH,
    UNITS,
    Role,
    canonical,
    is_known,
    role_of,
)
from rankscope_ingest.importers.common.values import MULTIPLES, NUMBER, plain, quantity, whole

_COUNT: Final = r"(?:\d{1,3}(?:,\d{3})+|\d{1,15})"


def _of(group: str) -> str:
    return rf"\s*(?:/|of)\s*(?P<{group}>{_COUNT})"


_COUNTER: Final = re.compile(
    rf"(?<![\w.%-])(?<![A-Za-z_)]/)(?P<name>\As(?=:)|epochs?|(?:ep|up)\.(?=\s?\d)|it(?= \d+/\d)|{COUNTER_NAME})"
    rf"(?:\((?P<split>[a-z]{{1,10}})\))?"
    rf"\s*(?:(?:[:=#：]|\.\.\.)\s*)?[\[(]?\s*(?P<count>{_COUNT})(?:\.0+)?(?:{_of('total')})?(?:\s*[\])])?(?![\w%]|\.\d|:\d\d|,\d\d\d)"
    rf"(?:[:,\s]*(?:[━╸╺─]+\s+)?\[?\s*(?P<batch>{_COUNT}){_of('batches')}(?:\s*\([^()]{{1,8}}%\))?\s*\]?)?"
    rf"|\[\s*(?P<bare>{_COUNT}){_of('bares')}\s*\](?:\[\s*(?P<inner>{_COUNT}){_of('inners')}\s*\])?"
    r"|(?<!(?-i:TRAIN) )(?<!(?-i:CV) )\bbatch\s*[:=]?\s*"
    rf"(?:(?P<after>{_COUNT})(?=[,\]|]|\s\|)|\[?(?P<part>{_COUNT}){_of('parts')}\]?(?!\w))",
    re.IGNORECASE,
)
"""A regular expression for a counter such as `step 5/100`, `Epoch: [1] [ 50/400]` or `[50/400]`.

A number before `%` is no counter.
"""

_BARE_STEP: Final = re.compile(
    rf"\s*(?:\[(?P<step>{_COUNT})\]\s+|\((?:(?P<epoch>{_COUNT}), ?)?(?P<step_>{_COUNT})(?:{_of('planned')})?\)\s+)"
    r"(?=[A-Za-z][\w/.-]*(?: [\w/.-]+)?\s?[:=])"
    rf"|\s*(?P<first>{_COUNT}) \|\s+(?=[A-Za-z][\w/.-]*[ :=])"
)
"""A regular expression for counters before pairs: `[100] loss=2.5`, `(3, 100) loss=2.5`, `(9/90) loss=2.5`, `9 | …`."""
_HOW_MANY: Final = re.compile(
    r"\b(?:(?:number|count|no\.) of(?: \w{1,20}){0,2}|fps|per|every|best|next|last|previous) $", re.IGNORECASE
)
"""A regular expression for words before the name of a counter that make it the name of a quantity."""
_ABBREVIATIONS: Final = {"ep.": EPOCH, "epochs": EPOCH, "up.": "updates"}
_HOW_MANY_CHARACTERS: Final = 60

_LEVEL: Final = r"(?-i:\b(?:INFO|WARN(?:ING)?|ERROR|DEBUG|CRITICAL)\b)"  # `error: 0.3` is a pair
_CLOCK: Final = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_PREFIX: Final = re.compile(
    rf"\[[^\[\]]{{0,80}}(?:{_LEVEL}|{_CLOCK})[^\[\]]{{0,80}}\]:?|{_LEVEL}(?::[a-z_][\w.]{{0,80}}:)?"
    r"|\[(?:info|warn(?:ing)?|error|debug|critical|train)\]:?"
    rf"|(?:\d{{1,4}}[-/])?\d{{1,2}}[-/]\d{{1,4}}[ T,]{_CLOCK}(?:Z|[-+]\d\d:?\d\d)?"
    rf"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [a-z]{{3}} {{1,2}}\d{{1,2}} {_CLOCK} \d{{4}}(?: -)?"
    rf"|^[IWEF](?:\d{{4}})?\d{{4}} {_CLOCK}\s+\d+|^{_CLOCK}"
    r"|(?<![\w./$-])[\w./$-]{1,80}(?:\$|\.(?:py|cc|cpp|scala|java|rs|go|jl))"
    r"(?::\d+(?::\w{1,40})?(?:\]|\)|\s-|\s|:)| \d+\))"
    r"|(?<=\s-\s)[a-z_]\w{0,40}(?:\.\w{1,40}){1,8}\s-\s"
    r"|(?<!\S)[\w.]{1,80}:[\w<>]{1,80}:\d{1,6} -\s"
    r"|\[[\w@.-]{1,80},(?:mpirank:)?\d{1,9}(?:,[^\[\]]{1,80})?\]<std(?:out|err)>:"
    r"|\(\w{1,40} pid=\d+[^()]{0,40}\)|\[[\w.-]{0,40}(?:\d|:\d{1,6})\]:|\[(?:rank |proc |xla:)\d+\]|^\s*\d+:\s",
    re.IGNORECASE,
)
"""A regular expression for a part of the prefix of a line: time, level, rank, process, or file and line."""
_PREFIX_CHARACTERS: Final = 300
_ASIDE: Final = re.compile(
    rf"\d{{4}}[-/]\d{{1,2}}[-/]\d{{1,2}}[ T]{_CLOCK}|[\w./$-]{{1,80}}\.(?:py|cc|cpp|scala|java|rs|go|jl):\d+\b"
)
"""A regular expression for a time, or for file and line, which may also follow pairs."""

_WORD: Final = r"(?:(?:val|valid|eval|avg|tr)\.|[A-Za-z]\.[A-Za-z]\.|[A-Za-z](?:[\w/%@+-]|\.(?=\w)){0,60})"
_UNITS: Final = "|".join(sorted(map(re.escape, UNITS.keys() - {"b"}), key=len, reverse=True))
_DURATION: Final = (
    r"(?:\d{1,6} ?(?:d|days?),? )?\d+:\d\d(?::\d\d)?(?:\.\d{1,6})?"
    r"|\d{1,6} ?[dhm](?:in)?(?: ?\d{1,2} ?[hm](?:in)?){0,2} ?\d{1,2}(?:\.\d{1,6})? ?(?:h|m(?:in)?|s(?:ec)?)\b"
    r"|\d{1,6}\.\d{1,6}(?-i:m)(?![\w/])"
)
"""A regular expression for a duration: `0:10:00`, `2 days, 0:10:00`, `1d 00:10:00`, `49m 19s`, `1h2m3s` or `12.00m`."""
_COUNTED: Final = (
    r"(?<=nan|inf) (?:iter\w*|steps?|updates?|batch(?:es)?|samples?|grads|gradients|losses|values?|elements?|counts?)"
    r"(?: \w{1,20}){0,2}\s?[:=]"
)
"""A regular expression behind `nan` or `inf` in the name of a number of such values: `nan iterations: 0`."""
_PAIR: Final = re.compile(
    rf"(?<![\w./])(?P<name>{_WORD}(?:\(\w{{1,40}}\))?(?: (?:{_WORD}|\([\w/%]{{1,24}}\))){{0,4}}?)"
    r"(?P<mark>\s*[:=：]\s*|\s+is\s+|\s+)"
    rf"(?:(?P<list>\[[-+.,eE\d \[\]]{{1,400}}\]|\((?:{NUMBER},\s?)+(?:{NUMBER})?\))|(?P<clock>{_DURATION})"
    rf"|(?P<value>{NUMBER})(?!{_COUNTED})(?:(?P<unit>(?-i:[kKMGTB]))(?![\w/])|\s?(?P<unit_>{_UNITS})(?![\w/]|\s*[=:]))?"
    r"|(?P<absent>n/a|none|null|--?(?=[\s,;|]|$)))"
    r"(?:\s{0,2}\((?P<paren>[^()]{1,40})\))?(?=$|[\s,;|~)\]}>'\"]|\.(?:\s|$))",
    re.IGNORECASE,
)
_NO_NAME: Final = r"(?:after|and|at|by|for|from|in|is|of|on|over|per|than|to|took|until|was|with)\b"
_NAMED: Final = rf"\s*(?!{_NO_NAME}){_WORD}\s+"
_BEHIND: Final = rf"(?:\s?(?:{_UNITS}))?(?![\w.:/%])"
_RUN: Final = re.compile(
    rf"(?i)(?:^|(?<=[|,;:(\[{{]))(?:{_NAMED}{NUMBER}{_BEHIND})*(?:{_NAMED}{NUMBER}{_BEHIND}(?=\s*(?:$|[|,;)\]}}]))"
    rf"|{_NAMED}[-+]?\d*\.\d+(?:e[-+]?\d+)?{_BEHIND}(?=\s))"
)
"""A regular expression for names and values behind a separator that only spaces separate from each other.

A separator follows them, or the last value has a decimal point: `saved 3 files` is prose.
"""
_PREPOSITION: Final = re.compile(_NO_NAME, re.IGNORECASE)
_PLACED: Final = re.compile(
    rf"(?P<name>{_WORD}(?: {_WORD}){{0,3}}) (?:at|for|after) "
    rf"(?P<counter>(?:epoch|{COUNTER_NAME}):? {_COUNT}(?:/{_COUNT})?)"
    rf"\s*(?:\bis\b|[:=])\s*(?={NUMBER}(?:[\s,;|%]|\.?$))",
    re.IGNORECASE,
)
"""A regular expression for a counter between a name and its value: `Score at iteration 10 is 2.5`."""
_NESTED: Final = re.compile(rf"(?P<name>{_WORD})\s?[:=]\s?\{{(?P<items>['\"][^{{}}]{{1,400}})\}}")
"""A regular expression for a dictionary as a value: `grad_norm={{'0_default': 1.5}}` is `grad_norm/0_default: 1.5`."""
_ITEM: Final = re.compile(r"['\"]([\w/.-]{1,60})['\"]\s*:")
_RANGE: Final = re.compile(r"\b(batch(?:es)?|steps?|iterations?)\s?\[\d+\s?-\s?(\d+)\]", re.IGNORECASE)
"""A regular expression for a range of batches, of which the last one is the counter: `Batch [0-20]`."""
_VALUE: Final = re.compile(r"\d|nan|inf", re.IGNORECASE)  # a line without any of these has no pair
_PREPOSITIONS: Final = re.compile(r" (?:at|for|after) ")
_VALUE_FIRST: Final = re.compile(
    rf"(?:^|\|)\s*(?P<value>{NUMBER})\s*(?P<unit>{_UNITS})\s*(?P<name>(?:\w+ )?MFU)?\s*(?=\||$)", re.IGNORECASE
)
_NAME_OF_UNIT: Final = {"seconds": "step_time", "tokens/s": "tokens/s", "samples/s": "samples/s", "steps/s": "it/s"}
_OPENS: Final = re.compile(r"(?:^|[|,;:\[\]({\t]|\s-|\s\s|\.)\s*$")
_CLOSES: Final = re.compile(r"\s*(?:$|[|,;\[\])}\t]|[-:]\s|\.(?:\s|$))|\s\s")
_SEPARATORS: Final = "|,;- \t"
_REST: Final = re.compile(r"(?i)(?<![\w.])[-+]?(?:\d[\w.,]*(?:(?<=e)[-+]\d+)?|\.\d\w*|(?:nan|inf(?:inity)?)\b)")
_NAME_BEFORE: Final = re.compile(r"[A-Za-z][\w/@+-]{0,60}(?= ?[\s:=(\[]*$)")
_BEFORE_CHARACTERS: Final = 80
_GROUP: Final = re.compile(r"([A-Za-z]\w{0,60})\[[^\[\]]*$")
_GROUP_CHARACTERS: Final = 200
_BLANKS: Final = re.compile(r"[\s-]+")
_POINT: Final = re.compile(r"\d\.\d")
_THOUSANDS: Final = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_LETTERS: Final = re.compile(r"[^\W\d_]{2,}")
_SHORT_NAMES: Final = {"train": "train_loss", "val": "val_loss"}  # "train=3.2, val=3.3"
_SPLIT: Final = r"(eval|valid|val|cv)(?:(?:(?<=eval)u|(?<=valid))at(?:e|ion|ing))?(?: (?:metrics|results?|set))?"
_TRAINING: Final = re.compile(r"^\W*train(?:ing)?(?: (?:metrics|results?|set))?\s?:\s", re.IGNORECASE)
_EVALUATION: Final = re.compile(
    rf"(?:^|[\[|(\s]){_SPLIT}(?:[\])|:\s]|$)|\bsaving dict(?= for)",
    re.IGNORECASE,  # of TensorFlow's estimators
)
_EVALUATED: Final = re.compile(rf"[\[|(,\s-](?:{_SPLIT}|(test))\s?[\])|:]", re.IGNORECASE)
"""A regular expression for the name of an evaluation between the counters and the first pair of a line."""
_TEST: Final = re.compile(r"(?::?[\s|-]+)?(test)\s?:", re.IGNORECASE)  # `[test]` may be the name of a logger
_PER_GPU: Final = re.compile(rf"({NUMBER})\s?/\s?(?:gpu|device|npu)", re.IGNORECASE)
_AVERAGE: Final = re.compile(rf"{NUMBER}%?", re.IGNORECASE)
_WRAPPED: Final = re.compile(
    r"\b(?:(?:np|numpy|jnp|torch)\.\w{1,16}|D?Tensor|tensor|array|Parameter|Decimal)\("
    rf"(?:local_tensor=)?(?:tensor\()?\s*((?i:{NUMBER}))(?=[,)])"
)
"""A regular expression for the beginning of a number as the `repr` of a type prints it.

Examples: np.float64(2.5), tensor(2.5, device='cuda:0'), DTensor(local_tensor=2.5, device_mesh=…).
"""


@dataclass(slots=True)
class Line:
    """The content of a line: its prefix, its counters and pairs by name, and the names of its other numbers."""

    prefix: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    pairs: dict[str, Any] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    has_words: bool = False
    """True if the line contains words that are neither prefix nor names of pairs."""

    has_unknown_names: bool = False
    """True if only a space is between a value and its name, which is not the name of a known quantity."""

    has_point: bool = False
    """True if a number on the line has a decimal point."""

    length: int = 0
    """Number of characters behind the prefix."""

    def ungroup(self) -> None:
        """Read commas in the numbers of the line as separators of thousands, as in `tps: 7,000`."""
        for name, value in self.pairs.items():
            if isinstance(value, str) and "," in value and _THOUSANDS.fullmatch(value):
                self.pairs[name] = plain(value.replace(",", ""))

    def document(self) -> dict[str, Any]:
        """Return the fields of the line as one object."""
        return {**self.prefix, **self.counters, **self.pairs}


_MARKED: Final = re.compile(r"[A-Za-z)\]][\"']?\s?[:= ]\s*\S*\d")


def has_values(text: str) -> bool:
    """Return whether a text may contain pairs of a name and a number."""
    return _MARKED.search(text) is not None


def _in_pairs(text: str) -> str:
    """Return `text` with pairs and numbers instead of other forms of them, such as a nested object or a tensor."""
    text = unwrapped(text) if "(" in text else text
    text = _PLACED.sub(r"\g<counter> | \g<name>: ", text) if _PREPOSITIONS.search(text) else text
    text = _NESTED.sub(_items, text) if "{" in text else text
    return _RANGE.sub(r"\1: \2, ", text) if "[" in text and "-" in text else text


def parse(text: str, *, is_counted: bool = False) -> Line:
    """Return the content of a line of a text log. With `is_counted`, the line has counters that `text` has not."""
    line = Line()
    text = _in_pairs(text)
    first: list[int] = []

    def counter(found: re.Match[str]) -> str:
        if found["name"] and _HOW_MANY.search(text, max(0, found.start() - _HOW_MANY_CHARACTERS), found.start()):
            return found[0]
        first.append(found.start())
        _add_counter(found, line)
        return "|"

    body = _COUNTER.sub(counter, text)
    start = min(first, default=len(text))
    begin = _prefix_end(text, min(start, _PREFIX_CHARACTERS))
    if not first and (bare := _BARE_STEP.match(text, begin)):
        step = (bare["step"] or bare["step_"] or bare["first"]).replace(",", "")
        line.counters["step"] = f"{step}/{bare['planned']}" if bare["planned"] else int(step)
        line.counters |= {EPOCH: float(bare["epoch"])} if bare["epoch"] else {}
        start, begin = begin, bare.end()
    line.length = len(text) - begin
    ends = [begin]

    def add(found: re.Match[str]) -> str:
        ends.append(found.start())
        _add_pair(found, line)
        return "|"

    def pair(found: re.Match[str]) -> str:
        if not _is_pair(found):
            return found[0]
        line.has_unknown_names |= found["mark"].isspace() and not is_known(found["name"])
        return add(found)

    left = body[begin:]
    if begin < start < len(text):
        left = _ASIDE.sub(lambda found: "|" + " " * (len(found[0]) - 1), left[: start - begin]) + left[start - begin :]
    whole = left
    if _VALUE.search(left):
        left = _PAIR.sub(pair, left)
    before = text[: min(start, begin + ends[1] if len(ends) > 1 else len(text))]
    line.prefix |= prefix_fields(before)
    evaluation = _EVALUATION.search(before) or _TEST.match(before, begin)
    if not evaluation and len(ends) > 1:
        evaluation = _EVALUATED.search(whole, max(0, start - begin), ends[1])
    if evaluation:
        line.prefix["split"] = evaluation[evaluation.lastindex].lower() if evaluation.lastindex else "eval"
        left = left.replace(evaluation[0], "|", 1)
    left = _TRAINING.sub("|", left)
    line.has_point = _POINT.search(body, begin) is not None
    if left.strip(_SEPARATORS):
        if line.pairs and (line.counters or is_counted):
            left = _RUN.sub(lambda run: _PAIR.sub(add, run[0]), left)
        left = _VALUE_FIRST.sub(lambda found: _add_value(found, line), left)
        line.rest += [_name_before(left, found.start()) for found in _REST.finditer(left)]
        line.has_words = _LETTERS.search(left) is not None
    return line


_DIGIT: Final = re.compile(r"\d")
_FEWEST_CHARACTERS: Final = 3
_MOST_RECORDS: Final = 64


def records_on(text: str) -> list[str]:
    """Return the records on a line that several processes have printed without a line end between them.

    Each begins with the same text before its first digit, and has pairs and the same counters.
    """
    digit = _DIGIT.search(text)
    begin = text[: digit.start()].lstrip() if digit else ""
    if len(begin) < _FEWEST_CHARACTERS or begin not in text[len(begin) + 1 :]:
        return [text]
    places = [found.start() for found in re.finditer(rf"(?<![A-Za-z_/.-]){re.escape(begin)}(?=\d)", text)]
    parts = [text[place:end] for place, end in zip(places, [*places[1:], len(text)], strict=True)]
    found = [parse(part) for part in parts[:_MOST_RECORDS]]
    is_glued = all(line.pairs and line.counters.keys() == found[0].counters.keys() != set() for line in found)
    return parts if len(parts) > 1 and is_glued else [text]


def _items(found: re.Match[str]) -> str:
    return _ITEM.sub(lambda item: f"{found['name']}/{item[1]}:", found["items"])


def _prefix_end(text: str, end: int) -> int:
    """Return the end of the prefix of a line, which has no pair; the prefix is searched in the first `end` characters.

    A level, a time or a file that follows a pair is no part of the prefix.
    """
    begin = 0
    for found in _PREFIX.finditer(text, 0, end):
        if _has_pair(text, begin, found.start()):
            break
        begin = found.end()
    return begin


def _has_pair(text: str, begin: int, end: int) -> bool:
    if not _VALUE.search(text, begin, end):
        return False
    found = (pair for pair in _PAIR.finditer(text, begin, end) if _is_pair(pair))
    return any(role_of(pair["name"]) is Role.VALUE and not _is_place(pair) for pair in found)


def _is_place(found: re.Match[str]) -> bool:
    """Return whether a pair in a prefix may be a host and rank or a module and line, as in `olmo.train:908  INFO`."""
    return found["mark"] == ":" and (found["value"] or "").isdigit() and not is_known(found["name"])


def _add_counter(found: re.Match[str], line: Line) -> None:
    name, split, *texts = found.groups()
    if "," in found[0]:
        texts = [text and text.replace(",", "") for text in texts]
    count, total, batch, batches, bare, bares, inner, inners, after, part, parts = texts
    counters = line.counters
    if name is None:
        place, planned = (inner, inners) if inner else (bare or part, bares or parts)
        counters.setdefault(BATCH, f"{place}/{planned}" if place else int(after))
        if inner:
            counters.setdefault(EPOCH, float(bare))
    elif (name := _ABBREVIATIONS.get(name.lower(), name)).lower() == EPOCH:
        counters.setdefault(EPOCH, float(count))
    else:
        counters.setdefault(_BLANKS.sub("_", name), f"{count}/{total}" if total else int(count))
    if batch:
        counters.setdefault(BATCH, f"{batch}/{batches}")
    if split:
        line.prefix["split"] = split.lower()


def _is_pair(found: re.Match[str]) -> bool:
    if not found["mark"].isspace():
        return True
    unit = found["unit"] or found["unit_"]
    if is_known(found["name"]) or (found["name"].lower() == "time" and unit is not None):
        return True
    text = found.string
    if _PREPOSITION.match(found["name"]):
        return False
    return _OPENS.search(text, 0, found.start()) is not None and _CLOSES.match(text, found.end()) is not None


def _add_pair(found: re.Match[str], line: Line) -> None:
    name, _, numbers, clock, number, multiple, unit, absent, paren = found.groups()
    paren = paren and paren.strip()
    unit = multiple or unit
    bare = name = _SHORT_NAMES.get(name.lower(), name)
    if absent or (unit and number.lower() == "nan"):
        return  # "nanms" is the average of no measurement yet: absent
    value: Any = clock or number
    if numbers:
        value = _list(numbers)
    elif unit:
        name, value = _with_unit(name, value, unit)
    if paren and (each := _PER_GPU.fullmatch(paren)):
        alias = canonical(name).name
        _put(line, name if alias.endswith("_per_gpu") else f"{name}_per_gpu", each[1])
        name = alias.removesuffix("_per_gpu")
    elif paren and _AVERAGE.fullmatch(paren):
        kind = "_percent" if paren[-1] == "%" else "_change" if paren[0] == "+" else AVERAGE
        _put(line, f"{bare}{kind}", paren.rstrip("%"))
    elif paren and _VALUE.search(paren):
        line.rest.append(bare)
    if name in line.pairs and (group := _group_of(found)):
        name = f"{group}/{name}"
    _put(line, name, value)


def _group_of(found: re.Match[str]) -> str | None:
    """Return the word before the bracket around a pair, as in `loss[loss=0.2], tot_loss[loss=0.3]`; otherwise None."""
    before = found.string[max(0, found.start() - _GROUP_CHARACTERS) : found.start()]
    word = _GROUP.search(before)
    return word[1] if word else None


def _put(line: Line, name: str, value: Any) -> None:
    if name in line.pairs or value is None:
        line.rest.append(name)
    else:
        line.pairs[name] = plain(value) if isinstance(value, str) else value


def _with_unit(name: str, value: str, unit: str) -> tuple[str, str]:
    """Return name and value of a quantity in a log line, with its unit appended to one of them.

    The unit follows the value if the name implies a unit or if the unit is a multiple such as `K`; otherwise it follows
    the name, in parentheses.
    """
    return (name, f"{value}{unit}") if unit in MULTIPLES or canonical(name).unit else (f"{name} ({unit})", value)


def named_value(name: str, text: str) -> tuple[str, Any]:
    """Return name and value of a quantity whose value is `text`, with its unit in the place of `_with_unit`."""
    found = quantity(text)
    if found is None or found[1] is None:
        return name, plain(text)
    name, value = _with_unit(name, text.strip().removesuffix(found[1]).rstrip(), found[1])
    return name, plain(value)


def _add_value(found: re.Match[str], line: Line) -> str:
    """Add a value with a unit but without a name, such as `| 42 tok/s`. The unit implies the name."""
    name = "mfu" if found["name"] else _NAME_OF_UNIT.get(UNITS[found["unit"].lower()].name or "")
    if name is None or name in line.pairs:
        return found[0]
    line.pairs[name] = f"{found['value']}{found['unit']}"
    return "|"


def _list(text: str) -> Any:
    try:
        return json.loads(text) if text[0] == "[" else [float(part) for part in text.strip("(,)").split(",")]
    except ValueError:
        return None


def _name_before(text: str, end: int) -> str:
    found = _NAME_BEFORE.search(text[max(0, end - _BEFORE_CHARACTERS) : end])
    return found[0] if found else "numbers without a name"


def unwrapped(text: str) -> str:
    """Return `text` with numbers instead of their `repr` as tensors or numpy numbers."""
    parts, at = [], 0
    for found in _WRAPPED.finditer(text):
        if found.start() < at:
            continue
        depth, end = 1, text.index("(", found.start()) + 1
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        parts += [text[at : found.start()], found[1]]
        at = end
    return "".join([*parts, text[at:]])


EVALUATION: Final = "evaluation"
"""Name of a group that begins an evaluation, which has the counters of the record before it."""

EVALUATION_MARK: Final = "[eval] "
"""The beginning of a rewritten line of an evaluation."""

_PLANS: Final = {"step": "total", "batch": "batches", "epoch": "epochs"}
_COUNTERS: Final = {*_PLANS, *_PLANS.values()}

# Logs of these tools are in `docs/tools.toml`. "^" is matched: a search would try each position of the text.
_PATTERNS: Final = (
    rf"^(?P<step>\d{{1,15}}) train (?P<loss>{NUMBER})$",  # build-nanogpt
    rf"^(?P<step>\d{{1,15}}) val (?P<val_loss>{NUMBER})$",
    # Keras
    r"^(\d+)/\1 (?:\[=*\]|━+|- \d+m?s)[\s-]*(?:\d+m?s\s+)?(?:\d+[mun]?s/(?:step|epoch))?[\s-]*",
    rf"^(?P<epoch>\d{{1,9}})\|(?P<step>\d{{1,15}})\|Loss: (?P<loss>{NUMBER}).*$",  # torchtune
    r"^\[(?:batch|ba|iteration|iter)=(?P<step>\d{1,15})(?:/(?P<total>\d{1,15}))?\]:?$",  # Composer
    r"^\[epoch=(?P<epoch>\d{1,9})(?:/\d+)?\]\[batch=(?P<batch>\d{1,15})(?:/(?P<batches>\d{1,15}))?\]:?$",
    r"^\[Eval batch=\d+/\d+\] (?P<evaluation>Eval) on .{0,80} data:$",
    r"^\[(?P<step>\d{1,15})\]\t",  # XGBoost, LightGBM
    rf"^(?P<step>\d{{1,15}}):\tlearn: (?P<loss>{NUMBER})",  # CatBoost
    # Darknet
    rf"^(?P<step>\d{{1,15}}): (?P<loss>{NUMBER}), (?P<avg_loss>{NUMBER}) avg(?: loss)?, (?P<lr>{NUMBER}) rate",
    rf"^Train loss (?P<step>\d{{1,15}}) (?P<loss>{NUMBER})(?= Grad Norm)",  # Tacotron 2
    rf"^Validation loss (?P<step>\d{{1,15}}): +(?P<val_loss>{NUMBER})",
    r"^\[(?P<step>\d{1,15}) \| (?P<elapsed>\d+\.\d+)\]",  # gpt-2-simple
    r"TRAIN Batch (?P<epoch>\d{1,9})/(?P<batch>\d{1,15})|(?P<evaluation>CV) Batch \d{1,9}/\d{1,15}",  # WeNet
    # timm
    (
        r"Train:\s+(?P<epoch>\d{1,9})(?:/\d{1,9} \(\s*\d+%\))? "
        r"\[\s*(?P<batch>\d{1,15})/(?P<batches>\d{1,15}) \(\s*\d+%\)\]"
    ),
    r"(?<=: )(?P<epoch>\d{1,9})epoch:train:\d{1,15}-(?P<batch>\d{1,15})batch: ",  # ESPnet
    # Levanter
    (
        r"Progress on:train (?P<step>\d{1,15})(?:\.\d)?it/(?P<total>\d{1,15})(?:\.\d)?it "
        r"rate:(?P<rate>\S{1,20}) remaining:(?P<remaining>\S{1,20}) elapsed:(?P<elapsed>\S{1,20}) postfix:"
    ),
)
_MATCHES: Final = [re.compile(text).match if text[0] == "^" else re.compile(text).search for text in _PATTERNS]


def match_of(text: str) -> re.Match[str] | None:
    """Return the match of the pattern of a tool in `text`, or None."""
    return next((found for match in _MATCHES if (found := match(text))), None)


def pattern_of(text: str) -> re.Pattern[str]:
    """Return the compiled `--pattern` of a user. Raises IngestError if it is invalid or names no quantity."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise IngestError(f"--pattern {text!r} is no regular expression: {error}") from error
    if not pattern.groupindex.keys() - _COUNTERS:
        raise IngestError(f"--pattern {text!r} names no quantity: add a group such as `(?P<loss>[0-9.]+)`")
    return pattern


def line_of(found: re.Match[str], counters: Mapping[str, Any]) -> Line:
    """Return the counters and the quantities in the groups of `found` and in the text around it.

    `counters` are those of the record before the line. Two underscores in the name of a group become a slash.
    """
    groups = {name: value for name, value in found.groupdict().items() if value is not None}
    line = parse(f"{found.string[: found.start()]}| {found.string[found.end() :]}".strip(), is_counted=True)
    if groups.pop(EVALUATION, None):
        line.prefix["split"] = "eval"
        line.counters = {**counters, **line.counters}
    for name, plan in _PLANS.items():
        count, total = (whole(groups.pop(group, "")) for group in (name, plan))
        if count is not None and name == EPOCH:
            line.counters[EPOCH] = float(count)
        elif count is not None:
            line.counters[BATCH if name == "batch" else name] = f"{count}/{total}" if total else count
    line.has_point |= any("." in text for text in groups.values())
    line.pairs = dict(named_value(name.replace("__", "/"), text) for name, text in groups.items()) | line.pairs
    return line


_CHINESE: Final = {
    "训练损失": "train_loss", "验证损失": "val_loss", "测试损失": "test_loss", "平均损失": "avg_loss",
    "损失值": "loss", "损失": "loss", "学习率": "lr", "梯度范数": "grad_norm",
    "全局步数": "global_step", "训练步数": "step", "步数": "step", "步骤": "step", "迭代次数": "iter",
    "迭代": "iter", "训练轮次": "epoch", "训练轮数": "epoch", "轮次": "epoch", "轮数": "epoch",
    "周期": "epoch", "验证准确率": "val_accuracy", "准确率": "accuracy", "困惑度": "perplexity",
    "吞吐量": "throughput", "吞吐": "throughput", "剩余时间": "eta", "耗时": "step_time",
    "用时": "step_time", "显存": "memory", "样本/秒": "samples/s", "毫秒": "ms", "秒": "s",
}  # fmt: skip
_IS_CHINESE: Final = re.compile(r"[\u4e00-\u9fff，；（）＝]")
_WORDS: Final = re.compile("|".join(sorted(_CHINESE, key=len, reverse=True)))
_ORDINAL: Final = re.compile(
    r"第\s*(\d{1,15})\s*(?:/\s*(\d{1,15})\s*)?(?:个\s*)?"
    r"(步|轮|周期|迭代|epoch|step)",
    re.IGNORECASE,
)
_ORDINALS: Final = {"步": "step", "step": "step", "迭代": "iter"}
_MARKS: Final = str.maketrans("，；（）＝", ",;()=")


def in_english(text: str) -> str:
    """Return `text` with the English names of Chinese counters and quantities, such as `第 10 步，损失：2.3`."""
    if not _IS_CHINESE.search(text):
        return text
    text = _ORDINAL.sub(_ordinal, text.translate(_MARKS))
    return _WORDS.sub(lambda found: f" {_CHINESE[found[0]]} ", text)


def _ordinal(found: re.Match[str]) -> str:
    name = _ORDINALS.get(found[3].lower(), EPOCH)
    return f" {name} {found[1]}{f'/{found[2]}' if found[2] else ''} "
