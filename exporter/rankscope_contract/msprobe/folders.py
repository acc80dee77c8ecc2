"""Which folder of the existing tool's output is continued: `append_output`, two times between which it was begun."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence

from rankscope_contract.msprobe.csv_layout import parse_folder, parse_time

Window = tuple[dt.datetime, dt.datetime]


def window(times: Sequence[str]) -> Window:
    """Return the window that two times such as `Dec03_21-34-40` span. Raises ValueError."""
    if len(times) != 2:
        raise ValueError(f"append_output is two times of folders, such as Dec03_21-34-40, not {list(times)!r}")
    return _moment(times[0]), _moment(times[1])


def continued(names: Iterable[str], rank: int, begun: Window) -> str | None:
    """Return which of `names` is the folder of `rank` that was begun last within the closed window.

    Names have no year: a window whose end is before its beginning spans the turn of one.
    """
    first, last = begun
    fitting = []
    for name in sorted(names):
        named = parse_folder(name)
        if named is None or named.rank != rank or named.time is None:
            continue
        inside = first <= named.time <= last if first <= last else named.time >= first or named.time <= last
        if inside:
            fitting.append(((named.time < first, named.time), name))
    return max(fitting)[1] if fitting else None


def _moment(text: str) -> dt.datetime:
    moment = parse_time(text) if isinstance(text, str) else None
    if moment is None:
        raise ValueError(f"append_output {text!r} is no time of a folder: write it as in Dec03_21-34-40")
    return moment
