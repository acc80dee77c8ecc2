"""Statistics, step numbers and names in the files of the sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from rankscope_exporter.process.validation import Allowed, Checked, is_list, listed
from rankscope_exporter.records.record import StepRecord
from rankscope_msprobe.files.csv_layout import OPS, Squash


def _check_ops(ops: Sequence[str]) -> None:
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise ValueError(f"ops: {unknown[0]!r} is unknown; valid names are {listed(OPS, unknown[0])}")
    if len(set(ops)) < len(ops):
        raise ValueError(f"ops contains a statistic twice: {', '.join(ops)}")


Ops = Annotated[
    tuple[str, ...],
    Allowed(f"a list of some of {', '.join(OPS)}", lambda value: is_list(value) and len(value) > 0),
    Checked(_check_ops),
]
"""Type of a setting that selects the statistics to write. The sink writes them in the order of the setting."""


class Numbering:
    """The step numbers of this process in msprobe and in Rankscope.

    The first step is 0 in msprobe. In Rankscope it is 1, or 0 if a step 0 is recorded first.
    """

    def __init__(self) -> None:
        self._first: int | None = None

    def first(self, record: StepRecord) -> int:
        """Return the number in Rankscope of msprobe's step 0. The first record with a step determines this number."""
        if self._first is None:
            if record.step is None:
                return 1
            self._first = 0 if record.step == 0 else 1
        return self._first


def naming(*, squash: bool) -> Callable[[str, bool], str]:
    """Return a function that shortens a name, uniquely among parameters or, if its argument is true, modules."""
    if not squash:
        return lambda name, _is_module: name
    parameters, modules = Squash(), Squash()
    return lambda name, is_module: modules(name) if is_module else parameters(name)
