"""Compare two runs: state and figures, configuration, and the first step and tensor in which they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope_storage.connection import Connection
from rankscope_storage.diff.diff import ROUNDING, Divergence, Tolerance, divergence
from rankscope_storage.diff.sources import DiffSide
from rankscope_view.data.detail import RunDetail, read_detail
from rankscope_view.data.summary import Summary

MOST_ROWS: Final = 5_000_000
"""Number of stored rows of both runs up to which a page compares them; above, it names the command."""

_NOT_SETTINGS: Final = ("argv", "git_commit", "cwd", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of the configuration that differs, with its value in each run; None if a run does not have it."""

    key: str
    values: tuple[str | None, ...]

    @property
    def a(self) -> str | None:
        """Return the value in the first run."""
        return self.values[0]

    @property
    def b(self) -> str | None:
        """Return the value in the second run."""
        return self.values[1]


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
class Comparison:
    """Two runs. `divergence` is None if they have too many rows to be compared while a reader waits."""

    a: RunDetail
    b: RunDetail
    divergence: Divergence | None
    settings: tuple[Setting, ...]
    equal_settings: int


def compare(connection: Connection, a: str, b: str) -> Comparison | None:
    """Return the comparison of the runs `a` and `b`, or None if the store lacks one of them."""
    with connection.pinned():
        first, second = read_detail(connection, a), read_detail(connection, b)
        if first is None or second is None:
            return None
        found = first_difference(connection, a, b)
    settings, equal = differing_settings([first, second])
    return Comparison(a=first, b=second, divergence=found, settings=settings, equal_settings=equal)


def first_difference(connection: Connection, a: str, b: str) -> Divergence | None:
    """Return where the runs `a` and `b` differ by more than rounding, or None if they have more than MOST_ROWS."""
    rows = sum(
        sum(table["rows"].to_pylist())
        for run in (a, b)
        for table in (connection.files_table("tensor_stats", run=run), connection.files_table("scalars", run=run))
    )
    if rows > MOST_ROWS:
        return None
    return divergence(connection, DiffSide(run=a), DiffSide(run=b), Tolerance(relative=ROUNDING))


def differing_settings(details: Sequence[RunDetail]) -> tuple[tuple[Setting, ...], int]:
    """Return the keys of the configurations whose values differ between the runs, and the number of equal keys."""
    configs = [dict(_flat("", _json(one.facts.config))) for one in details]
    keys = sorted({key for config in configs for key in config})
    found = [Setting(key=key, values=tuple(config.get(key) for config in configs)) for key in keys]
    settings = tuple(one for one in found if len(set(one.values)) > 1)
    return settings, len(keys) - len(settings)


def compared_values(runs: Sequence[Summary]) -> tuple[ComparedValue, ...]:
    """Return the main numbers of the summaries of several runs."""
    columns: dict[str, list[float | str | None]] = {
        "state": [one.progress.state for one in runs],
        "step": [one.progress.step for one in runs],
        "planned steps": [one.progress.planned_steps for one in runs],
        "loss": [one.losses.current for one in runs],
        "lowest loss": [one.losses.lowest for one in runs],
        "mean loss": [one.losses.mean for one in runs],
        "rows not finite": [one.losses.nonfinite for one in runs],
        "learning rate": [one.parameters.learning_rate for one in runs],
        "gradient norm": [one.parameters.grad_norm for one in runs],
        "restarts": [len(one.detail.restarts) for one in runs],
        "incidents": [one.stored.incidents for one in runs],
        "step seconds": [one.speed.step_seconds for one in runs],
        "GPU utilisation": [None if one.utilization is None else one.utilization.value for one in runs],
    }
    for name in sorted({one.speed.throughput.unit for one in runs if one.speed.throughput is not None}):
        found = [one.speed.throughput for one in runs]
        columns[name] = [None if one is None or one.unit != name else one.median for one in found]
    for name in sorted({evaluation.name for one in runs for evaluation in one.evaluations}):
        best = [{evaluation.name: evaluation for evaluation in one.evaluations}.get(name) for one in runs]
        columns[f"last {name}"] = [None if one is None else one.last for one in best]
        columns[f"best {name}"] = [None if one is None else one.best for one in best]
    return tuple(ComparedValue(name=name, values=tuple(values)) for name, values in columns.items())


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys of nested objects as one key with dots, without keys that describe the launch."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if prefix or key not in _NOT_SETTINGS:
                yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
