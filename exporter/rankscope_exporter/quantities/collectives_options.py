"""What `collectives` can be told: which calls, and what of them. Checked at construction."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankscope_exporter.quantities.base import QuantityOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOptions(QuantityOptions):
    """Which calls. `targets` name them: `all_reduce` those of a function, `all_reduce@train.py[23]` those of a line."""

    inputs: bool = False
    """Also what a call is given, before it runs."""
    call_sites: tuple[str, ...] = ()
    """Regular expressions, one of which is found in the call stack; without any, all calls count."""
    most_calls: int = 64
    """Of one function at one place within a step; the others have no rows."""
    log_only: bool = False
    """Tell, for the first step (`times` steps), what is called where, and measure nothing."""

    def __post_init__(self) -> None:
        if isinstance(self.call_sites, list):
            object.__setattr__(self, "call_sites", tuple(self.call_sites))
        if self.log_only is True and self.times is None:
            object.__setattr__(self, "times", 1)
        QuantityOptions.__post_init__(self)
        for name in ("inputs", "log_only"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is true or false, not {getattr(self, name)!r}")  # noqa: TRY004 - becomes a ConfigError
        self._check_whole("most_calls", 1)
        if self.most_calls is None:
            raise ValueError("most_calls is a whole number from 1 on, not None")
        self._check_call_sites()

    def _check_call_sites(self) -> None:
        if not isinstance(self.call_sites, tuple) or not all(isinstance(item, str) for item in self.call_sites):
            raise ValueError(f"call_sites is a list of regular expressions, not {self.call_sites!r}")
        for expression in self.call_sites:
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"call_sites: {expression!r} is no regular expression: {error}") from error
