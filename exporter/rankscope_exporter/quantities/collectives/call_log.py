"""Log of the collectives that were called, with `log_only`: function, types, shapes, group, call stack, and how often.

Calls that torch makes by itself, of DDP, FSDP and the like, come from torch's flight record, with stacks. The record
also contains the calls of the script; they are left out, since they are logged already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rankscope_contract.diagnostics.collective_format import dtype_text
from rankscope_exporter.model.name_patterns import Targets
from rankscope_exporter.monitors.flight_recorder.entry import Entry
from rankscope_exporter.monitors.flight_recorder.poller import read_before
from rankscope_exporter.monitors.flight_recorder.torch_api import (
    Raw,
    Report,
    has_groups,
    ranks_by_group,
    read_with_stacks,
)
from rankscope_exporter.quantities.collectives import interception
from rankscope_exporter.quantities.collectives.call_sites import CallSite, CallSites
from rankscope_exporter.quantities.collectives.signatures import CallTensors, TensorPart, group_text
from rankscope_exporter.quantities.hook_handles import listed

MOST_TOLD: Final = 200
_FRAMES_SHOWN: Final = 8


class CallLog:
    """What was called, told in the order of the first calls; calls that look alike are one sentence, with their number.

    Every call is in exactly one sentence: what is called again after it was told is told again.
    """

    def __init__(self) -> None:
        self._untold: Counter[str] = Counter()
        self._known: set[str] = set()
        self._left_out = 0
        self.has_told = False

    def note(self, name: str, site: CallSite, sides: CallTensors) -> None:
        """Note a call of the script."""
        self.note_text(name, f"{_forms(sides.inputs)} -> {_forms(sides.outputs)}, {group_text(sides.group)}", site)

    def note_text(self, name: str, what: str, site: CallSite) -> None:
        """Note a call, `what` being its types, shapes and group in words."""
        text = f"{name}: {what}, called from {_stack(site)}"
        if text not in self._known and len(self._known) >= MOST_TOLD:
            self._left_out += 1
            return
        self._known.add(text)
        self._untold[text] += 1

    def tell(self, say: Callable[[str], None]) -> None:
        """Say what is new since the last time."""
        untold, self._untold = self._untold, Counter()
        self.has_told = self.has_told or bool(untold)
        for text, count in untold.items():
            say(text if count == 1 else f"{count} times {text}")
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            say(f"{left_out} calls beside these {MOST_TOLD}; targets or call_sites choose among them")


def _forms(parts: Sequence[TensorPart]) -> str:
    """Return types and shapes of one side in words."""
    forms = [f"{str(part.tensor.dtype).removeprefix('torch.')}{list(part.tensor.shape)}" for part in parts]
    return listed(forms) or "nothing"


def _stack(site: CallSite) -> str:
    shown = site.stack[-_FRAMES_SHOWN:]
    return " > ".join(shown if len(shown) == len(site.stack) else ("…", *shown)) or "no Python code"


NO_PLACE: Final = "torch"
"""Stands for the place of a call that no Python code of the script leads to, as on a thread of torch's own."""


class InternalCalls:
    """Reads what is new in torch's record since the last time, the first time all that no monitor has read."""

    def __init__(self, sites: CallSites, targets: Targets) -> None:
        self._sites = sites
        self._targets = targets
        self._after = read_before()

    def note(self, log: CallLog, report: Report) -> None:
        """Note the calls that were not heard otherwise. A recorder that cannot be read is reported and left out."""
        if not has_groups():
            return
        ranks = ranks_by_group(report)
        for recorder, raws in read_with_stacks(report).items():
            last = self._after.get(recorder, -1)
            for raw in raws:
                if int(raw["record_id"]) > last and not _is_heard(raw):
                    self._note(log, raw, ranks)
            self._after[recorder] = max(last, *(int(raw["record_id"]) for raw in raws))

    def _note(self, log: CallLog, raw: Raw, ranks: Mapping[str, tuple[int, ...]]) -> None:
        entry = Entry.of(raw, ranks)
        site = self._sites.of_record(raw.get("frames", ()), entry.call_site or NO_PLACE)
        name = f"{entry.op}@{site.label}"
        if not (site.is_chosen and self._targets.selects(name, entry.op)):
            return
        forms = f"{_call_forms(raw, 'input')} -> {_call_forms(raw, 'output')}"
        size = f" of {len(entry.ranks)} ranks" if entry.ranks else ""
        log.note_text(name, f"{forms}, group {entry.group}{size}", site)


def _is_heard(raw: Raw) -> bool:
    return any(frame["filename"] == interception.__file__ for frame in raw.get("frames", ()))


def _call_forms(raw: Raw, side: str) -> str:
    types: Sequence[Any] = raw.get(f"{side}_dtypes", ())
    sizes = raw.get(f"{side}_sizes", ())
    forms = [f"{dtype_text(types[min(at, len(types) - 1) :][:1])}{list(size)}" for at, size in enumerate(sizes)]
    return listed(forms) or "nothing"
