"""Log of collective calls for the option `log_only`.

The log contains the function, dtypes, shapes, group, call stack and number of the calls. Calls that torch makes, for
example for DDP and FSDP, are read from torch's flight record, with their stacks. The flight record also contains the
calls of the script. They are skipped, because the quantity has already logged them.
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

MAX_NOTICES: Final = 200
_FRAMES_SHOWN: Final = 8


class CallLog:
    """Stores the collective calls since the last report, for notices to the user.

    Calls are equal if function, line, dtypes, shapes, group and the innermost 8 lines of the call stack are equal.
    Equal calls are reported in one notice with the number of calls, in the order of the first calls. Every call is
    counted in exactly one notice. If a call repeats after a report, it is reported again.
    """

    def __init__(self) -> None:
        self._new: Counter[str] = Counter()
        self._known: set[str] = set()
        self._dropped = 0
        self.has_reported = False

    def note(self, name: str, site: CallSite, sides: CallTensors) -> None:
        """Add a collective call of the script: its function and line (`name`), call site, and tensors (`sides`)."""
        self.note_text(name, f"{_forms(sides.inputs)} -> {_forms(sides.outputs)}, {group_text(sides.group)}", site)

    def note_text(self, name: str, description: str, site: CallSite) -> None:
        """Add a collective call; `description` contains its dtypes, shapes and group."""
        text = f"{name}: {description}, called from {_stack(site)}"
        if text not in self._known and len(self._known) >= MAX_NOTICES:
            self._dropped += 1
            return
        self._known.add(text)
        self._new[text] += 1

    def report(self, notice: Callable[[str], None]) -> None:
        """Call the function `notice` once with a text for each group of equal calls since the last report."""
        new, self._new = self._new, Counter()
        self.has_reported = self.has_reported or bool(new)
        for text, count in new.items():
            notice(text if count == 1 else f"{count} times {text}")
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            notice(
                f"{dropped} calls are not listed, because {MAX_NOTICES} different calls were listed before: select "
                "fewer calls with targets or call_sites"
            )


def _forms(parts: Sequence[TensorPart]) -> str:
    """Return the dtypes and shapes of inputs or outputs as text, such as "float32[2, 3]"."""
    forms = [f"{str(part.tensor.dtype).removeprefix('torch.')}{list(part.tensor.shape)}" for part in parts]
    return listed(forms) or "nothing"


def _stack(site: CallSite) -> str:
    shown = site.stack[-_FRAMES_SHOWN:]
    return " > ".join(shown if len(shown) == len(site.stack) else ("…", *shown)) or "no Python code"


NO_PLACE: Final = "torch"
"""Name of the call site of a collective if its stack has no Python code of the script, as on a thread of torch."""


class InternalCalls:
    """Reader of new collective calls in torch's flight record.

    The first read returns all calls that no monitor has read before.
    """

    def __init__(self, sites: CallSites, targets: Targets) -> None:
        self._sites = sites
        self._targets = targets
        self._after = read_before()

    def note(self, log: CallLog, report: Report) -> None:
        """Add the calls of torch in the flight record to `log`. Calls that the quantity intercepted are skipped.

        If a flight recorder of torch cannot be read, the function `report` receives a message and the recorder is
        skipped.
        """
        if not has_groups():
            return
        ranks = ranks_by_group(report)
        for recorder, raws in read_with_stacks(report).items():
            last = self._after.get(recorder, -1)
            for raw in raws:
                if int(raw["record_id"]) > last and not _is_intercepted(raw):
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


def _is_intercepted(raw: Raw) -> bool:
    return any(frame["filename"] == interception.__file__ for frame in raw.get("frames", ()))


def _call_forms(raw: Raw, side: str) -> str:
    types: Sequence[Any] = raw.get(f"{side}_dtypes", ())
    sizes = raw.get(f"{side}_sizes", ())
    forms = [f"{dtype_text(types[min(at, len(types) - 1) :][:1])}{list(size)}" for at, size in enumerate(sizes)]
    return listed(forms) or "nothing"
