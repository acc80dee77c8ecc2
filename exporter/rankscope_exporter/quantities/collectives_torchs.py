"""Calls that torch makes by itself, of DDP, FSDP and the like, for `log_only`: from torch's own record, with stacks.

What the script calls through our objects stands there too and is left out here, since it was told already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankscope_contract.collectives import dtype_text
from rankscope_exporter.collectives.entries import Entry
from rankscope_exporter.collectives.flight import Raw, Report, has_groups, read_with_stacks
from rankscope_exporter.collectives.groups import ranks_by_group
from rankscope_exporter.collectives.reader import read_before
from rankscope_exporter.quantities import collectives_taps
from rankscope_exporter.quantities.activations_gaps import listed
from rankscope_exporter.quantities.collectives_log import CallLog
from rankscope_exporter.quantities.collectives_sites import Sites
from rankscope_exporter.sampling.targets import Targets

NO_PLACE: Final = "torch"
"""Stands for the place of a call that no Python code of the script leads to, as on a thread of torch's own."""


class TorchsCalls:
    """Reads what is new in torch's record since the last time, the first time all that no monitor has read."""

    def __init__(self, sites: Sites, targets: Targets) -> None:
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
        forms = f"{_forms(raw, 'input')} -> {_forms(raw, 'output')}"
        size = f" of {len(entry.ranks)} ranks" if entry.ranks else ""
        log.note_text(name, f"{forms}, group {entry.group}{size}", site)


def _is_heard(raw: Raw) -> bool:
    return any(frame["filename"] == collectives_taps.__file__ for frame in raw.get("frames", ()))


def _forms(raw: Raw, side: str) -> str:
    types: Sequence[Any] = raw.get(f"{side}_dtypes", ())
    sizes = raw.get(f"{side}_sizes", ())
    forms = [f"{dtype_text(types[min(at, len(types) - 1) :][:1])}{list(size)}" for at, size in enumerate(sizes)]
    return listed(forms) or "nothing"
