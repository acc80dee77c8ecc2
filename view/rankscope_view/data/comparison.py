"""Compare runs or ranks: state and figures, configuration, and the first step and tensor in which they differ."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rankscope_contract.model.phases import PRE_COLLECTIVE_SECONDS
from rankscope_storage.connection import Connection
from rankscope_storage.diff.diff import ROUNDING, DiffSelection, DiffSide, DiffSource, Divergence, Tolerance, divergence
from rankscope_view.data.detail import RunDetail, read_chart, read_detail
from rankscope_view.data.documents import flat, json_object
from rankscope_view.data.series import EVAL_LOSS, GRAD_NORM, LEARNING_RATE, LOSS, History
from rankscope_view.data.summary import Summary

MOST_ROWS: Final = 5_000_000
"""Number of compared rows without a difference after which a page names the command instead."""

_FIRST_STEPS: Final = 16

LETTERS: Final = "abcdef"
"""Letters of the sides of a comparison, which has at most six: more colours cannot be distinguished."""

DIFFERENCE: Final = "difference"
"""Name of the chart with the loss of each other side minus that of the first side."""

STATES: Final = 3
"""Number of the first values of `compared_values` that describe the states of runs: state and incidents."""

SCALARS: Final = (LOSS, GRAD_NORM, EVAL_LOSS, LEARNING_RATE, "step_seconds", PRE_COLLECTIVE_SECONDS)

_NOT_SETTINGS: Final = ("run", "cwd", "host", "import")
_PROGRESS: Final = re.compile(r"trainer_state\.(best_|epoch$|global_step$|is_|num_input_|stateful_|total_flos$)")
_WORDS: Final = {"argv": "command", "git_commit": "commit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of the configuration that differs, with its value in each run; None if a run does not have it."""

    key: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """One number or text of the summaries of several runs; None if it is unknown in a run."""

    name: str
    values: tuple[float | str | None, ...]

    @property
    def differs(self) -> bool:
        """Return whether the runs have different values; NaN equals NaN."""
        return len({str(value) for value in self.values}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A run, or one rank of a run, with the letter by which a page refers to it."""

    letter: str
    run: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSide:
    """One side of a comparison: the numbers of its run, and its histories of SCALARS, of its rank if it names one."""

    side: Side
    detail: RunDetail
    histories: Mapping[str, History]

    def newest(self, name: str, steps: int = 1) -> float | None:
        """Return the newest value of a scalar, or the median of several steps; a speed of a run is that of its page."""
        if self.side.rank is None and steps > 1 and name in self.detail.row.speeds:
            return self.detail.row.speeds[name]
        history = self.histories.get(name)
        return float(np.median(history.value[-steps:])) if history is not None and len(history) else None

    @property
    def step(self) -> int | None:
        """Return the newest step."""
        steps = [int(history.step[-1]) for history in self.histories.values() if len(history)]
        return self.detail.row.step if self.side.rank is None else max(steps, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several sides. Each but the first has an entry in `differences`: where it differs from the first side.

    An entry is None if both sides have too many rows to be compared while a reader waits.
    """

    sides: tuple[ComparedSide, ...]
    differences: tuple[Divergence | None, ...]
    settings: tuple[Setting, ...]
    equal_settings: int


def compare(connection: Connection, sides: Sequence[Side]) -> Comparison | None:
    """Return the comparison of `sides`, or None if the store lacks a run of them."""
    with connection.pinned():
        known = {side.run: read_detail(connection, side.run) for side in sides}
        details = [detail for side in sides if (detail := known[side.run]) is not None]
        if len(details) < len(sides):
            return None
        found = tuple(
            ComparedSide(side=side, detail=detail, histories=_histories(connection, side, detail))
            for side, detail in zip(sides, details, strict=True)
        )
        first = sides[0]
        differences = tuple(
            first_difference(connection, first.run, side.run, ranks=(first.rank, side.rank)) for side in sides[1:]
        )
    settings, equal = differing_settings(details)
    return Comparison(sides=found, differences=differences, settings=settings, equal_settings=equal)


def _histories(connection: Connection, side: Side, detail: RunDetail) -> dict[str, History]:
    if side.rank is None:
        return dict(detail.histories)
    found = {name: read_chart(connection, side.run, name, side.rank) for name in SCALARS}
    return {name: history for name, history in found.items() if len(history)}


def difference(first: History, other: History) -> History:
    """Return the values of `other` minus those of `first` at the steps that both have, without superseded steps."""
    a, b = first.standing, other.standing
    _, at, behind = np.intersect1d(a.step, b.step, return_indices=True)
    with np.errstate(invalid="ignore"):
        value = b.value[behind] - a.value[at]
    return replace(b.select(behind), name=DIFFERENCE, value=value, lowest=value, highest=value)


def first_difference(
    connection: Connection, a: str, b: str, ranks: tuple[int | None, int | None] = (None, None)
) -> Divergence | None:
    """Return where the runs `a` and `b`, or one rank of each, differ by more than rounding.

    Ranges of the steps that both have are compared until one has a difference; each is eight times as long as the one
    before. The number of compared rows is that of all these ranges. The result is None after more than MOST_ROWS rows.
    """
    sides = (DiffSide(run=a, rank=ranks[0]), DiffSide(run=b, rank=ranks[1]))
    counts = [DiffSource(connection, one, DiffSelection(), between_ranks=None not in ranks).counted() for one in sides]
    common = [step for step in counts[0] if step in counts[1]]
    at, width, rows = 0, _FIRST_STEPS, 0
    while True:
        steps = common[at : at + width] or [0]
        selected = DiffSelection(steps=(steps[0], steps[-1]))
        found = divergence(connection, *sides, Tolerance(relative=ROUNDING), selected)
        rows += found.rows_compared
        if found.points or at + width >= len(common):
            return replace(found, steps_compared=len(common), steps_before=at + found.steps_before, rows_compared=rows)
        if rows > MOST_ROWS:
            return None
        at, width = at + width, width * 8


def differing_settings(details: Sequence[RunDetail]) -> tuple[tuple[Setting, ...], int]:
    """Return the keys of the configurations whose values differ between the runs, and the number of equal keys."""
    configs = [dict(_settings(one.facts.config)) for one in details]
    keys = sorted({key for config in configs for key in config})
    found = [Setting(key=key, values=tuple(config.get(key) for config in configs)) for key in keys]
    settings = tuple(one for one in found if len(set(one.values)) > 1)
    return settings, len(keys) - len(settings)


def compared_values(runs: Sequence[Summary]) -> tuple[ComparedValue, ...]:
    """Return the main values of the summaries of several runs: first STATES, which all are of interest if equal."""
    columns: dict[str, list[float | str | None]] = {
        "state": [one.detail.row.end_sentence.partition(":")[0] or one.progress.state for one in runs],
        "open incidents": [len(one.detail.row.incidents) for one in runs],
        "resolved or closed incidents": [one.incidents - len(one.detail.row.incidents) for one in runs],
        "step": [one.progress.step for one in runs],
        "planned steps": [one.progress.planned_steps for one in runs],
        "loss": [one.losses.current for one in runs],
        "lowest loss": [one.losses.lowest for one in runs],
        f"mean {'finite ' if any(one.losses.nonfinite for one in runs) else ''}loss": [one.losses.mean for one in runs],
        "rows not finite": [one.losses.nonfinite for one in runs],
        "learning rate": [one.parameters.learning_rate for one in runs],
        "gradient norm": [one.parameters.grad_norm for one in runs],
        "global batch": [one.speed.global_batch for one in runs],
        "restarts": [len(one.detail.restarts) for one in runs],
        "step seconds (median of all steps)": [one.speed.step_seconds for one in runs],
    }
    for name, how in {"GPU utilisation": "measured", "GPU utilisation (estimated)": "estimated"}.items():
        known = [one.utilization for one in runs]
        columns[name] = [one.value if one and one.words.startswith(how) else None for one in known]
    for name in sorted({one.speed.throughput.unit for one in runs if one.speed.throughput is not None}):
        found = [one.speed.throughput for one in runs]
        columns[f"{name} (median of all steps)"] = [one.median if one and one.unit == name else None for one in found]
    for name in sorted({evaluation.name for one in runs for evaluation in one.evaluations}):
        best = [{evaluation.name: evaluation for evaluation in one.evaluations}.get(name) for one in runs]
        columns[f"last {name}"] = [None if one is None else one.last for one in best]
        columns[f"best {name}"] = [None if one is None else one.best for one in best]
    for name in dict.fromkeys(metric.name for one in runs for metric in one.metrics):
        last = [{metric.name: metric.last for metric in one.metrics}.get(name) for one in runs]
        columns[f"last {name}"] = [*last]
    return tuple(ComparedValue(name=name, values=tuple(values)) for name, values in columns.items())


def _settings(config: str | None) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a configuration, without keys of the launch, the import or the progress."""
    for key, value in flat({key: value for key, value in json_object(config).items() if key not in _NOT_SETTINGS}):
        if isinstance(value, list) and key == "argv":
            value = shlex.join(map(str, value))  # noqa: PLW2901 - as a person types it
        if value is not None and not _PROGRESS.match(key):
            yield _WORDS.get(key, key), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
