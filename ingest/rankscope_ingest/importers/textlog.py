"""Import text lines with a step followed by names and numbers, as most training scripts print them.

    iter 10: loss 9.61, time 62.3ms, mfu 3.40%                      nanoGPT
    step:1/6200 train_loss:10.9 train_time:285ms                    modded-nanogpt
    s:0 trl:11.01 norm:15.4                                         llm.c, log file
    step 1/18865 | loss 11.0 | 12.3 ms | 42 tok/s                   llm.c, console
    step:  1  loss:  8.05  memory:  1.9GiB(2.0%)  tps: 1,234        torchtitan
    [Rank 0] step=10, skipped=0, lr=[1e-05], mom=[…]                DeepSpeed
    Epoch: [0]  [ 260/400]  eta: 0:04:26  loss: 2.04 (2.24)         torchvision
    Epoch 1, Loss: 0.68, Val Loss: 0.69                             a script that prints a line per epoch

The module `common.pairs` splits a line into counters and pairs of a name and a value. `common.decisions` decides which
counter is the step. A line without a counter is read after the first record, if it contains nothing but pairs, such as
the loss of an evaluation. Other lines are counted, but not stored.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope_contract.model.events import EventType
from rankscope_ingest.importers.common.bars import states
from rankscope_ingest.importers.common.decisions import is_typical
from rankscope_ingest.importers.common.forms import Match, Reading, learned
from rankscope_ingest.importers.common.importer import NOT_MINE, Detection, Faults, Imported
from rankscope_ingest.importers.common.lines import (
    is_binary,
    sample_lines,
    shown,
    without_colours,
)
from rankscope_ingest.importers.common.log_names import EPOCH, Role, canonical, role_of
from rankscope_ingest.importers.common.log_records import LineParser, read_log
from rankscope_ingest.importers.common.pairs import Line, in_english, line_of, match_of, parse, pattern_of, records_on
from rankscope_ingest.importers.common.tables import Boxes, Tables

MAX_LINE_CHARACTERS: Final = 8192

_COUNTED: Final = re.compile(
    r"step|iter|update|epoch|batch|\[\s*\d+\s*[/\]]|^s:|\d \||\(\d+(?:[,/] ?\d+)?\) |\b(?:ep|up)\. ?\d", re.IGNORECASE
)
_ALONE: Final = re.compile(
    r"loss|perplexity|ppl|acc|per.step|(?:[A-Za-z)\]%]\s?|\d\s)[:=]\s*[-+(\[]?(?:\.?\d|nan\b|inf\b)", re.IGNORECASE
)
"""A regular expression that occurs in a line without a counter which may be read."""
_CHECKPOINT: Final = re.compile(r"\b(?:checkpoint|ckpt)", re.IGNORECASE)
_VERB: Final = r"\b(saved|saving|wrote|written|writing|loaded|loading|restored|restoring|resumed|resuming)\b"
_HANDLED: Final = re.compile(
    rf"(?i){_VERB}\W+(?:\w+\W+){{0,3}}?(?:checkpoint|ckpt)(?! shards)"
    rf"|\b(?:checkpoint|ckpt)\S*\W+(?:(?!will\b)\w+\W+){{0,2}}?{_VERB}"
)
"""A regular expression for a line which reports that a checkpoint is or was saved or loaded."""
_HEADING: Final = re.compile(r"\bepoch\b", re.IGNORECASE)
_HEADING_CHARACTERS: Final = 80
_SET: Final = re.compile(r"^(?:Train|Eval) (?=\w+/)")
"""A regular expression for the word before a name that begins with a path, as in `Train loss/train/total`."""
_MEGATRON: Final = re.compile(r"consumed samples:|elapsed time per iteration")
_JSON: Final = '{"'
"""The beginning of an object in JSON, which has no pair of a name and a value in the grammar of text lines."""
_MANY: Final = 5
_FEWEST: Final = 2
_FEWEST_OF_FORM: Final = 3
_TOTAL: Final = ("total", "num", "max")
"""Beginnings of the names of counters that are values of a block and not its place: `Total steps: 98304`."""
_MOST_LINES: Final = 2_000
_FEW_LINES: Final = 100
_OTHER_COUNT: Final = 7_654_321  # no count of a log


class TextLog:
    """The importer of text lines that contain a step and numbers."""

    name = "textlog"
    options = ("loss", "year", "pattern")

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that the file is a text log whose lines contain a step and numbers.

        The confidence depends on the share of lines with a step and a typical quantity, such as the loss. The lines are
        sampled from the beginning, the middle and the end of the file.
        """
        if path.is_dir() or is_binary(head):
            return NOT_MINE
        sample = [line.decode(errors="replace") for line in sample_lines(path, head) if line.strip()]
        lines = [part for line in sample for part in states(line)]
        first = next((place for place, line in enumerate(lines) if _MEGATRON.search(line)), None)
        if first is not None:  # the importer of Megatron logs reads them better: a few lines suffice
            lines = lines[first : first + _FEW_LINES]
        log = Lines(Faults())
        texts = (line for line in lines if not line.startswith(_JSON))
        found = [record for line in texts if (record := log.record(without_colours(line)))]
        forms = Counter(names for names, _ in {(tuple(record), _step_of(record)) for record in found})
        records = [
            record
            for record in found
            if len(record) > _MANY or any(map(is_typical, record)) or forms[tuple(record)] >= _FEWEST_OF_FORM
        ]
        if len(records) < min(_FEWEST, len(lines)) or not records:
            return NOT_MINE
        because = f"{len(records)} of {len(lines)} sampled lines contain a step and its loss"
        if first is not None:
            return Detection(0.1, because)
        return Detection(0.35 + 0.5 * len(records) / len(lines), because)

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield one record per line with a step and numbers, then the facts about the run.

        A last line without line end may be incomplete. It counts as a record only if it has the same names as the
        previous record and as many decimals in its last number.
        """
        yield from read_log(path, faults, Lines(faults))


class Lines(LineParser):
    """The lines of one text log, in order.

    A line of an epoch, such as `Epoch 2/10`, gives its epoch to the records after it that contain none. A line of
    counters without pairs gives them and its time to the lines of pairs below it. Another line without a counter is a
    record if it contains nothing but pairs, such as the loss of an evaluation; it then has the counters of the record
    before it. Numbers of records that are not stored are counted in `faults`.
    """

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self.counts = {"other_lines": 0}
        self._patterns = [pattern_of(text) for text in faults.options.pattern]
        self._tables = Tables()
        self._boxes = Boxes()
        self._counters: dict[str, Any] = {}
        self._epoch: float | None = None
        self._shown_epoch: float | None = None
        self._heading: Line | None = None
        self._sections = Sections()
        self._has_point = False
        self._form: tuple[tuple[str, ...], int] | None = None  # of the last record

    def match(self, line: bytes) -> Match | None:
        return None if self._heading or self.faults.is_torn else self.forms.match(line, self._context())

    @property
    def given(self) -> Mapping[str, Any]:
        return {} if self._epoch is None else {EPOCH: self._epoch}

    def after(self, match: Match, line: bytes, count: int) -> None:
        form, texts = match
        unkept, counters, is_of_training = form.effects
        document = form.values(texts, self.given)
        for name in unkept:
            self.faults.unkept[name] += count
        self._counters = {name: document[name] for name in counters}
        if is_of_training:
            self._sections.counters = self._counters
        self._form = _form_of(document, without_colours(line.decode()))

    def _context(self) -> Hashable:
        """Return the state on which the meaning of a line depends, apart from its place, without a heading."""
        is_shown = self._shown_epoch == self._epoch
        has_place = self._epoch is None, bool(self._counters)
        return has_place, is_shown, self._has_point, self._tables.names, self._boxes.context(), self._sections.context()

    def documents(self, number: int, line: bytes) -> Sequence[dict[str, Any]]:
        """Return the records on a line of the file, of which a progress bar may have printed several."""
        documents = self._parsed(number, line)
        is_plain = len(documents) == 1 and not self._heading and not self._patterns
        if is_plain and b"\r" not in line and self.forms.is_due(line, self._context()):
            here, elsewhere = (
                lambda text, is_elsewhere=place: copy.copy(self).reading(text, is_elsewhere=is_elsewhere)
                for place in (False, True)
            )
            self.forms.add(learned(line, (here, elsewhere)), self._context())
        return documents

    def reading(self, text: str, *, is_elsewhere: bool) -> Reading | None:
        """Return the reading of a line here or, with `is_elsewhere`, at another place of the log; None if it has none.

        This object must be a copy: it cannot be used after the call.
        """
        self.faults = Faults(options=self.faults.options)
        self.counts = dict(self.counts)
        self._tables, self._boxes = copy.copy(self._tables), copy.deepcopy(self._boxes)
        self._sections = copy.copy(self._sections)
        self._counters, self._sections.counters = dict(self._counters), dict(self._sections.counters)
        if is_elsewhere:
            is_shown = self._shown_epoch == self._epoch
            self._counters = self._sections.counters = {"step": _OTHER_COUNT} if self._counters else {}
            self._epoch = None if self._epoch is None else float(_OTHER_COUNT)
            self._shown_epoch = self._epoch if is_shown else None
        before, training = self._state(), self._sections.counters
        documents = self._parsed(0, text.encode())
        if self._state() != before or len(documents) != 1 or self.faults.count or "event" in documents[0]:
            return None
        counters = {name: documents[0].get(name) for name in self._counters}
        is_of_training = self._sections.counters is not training
        if counters != self._counters or (is_of_training and self._sections.counters != counters):
            return None
        effects = tuple(self.faults.unkept.elements()), tuple(counters), is_of_training
        return Reading(documents[0], effects, self.given)

    def _state(self) -> tuple[Any, ...]:
        """Return all state that a line of a learned form does not change."""
        return self._context(), self._epoch, self._shown_epoch, dict(self.counts), self._heading

    def _parsed(self, number: int, line: bytes) -> Sequence[dict[str, Any]]:
        found = []
        parts = [each for part in states(line.decode(errors="replace")) for each in records_on(part)]
        for place, part in enumerate(parts, 1):
            text = without_colours(part)
            record = self.record(text) or self.checkpoint(text)
            if record is None:
                self.counts["other_lines"] += 1
                continue
            form = _form_of(record, text)
            if self.faults.is_torn and place == len(parts) and form != self._form:
                self.faults.add(number, f"the last line has no line end and may be incomplete: {shown(line)}")
            else:
                found.append(record)
            self._form = form
        return found

    def record(self, line: str) -> dict[str, Any] | None:
        """Return the counters and the numbers on `line` by name; None if the line is no record."""
        if len(line) > MAX_LINE_CHARACTERS or not line.strip():
            return None
        if (row := self._boxes.read(line)) is not None:
            return self._placed(row) if row else None
        line = line if line.isascii() else in_english(line)
        for pattern in self._patterns:
            if found := pattern.search(line):
                return self._take(line_of(found, self._counters), line.strip(), is_certain=True)
        if (record := self._read(line)) is None and (text := self._tables.row(line, self._counters)) is not None:
            return self._read(text)
        return record or self._of_tool(line.strip())

    def _placed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row of a table with its counters, or those of the record before it."""
        counters = {name: value for name, value in row.items() if role_of(name) is Role.STEP}
        self._counters = counters or self._counters
        return {**(self._heading.prefix if self._heading else {}), **self._counters, **row}

    def _of_tool(self, text: str) -> dict[str, Any] | None:
        """Return the record on a line that has the pattern of a tool, or None."""
        found = match_of(text)
        if found is None:
            return None
        line = line_of(found, self._counters)
        if not found.groupdict() and self._epoch is not None:
            # Keras prints a line below the heading of each epoch; a further line is `Model.evaluate`.
            if self._shown_epoch == self._epoch and not any(name.startswith("val_") for name in line.pairs):
                line.prefix["split"], line.counters = "eval", {EPOCH: self._epoch}
            self._shown_epoch = self._epoch
        return self._take(line, text)

    def _read(self, line: str) -> dict[str, Any] | None:
        """Return the record on a line of counters and pairs."""
        text = line.strip()
        is_below = self._heading is not None and line[0].isspace()
        text = _SET.sub("", text) if is_below else text
        if self._sections.begin(text):
            return None
        if not is_below and not _COUNTED.search(text) and not (self._counters and _ALONE.search(text)):
            return None
        found = parse(text)
        if found.pairs and not found.counters and match_of(text):
            return None
        return self._take(found, text, is_below=is_below)

    def _take(
        self, found: Line, text: str, *, is_below: bool = False, is_certain: bool = False
    ) -> dict[str, Any] | None:
        """Return the record on a line of the file; with `is_certain`, also if it has no counter."""
        if not found.pairs:
            return self._read_counters(found, text)
        if has_counters := bool(found.counters):
            self._counters, self._heading = found.counters, None
        elif self._counters and not found.has_words and (is_below or _is_certain(found)):
            found.counters = dict(self._counters)
            found.prefix = {**(self._heading.prefix if self._heading else {}), **found.prefix}
        elif not is_certain:
            return None
        self._sections.place(found, has_counters=has_counters)
        self._has_point = self._has_point or found.has_point
        if self._has_point:  # it is the decimal mark of the log
            found.ungroup()
        if self._epoch is not None:
            found.counters.setdefault(EPOCH, self._epoch)
        if {"val loss", "train loss"} <= found.pairs.keys() and found.counters.keys() != {EPOCH}:
            # nanoGPT's estimate over both sets is another quantity than the loss of each step.
            found.pairs["train_loss_estimate"] = found.pairs.pop("train loss")
        self.faults.unkept.update(found.rest)
        return found.document()

    def _read_counters(self, found: Line, text: str) -> dict[str, Any] | None:
        """Take the counters of a line without pairs for the lines below; return those that are values of a block."""
        if EPOCH in found.counters and found.length <= _HEADING_CHARACTERS and _HEADING.search(text):
            self._epoch = found.counters[EPOCH]
            self._counters[EPOCH] = self._epoch
            self._sections.end()
        if found.counters and self._heading and all(name.lower().startswith(_TOTAL) for name in found.counters):
            values = {name.replace("_", " "): value for name, value in found.counters.items()}  # and no plan
            return {**self._heading.prefix, **self._heading.counters, **values}
        has_plan = any(isinstance(count, str) for count in found.counters.values())
        is_heading = (has_plan and found.length <= _HEADING_CHARACTERS) or "split" in found.prefix
        if found.counters and (is_heading or not found.has_words):
            self._heading, self._counters = found, dict(found.counters)
        return None

    def checkpoint(self, text: str) -> dict[str, Any] | None:
        """Return an object with an event for a line about a checkpoint; None for any other line.

        The line has a step, or follows a record and reports that a checkpoint is saved, at its step, or loaded.
        """
        if len(text) > MAX_LINE_CHARACTERS or not _CHECKPOINT.search(text):
            return None
        found, counters = _HANDLED.search(text), parse(text).counters
        if not (counters or (found and self._counters)):
            return None
        verb = (found[1] or found[2]).lower() if found else ""
        action = f"{'load' if verb[0] in 'lr' else 'sav'}{'ing' if verb.endswith('ing') else 'ed'}" if verb else ""
        place = counters or ({} if "load" in action else self._counters)
        event = f"{EventType.CHECKPOINT} {action}".rstrip()
        return {"event": event, **place, "line": text.strip()[:1000], "action": action}


def nearest_miss(head: bytes) -> str | None:
    """Return the first line of a file that is nearly a record, and its missing part. Return None without one."""
    for number, line in enumerate(head.splitlines()[:_MOST_LINES], 1):
        found = parse(without_colours(line.decode(errors="replace"))[:MAX_LINE_CHARACTERS])
        typical = next((name for name in found.pairs if is_typical(name)), None)
        if typical and not found.counters:
            return f"line {number:,} has {_with_article(canonical(typical).name)} and no step"
        if found.counters and not found.pairs:
            return f"line {number:,} has {_with_article(next(iter(found.counters)))} and no number"
    return None


def _with_article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _form_of(record: Mapping[str, Any], text: str) -> tuple[tuple[str, ...], int]:
    """Return the names of a record and the number of decimals of the last number of its line."""
    return tuple(record), len(text.rstrip().rpartition(".")[2])


def _is_certain(line: Line) -> bool:
    """Return whether a line without a counter contains nothing but pairs."""
    return not (line.rest or line.has_unknown_names)


def _step_of(record: Mapping[str, Any]) -> Any:
    return next((value for name, value in record.items() if role_of(name) is Role.STEP), record.get(EPOCH))


_NAMED_PART: Final = re.compile(r"eval|valid|\btest|train|\bval\b", re.IGNORECASE)
_IN_BRACKETS: Final = re.compile(r"\([^()]*\)")
_WORD: Final = re.compile(r"[A-Za-z]+")
_EVALUATION: Final = frozenset((
    "eval", "evaluation", "evaluate", "evaluating", "validation", "validate", "validating", "valid", "val",
))  # fmt: skip
_TEST: Final = frozenset(("test", "testing"))
_TRAINING: Final = frozenset(("train", "training"))
_OTHERS: Final = frozenset((
    "run", "running", "start", "starting", "started", "begin", "beginning", "phase", "performance", "loop", "epoch",
    "epochs", "set", "results", "result", "metrics", "stage", "model", "the", "on", "mode", "step", "iteration",
    "summary", "statistics", "loss", "losses",
))  # fmt: skip
"""Words that may be next to the name of the part in a heading."""
_OF_TRAINING: Final = frozenset(("learning_rate", "grad_norm", "loss_scale"))
"""Stored names of quantities that an evaluation does not have."""


class Sections:
    """The part of a log, the training or an evaluation, to which its next row belongs.

    A heading of an evaluation, such as `> EVALUATION`, holds until the next heading of training, the next epoch, or a
    row with a quantity that only the training has. In a log without headings of training, it also ends if the counter
    of the first row below it continues that of the training. Evaluations before the first row of training count
    nothing: such a heading may be one of the configuration.
    """

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}
        """The counters of the last row of training."""
        self._split: str | None = None
        self._has_training_headings = False
        self._is_checked = False

    def context(self) -> tuple[Any, ...]:
        """Return the state on which the meaning of a row depends, apart from the counters of the row before it."""
        return self._split, bool(self.counters), self._has_training_headings, self._is_checked

    def begin(self, text: str) -> bool:
        """Begin the part of which `text` is the heading; return False if `text` is no heading."""
        if len(text) > _HEADING_CHARACTERS or not _NAMED_PART.search(text):
            return False
        words = {word.lower() for word in _WORD.findall(_IN_BRACKETS.sub("", text))}
        parts = words - _OTHERS
        if not parts or parts - _EVALUATION - _TEST - _TRAINING or any(map(str.isdigit, _IN_BRACKETS.sub("", text))):
            return False
        self._split = None
        if parts <= _TRAINING:
            self._has_training_headings = True
        elif self.counters:
            self._split = "test" if parts & _TEST else "eval"
            self._is_checked = False
        return True

    def end(self) -> None:
        """End an evaluation: a new epoch begins with training."""
        self._split = None

    def place(self, line: Line, *, has_counters: bool) -> None:
        """Give a row of an evaluation its split and the counters of the training; take those of a row of training.

        With `has_counters`, the counters of the row are on its own line.
        """
        if self._split is not None and self._is_training(line, has_counters=has_counters):
            self._split = None
        if self._split is not None and "split" not in line.prefix:
            line.prefix["split"] = self._split
            line.counters = dict(self.counters)
        elif "split" not in line.prefix and line.counters:
            self.counters = line.counters

    def _is_training(self, line: Line, *, has_counters: bool) -> bool:
        if any(canonical(name).name in _OF_TRAINING for name in line.pairs):
            return True
        if self._is_checked or self._has_training_headings or not has_counters:
            return False
        self._is_checked = True
        return any(
            _count(line.counters[key]) > _count(before)
            for key, before in self.counters.items()
            if key in line.counters and key != EPOCH
        )


def _count(counter: Any) -> int:
    return int(str(counter).partition("/")[0])


IMPORTER = TextLog()
