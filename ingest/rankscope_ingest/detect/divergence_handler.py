"""What the service does about replicas that differ: an event for each tensor, one incident, and a note at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import pyarrow as pa

from rankscope_contract.diagnostics.rank_groups import ranks_text
from rankscope_contract.model.events import REPLICA_DESYNC, EventType, Severity, causal_key
from rankscope_ingest.detect.divergence_tracker import Converged, Diverged, DivergenceTracker
from rankscope_ingest.detect.incidents import IncidentTracker
from rankscope_ingest.notify.incident import Symptom
from rankscope_ingest.reporting.rows import Row, Stamp
from rankscope_ingest.reporting.service_metrics import ServiceMetrics
from rankscope_ingest.runs.models import Attempt

MOST_EVENTS: Final = 200
"""Rows per look: a model that was never synchronised is apart in every tensor."""

Said = tuple[Symptom, Sequence[Row]]


class DivergenceHandler:
    """Lives on the event loop. `add` puts an event into the batch, `urge` has all ranks of a run polled."""

    def __init__(
        self,
        book: DivergenceTracker,
        incidents: IncidentTracker,
        metrics: ServiceMetrics,
        *,
        add: Callable[[Row], None],
        stamp: Callable[[], Stamp],
        urge: Callable[[str], None],
    ) -> None:
        self._book = book
        self._incidents = incidents
        self._metrics = metrics
        self._add = add
        self._stamp = stamp
        self._poll_now = urge

    def heard(self, hashes: pa.Table | None, now: float) -> None:
        """Take the hashes of one body."""
        self._book.heard(hashes, now)

    def judge(self, attempts: Iterable[Attempt], now: float) -> None:
        """Tell what there is to tell."""
        news = self._book.look([attempt.key for attempt in attempts], now)
        for again in news.again:
            self._add(again_row(again, self._stamp()))
        for key in dict.fromkeys(item.attempt_key for item in news.apart):
            found = sorted((item for item in news.apart if item.attempt_key == key), key=_causal)
            for item in found[:MOST_EVENTS]:
                self._add(apart_row(item, self._stamp()))
                self._metrics.fired(key[0], item.rank, {(REPLICA_DESYNC, item.kind): 1})
            if key in news.opened and self._incidents.observe(_symptom(found), now) is not None:
                self._poll_now(key[0])


def apart_row(item: Diverged, stamp: Stamp) -> Row:
    """Return the event that a tensor is not the same on its replicas."""
    return _columns(item, stamp) | {
        "rank": item.rank,
        "type": EventType.ANOMALY,
        "severity": Severity.CRITICAL,
        "op": "hash",
        "value": float(len(item.ranks)),
        "message": _sentence(item),
        "details": _json(
            {
                "state": "apart",
                "replicas": item.replicas,
                "ranks": item.ranks,
                "majority": item.has_majority,
                # A 64-bit integer is more than JSON's readers hold.
                "hashes": {f"{hash_ % 2**64:016x}": ranks for hash_, ranks in item.ranks_by_hash},
            }
        ),
    }


def again_row(item: Converged, stamp: Stamp) -> Row:
    """Return the event that a tensor is the same on its replicas again."""
    return _columns(item, stamp) | {
        "type": EventType.NOTE,
        "severity": Severity.INFO,
        "message": f"{item.kind} of {item.tensor} is equal on ranks {item.replicas} again",
        "details": _json({"state": "equal", "replicas": item.replicas}),
    }


def _columns(item: Diverged | Converged, stamp: Stamp) -> Row:
    run, attempt = item.attempt_key
    names = {
        "kind": item.kind,
        "tensor": item.tensor,
        "vpp_stage": item.vpp_stage,
        "step": item.step,
        "rule": REPLICA_DESYNC,
    }
    return {**stamp.columns(), "run": run, "attempt": attempt, **names}


def _symptom(found: Sequence[Diverged]) -> Symptom:
    first = found[0]
    run, attempt = first.attempt_key
    more = f" and {len(found) - 1} more tensors" if len(found) > 1 else ""
    return Symptom(
        run=run,
        attempt=attempt,
        rank=first.rank,
        step=first.step,
        severity=Severity.CRITICAL,
        causal=_causal(first),
        events=len(found),
        rule=REPLICA_DESYNC,
        kind=first.kind,
        tensor=first.tensor,
        op="hash",
        message=_sentence(first) + more,
        ranks=None if len(first.ranks) == 1 else ranks_text(first.ranks),
    )


def _sentence(item: Diverged) -> str:
    if item.has_majority:
        _, right = item.ranks_by_hash[0]
        return f"{ranks_text(item.ranks)} disagree{'s' * (len(item.ranks) == 1)} with {ranks_text(right)}"
    return " against ".join(ranks_text(ranks) for _, ranks in item.ranks_by_hash) + ": no majority says who is right"


def _causal(item: Diverged) -> tuple[float, ...]:
    return causal_key(
        step=item.step, micro_step=None, kind=item.kind, vpp_stage=item.vpp_stage, pp_stage=None, call_id=None
    )


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
