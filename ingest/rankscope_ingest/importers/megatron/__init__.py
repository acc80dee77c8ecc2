"""Import text logs of Megatron-LM and its derivatives: rows for a few iterations each, and the lines between the rows.

    [2025-02-28 16:26:20] iteration 1/ 1000 | consumed samples: 256 | … | lm loss: 1.217489E+01 | grad norm: 5.127 |

A row consists of parts `key: value`. The forms of rows that repeat are learned, so that further rows need one match of
an expression. The lines of timers below each row, and other output that differs only in digits, are a part of the form
if they repeat, too. An incomplete row is reported as an unreadable line and not stored, because its last number may
lack digits.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from rankscope_contract.model.events import EventType, Severity
from rankscope_ingest.importers.common.forms import Forms
from rankscope_ingest.importers.common.importer import (
    FROM_LOG,
    NOT_MINE,
    BlockBuilder,
    Checkpoint,
    Detection,
    Faults,
    Imported,
)
from rankscope_ingest.importers.common.lines import LogLines, open_log, sample_lines, shown
from rankscope_ingest.importers.megatron.other_lines import Companion, Companions, form_with_lines_below
from rankscope_ingest.importers.megatron.rows import (
    LOSS,
    Printer,
    Row,
    RowForm,
    clean,
    fold,
    form_of,
    heads,
    is_cut,
    main_loss,
    number,
    parse_rows,
    rank_of,
    split_part,
    values,
)

_OF_EPOCH: Final = re.compile(r"[Ii]teration[ \t]+\d{1,18}[ \t]*/[ \t]*\d{1,18}[ \t]*\|[^\n]*\bglobal_step\b")
"""A regular expression for a row whose iteration is the one within an epoch, as NeMo 2 prints it."""
_ARGUMENTS: Final = re.compile(rb"^ +\w+ \.{3,} \S", re.MULTILINE)
_SEARCHED_BYTES: Final = 16 << 20
_MOST_LINES: Final = 8
"""Largest number of lines into which a row is wrapped, without the first one."""
_MOST_ROWS: Final = 64
"""Largest number of rows in one line."""
_MOST_WAITING: Final = 10_000
_MOST_TOGETHER: Final = 1000
"""Number of rows of one form, consecutive or between other lines, after which they are added."""
_MOST_BELOW: Final = 64
"""Largest number of lines below a row that are learned as a part of its form."""
_MOST_LONGER: Final = 8
"""Largest number of forms that differ only in the lines below the row."""
_MOST_TRIES: Final = 4096
"""Number of rows with unknown lines below them after which such lines are not learned any more."""
_REMEMBERED: Final = 4096
_REMEMBERED_KEYS: Final = 64
_LAST_KEYS: Final = frozenset({"number_of_nan_iterations", "tflops"})
_KNOWN_KEYS: Final = frozenset({
    "consumed_samples", "consumed_tokens", "elapsed_time_per_iteration", "learning_rate", "global_batch_size",
    "lm_loss", "loss", "loss_scale", "grad_norm", "num_zeros", "params_norm", "number_of_skipped_iterations",
    "number_of_nan_iterations", "samples_per_second", "tflops", "throughput_per_gpu", "actual_seqlen",
    "curriculum_seqlen", "load_balancing_loss", "world_size", "decoupled_learning_rate", "tokens_per_gpu",
    "tokens_per_gpu_per_second", "mtp_1_loss", "z_loss",
})  # fmt: skip
_SPLIT_NUMBER: Final = re.compile(r"[\d.eE+-]$")
_REST_OF_NUMBER: Final = re.compile(r"^[\d.eE+-]")


class MegatronText:
    """The importer of the text logs of Megatron-LM and its derivatives."""

    name = "megatron"

    def detect(self, path: Path, head: bytes) -> Detection:
        """Return the confidence that the file is a Megatron log: high if it has rows such as `iteration 1/ 1000 | …`.

        A long list of arguments may precede the first row, so up to 16 MiB are searched.
        """
        text = clean(head.decode(errors="replace"))
        if _OF_EPOCH.search(text):
            return NOT_MINE
        if rows := len(heads(text)):
            return Detection(0.95, f"{rows} of its first lines are rows `iteration N/ M | …`")
        if path.is_dir() or not (_ARGUMENTS.search(head) or b"megatron" in head.lower()):
            return NOT_MINE
        with open_log(path) as file:
            if not heads(clean(file.read(_SEARCHED_BYTES).decode(errors="replace"))):
                return NOT_MINE
        return Detection(0.9, "the file contains rows `iteration N/ M | …`, but not at its beginning")

    def read(self, path: Path, faults: Faults) -> Iterator[Imported]:
        """Yield blocks of the records in the log, then the facts about the run."""
        log = faults.reader or _Log(faults)
        log.begin(path)
        lines = LogLines(path, faults, begin=(faults.read_bytes, faults.lines), is_any=True)
        torn: tuple[int, bytes] | None = None
        for number_of_line, line in lines:
            if faults.is_torn:
                torn = number_of_line, line
                break
            log.line(number_of_line, line, lines)
            if not log.run and log.builder.is_full and (block := log.builder.take()):
                yield block
        log.end_run()
        log.above, log.below = None, []  # only for the speed of this import
        if block := log.builder.take():
            yield block
        end = (faults.read_bytes, faults.lines) if torn is None else (faults.line_start, faults.lines - 1)
        yield Checkpoint(reader=log, offset=end[0], lines=end[1], is_final=True)
        log.end(torn)
        if block := log.builder.take():
            yield block
        yield log.companions.run(log.planned or None, log.last_step)


@dataclass(slots=True)
class _OpenRow:
    """The last line with rows, which the next lines may continue."""

    number: int
    line: str
    text: str  # of the line and its continuations
    rows: list[Row]
    lines: int = 0  # that were tried as continuations
    unused: int = 0  # of these, the last ones, which are not a part of the rows

    @property
    def shown(self) -> str:
        """The beginning of the line, for a message."""
        return shown(clean(self.line).encode())


@dataclass(slots=True)
class _Run:
    """Rows of learned forms that wait to be added together. All lines between them are other output."""

    form: RowForm  # of the last row
    texts: list[bytes] = field(default_factory=list)  # in the slots, row after row
    parts: list[tuple[int, bytes]] = field(default_factory=list)  # consecutive lines and the number of the first one
    others: int = 0  # number of lines of other output in the forms

    def lines(self) -> list[tuple[int, bytes]]:
        """Return the numbers and the bytes of the lines in the forms."""
        return [
            (first + place, line.rstrip(b"\r"))
            for first, text in self.parts
            for place, line in enumerate(text.removesuffix(b"\n").split(b"\n"))
        ]


class _Log:
    """Reads the lines of one Megatron log. Its attributes are all of its state between two lines.

    The result for a line depends only on the lines before it and on the few next lines that may be its continuation.
    A log that has grown therefore yields the previous records first, in the same order.
    """

    def __init__(self, faults: Faults) -> None:
        self.builder = BlockBuilder()
        self.companions = Companions()
        self.planned = 0
        self.last_step: int | None = None
        self._last_attempt = 0
        self._last_ts: int | None = None
        self._faults = faults
        self._forms: Forms[RowForm] = Forms()
        self._open: _OpenRow | None = None
        self.run: _Run | None = None
        self.above: RowForm | None = None
        """The form of the last row, if the lines below it are not a part of the form."""
        self.below: list[bytes] = []
        """The lines below that row."""
        self._tries = 0  # number of rows whose lines below are no part of a form
        self._after: list[tuple[int, bytes]] = []  # lines that would continue the last row if a bar followed
        self._waiting: list[Companion] = []  # from a start of a process on, until the attempt is known
        self._printers: dict[Printer, tuple[int, float, int]] = {}  # step, loss and attempt of the last row
        self._tasks_are_ranks: bool | None = None
        self._last_keys: set[str] = set()  # of the rows that ended with a bar
        self._whole_keys: dict[tuple[str, ...], None] = {}  # of the rows with a loss
        self._once: dict[Hashable, None] = {}

    def begin(self, path: Path) -> None:
        """Decide whether the numbers of srun's tasks are ranks, unless an earlier import has decided it.

        Different tasks may print the rows of one run. The tasks are ranks if several of them print the same step.
        """
        if self._tasks_are_ranks is None:
            lines = (line for line in sample_lines(path) if line.lstrip()[:1].isdigit())
            rows = [row for line in lines for row in parse_rows(clean(line.decode(errors="replace")))]
            pairs = {(row.step, row.printer[1]) for row in rows if row.printer[1] is not None}
            if len({task for _, task in pairs}) > 1:
                self._tasks_are_ranks = len({step for step, _ in pairs}) < len(pairs)

    def line(self, number: int, line: bytes, lines: LogLines) -> None:
        """Add the records on `line`, and on the next ones of `lines` that have the same form."""
        match = self._forms.match(line)
        if match is not None:
            self._end_row()
        if match is None or (self._last_keys and not match[0].is_closed):
            self._parse(number, line)
            if self._open is not None or len(self.below) == _MOST_BELOW:
                self.above = None
            elif self.above is not None:
                self.below.append(line)
            return
        form, texts = match[0], [*match[1]]
        if form is self.above and self.below:
            self._learn(form)
        self.above, text = form, line + b"\n"
        for below, longer in form.longer:
            found_below, more = lines.matching(below, 1)
            if more:
                self.above, form, texts, text = None, longer, texts + found_below, text + more
                break
        others, more = lines.matching(form.expression)
        if self.run is not None and form is not self.run.form and form.layout != self.run.form.layout:
            self.end_run()
            self._end_row()
        self.below, self._after = [], []
        run = self.run = self.run or _Run(form)
        run.form = form
        run.texts += texts + others
        run.parts.append((number, text + more))
        run.others += form.others * (1 + len(others) // len(texts))
        if len(run.texts) >= _MOST_TOGETHER * len(texts):
            self.end_run()

    def _learn(self, form: RowForm) -> None:
        """Learn the form of the last row with the lines below it, up to the next row or only to the last timers."""
        self._tries += 1
        if self._tries > _MOST_TRIES or len(form.longer) == _MOST_LONGER:
            return
        last = max([1, *(place for place, line in enumerate(self.below, 1) if self.companions.is_possible(line))])
        for count in sorted({last, len(self.below)}, reverse=True):
            if self._forms.is_due(b"\n".join(self.below[:count])):
                if (longer := form_with_lines_below(form, self.below[:count])) is not None:
                    form.longer.append(longer)
                return

    def end_run(self, *, is_open: bool = False) -> None:
        """Add the last rows of learned forms; all lines between them are other output.

        With `is_open`, the next line may continue the last row. It may also do so if that row is not closed.
        """
        run, after, self.run, self._after = self.run, self._after, None, []
        if run is None:
            return
        is_open = is_open or not run.form.is_closed
        if is_open:
            del run.texts[-run.form.expression.groups :]
        is_added = not run.texts or self._add_rows(run)
        lines = [] if is_added and not is_open else run.lines()
        self._faults.passed_over -= len(after)
        for each, line in [*(lines[-1:] if is_added else lines), *after]:
            self._parse(each, line)

    def end(self, torn: tuple[int, bytes] | None) -> None:
        """Add the records that wait for further lines, and those of the last line if it has no line end."""
        if torn is not None and (row := _row_on(*torn)) is not None:
            self._end_row()
            self._open = row
            self._end_row(is_torn=True)
        elif torn is not None:
            self._faults.passed_over += self.companions.is_possible(torn[1]) or not self._continues(torn[1])
        self._end_row()
        self._add_waiting(None)

    def _parse(self, number: int, line: bytes) -> None:
        if (row := _row_on(number, line)) is not None:
            self.end_run()
            self._end_row()
            self._open = row
            return
        is_possible = self.companions.is_possible(line)
        if self.run is not None and not self.run.form.is_closed:
            if not (is_possible or b"\x1b" in line or line.rstrip().endswith((b"|", b"\x08"))):
                self._faults.passed_over += 1
                if len(self._after) < _MOST_LINES:
                    self._after.append((number, line))
                return
            self.end_run()
        if not is_possible and self._continues(line):
            return
        self._end_row()
        found = None
        if is_possible:
            self.end_run()
            self._end_row()
            found = self.companions.read(clean(line.decode(errors="replace")))
        self._faults.passed_over += found is None
        for companion in found or ():
            self._waiting.append(companion)
            if not self._waiting[0].is_start or len(self._waiting) > _MOST_WAITING:
                self._add_waiting(None)

    def _continues(self, line: bytes) -> bool:
        """Return whether `line` may continue the rows on the last line with rows. If it may, it is joined with them.

        A line may be wrapped after a bar, so a row that looks complete may continue. The largest number of lines that
        together form a valid row is joined.
        """
        if self.above is not None and not self.below and line.rstrip().endswith(b"|"):
            self.end_run(is_open=True)
        row = self._open
        if row is None or row.lines == _MOST_LINES or not line.strip():
            return False
        if not row.lines and row.rows[-1].is_closed and b"|" not in line:
            return False
        row.lines += 1
        row.unused += 1
        row.text = _joined(row.text, clean(line.decode(errors="replace")))
        if row.text.rstrip().endswith("|"):
            rows = parse_rows(row.text)
            if not rows or not _is_valid(rows[-1]):
                row.lines = _MOST_LINES
            else:
                row.rows, row.unused = rows, 0
        return True

    def _end_row(self, *, is_torn: bool = False) -> None:
        """Add the rows of the last line with rows, which the next line does not continue."""
        line, self._open = self._open, None
        if line is None:
            return
        self._faults.passed_over += line.unused
        for row in line.rows[:_MOST_ROWS]:
            if not self._is_whole(row, is_end=row is line.rows[-1], is_torn=is_torn):
                self._faults.add(line.number, f"incomplete row: {line.shown}")
                self.companions.row_seen()  # timers below this row are not those of the row before it
                continue
            if row.odd_parts:
                self._faults.add(line.number, f"part of the row is unreadable: {line.shown}")
            if row.is_closed:
                self._last_keys.add(fold(row.keys[-1]))
            if len(self._whole_keys) < _REMEMBERED_KEYS and main_loss(row.keys) is not None:
                self._whole_keys[row.keys] = None
            self._add_row(row)
            text = line.line.encode()
            if line.lines == line.unused and self._forms.is_due(text) and self._forms.match(text) is None:
                self._forms.add(form_of(line.line, row))

    def _is_whole(self, row: Row, *, is_end: bool, is_torn: bool) -> bool:
        """Return whether a row of a Megatron log is complete, as far as this can be derived from the log.

        A complete row ends with a bar (`|`), except in dialects that print no bar at the end. The last line of a log
        may be incomplete even with a bar at its end. Such a line counts as complete only if its last key is one with
        which earlier rows end, or one that is known as the last key of Megatron's rows.
        """
        if not row.parts or is_cut(row.keys, self._whole_keys):
            return False
        if is_torn:
            return row.is_closed and fold(row.parts[-1][0]) in self._last_keys | _LAST_KEYS
        return row.is_closed or (is_end and row.is_whole and not self._last_keys)

    def _add_row(self, row: Row) -> None:
        scalars = [(series, value * factor) for series, factor, value in row.scalars()]
        loss = next((value for series, value in scalars if series[0] == LOSS), float("nan"))
        attempt = self._attempt(row.printer, row.step, loss)
        self._row_seen(attempt)
        rank = rank_of(row.printer, tasks_are_ranks=self._tasks_are_ranks)
        self.builder.record(step=row.step, rank=rank, ts=row.ts, origin=FROM_LOG, attempt=attempt)
        for (name, unit, labels), value in scalars:
            self.builder.scalar(name, value, unit, labels)
        if main_loss(row.keys) is None:
            message = "no loss in this row: it was NaN, not above zero, or all iterations were skipped"
            self.builder.event(EventType.LOSS_MISSING, Severity.WARNING, message)
        self.last_step, self.planned, self._last_attempt, self._last_ts = row.step, row.planned, attempt, row.ts

    def _add_rows(self, run: _Run) -> bool:
        """Add rows of learned forms. Return False, and add none, if one of the texts in their slots is no number."""
        form = run.form
        try:
            rows, printers = form.rows(run.texts, tasks_are_ranks=self._tasks_are_ranks)
        except (ValueError, OverflowError):
            return False
        if len(rows) > 1 and len({*printers}) == 1 and (np.diff(np.array(rows.steps)) > 0).all():  # no step is repeated
            ends = [self._attempt(printers[0], rows.steps[place], rows.firsts[place]) for place in (0, -1)]
            attempts = ends[:1] * len(rows)
        else:
            attempts = [*map(self._attempt, printers, rows.steps, rows.firsts)]
        self._row_seen(attempts[0])
        self.companions.across = form.across
        self.builder.rows(rows, attempts, form.series, form.records)
        self._faults.passed_over += run.others
        self.last_step, self.planned = rows.steps[-1], rows.planned[-1] or 0
        self._last_attempt, self._last_ts = attempts[-1], rows.times[-1]
        return True

    def _attempt(self, printer: Printer, step: Any, loss: Any) -> int:
        """Return the attempt, from 0, of the next row of a process.

        A step that decreases begins another attempt. A row that repeats the previous step with the same loss was
        printed twice; it is not another attempt. A repeated step with a NaN loss is, because NaN is not equal to NaN.
        """
        before: tuple[int, float, int] = self._printers.get(printer, (step - 1, loss, 0))
        last, last_loss, attempt = before
        if step < last or (step == last and loss != last_loss):
            attempt += 1
        self._printers[printer] = step, loss, attempt
        return attempt

    def _row_seen(self, attempt: int) -> None:
        self._add_waiting(attempt)
        self.companions.row_seen()

    def _add_waiting(self, later: int | None) -> None:
        """Add the companion lines that wait; `later` is the attempt of the row behind them, if there is one.

        A companion line that contains no step gets the step of the row before it, and an event without a time its time.
        A line of the start of a process belongs to the attempt that begins with it.
        """
        waiting, self._waiting = self._waiting, []
        for companion in waiting:
            step = self.last_step if companion.step is None else companion.step
            attempt = self._last_attempt
            if companion.is_start:
                is_earlier = step is not None and self.last_step is not None and step < self.last_step
                if is_earlier if later is None else later > attempt:
                    step, attempt = companion.step, max(later or 0, attempt + 1)
            if companion.once is None or self._is_first((companion.once, step, attempt)):
                self._add_companion(companion, step, attempt)

    def _add_companion(self, companion: Companion, step: int | None, attempt: int) -> None:
        event = companion.event
        if not companion.scalars and event is None:
            return
        ts = self._last_ts if companion.ts is None and event is not None else companion.ts
        self.builder.record(step=step, rank=companion.rank, ts=ts, origin=FROM_LOG, attempt=attempt)
        for (name, unit, labels), value in companion.scalars:
            self.builder.scalar(name, value, unit, labels)
        if event is not None:
            self.builder.event(**event)

    def _is_first(self, key: Hashable) -> bool:
        if key in self._once:
            return False
        self._once[key] = None
        if len(self._once) > _REMEMBERED:
            self._once.pop(next(iter(self._once)))
        return True


def _row_on(number: int, line: bytes) -> _OpenRow | None:
    """Return the rows on a line, which a progress bar may have drawn again and again; None if it has none."""
    if b"teration" not in line and b"\x1b" not in line:
        return None
    text = clean(line.decode(errors="replace"))
    rows = [row for piece in text.split("\r") for row in parse_rows(piece)]
    return _OpenRow(number, line.decode(errors="replace"), text, rows) if rows else None


def _is_valid(row: Row) -> bool:
    return bool(row.parts) and not row.odd_parts and all(values(key, text) for key, text in row.parts)


def _joined(first: str, second: str) -> str:
    """Return two lines joined to one, with a space between them only if the line was wrapped between two words."""
    if not first or not second or first[-1] in " \t|" or second[0] in " \t|":
        return first + second
    left, right = first.rpartition("|")[2], second.partition("|")[0]
    tight, spaced = split_part(left + right), split_part(f"{left} {right}")
    if tight is not None and fold(tight[0]) in _KNOWN_KEYS and number(tight[1]) is not None:
        return first + second
    is_number = ":" in left and _SPLIT_NUMBER.search(left) and _REST_OF_NUMBER.match(right)
    is_known = spaced is not None and fold(spaced[0]) in _KNOWN_KEYS
    return first + second if is_number and not is_known else f"{first} {second}"


IMPORTER = MegatronText()
