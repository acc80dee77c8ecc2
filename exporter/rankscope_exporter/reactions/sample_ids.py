"""The ids of the samples of the last steps, as given by the script, so that a bad sample can be found.

The script names a batch before its forward pass, on the training thread. Other threads read the ids. Only reading waits
for a device.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankscope_exporter.records.host_transfer import Transfer
from rankscope_exporter.records.pending_step import PendingStep
from rankscope_exporter.records.step_events import StepObserver

KEPT_STEPS: Final = 64
MOST_IDS: Final = 1024
"""Largest number of ids that are kept per batch. Of further ids only the number is kept."""

MOST_BYTES: Final = 16_384
"""Largest size of all ids in one event, as JSON."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The kept ids of one batch, and the number of ids that are not kept."""

    ids: Any
    left_out: int = 0

    @classmethod
    def of(cls, ids: Any) -> Batch:
        """Return a copy of `ids`, which the script may change afterwards. Does not wait for a tensor."""
        if isinstance(ids, torch.Tensor):
            flat = ids.detach().reshape(-1)
            return cls(Transfer.of(flat[:MOST_IDS]), max(0, flat.numel() - MOST_IDS))
        if isinstance(ids, Mapping):
            return cls(dict(ids))
        if isinstance(ids, Collection) and not isinstance(ids, str | bytes):  # an iterator must not be consumed here
            return cls(list(itertools.islice(ids, MOST_IDS)), max(0, len(ids) - MOST_IDS))
        return cls(ids)

    def read(self) -> Any:
        """Return the ids as JSON values. Waits for a copy from a device: never called on the training thread."""
        try:
            ids = self.ids.wait().tolist() if isinstance(self.ids, Transfer) else self.ids
        except Exception as error:  # noqa: BLE001 - a copy from a device may fail; the event is recorded without it
            return f"a tensor that cannot be read: {type(error).__name__}"
        try:
            return json.loads(json.dumps(ids, default=_plain, allow_nan=False))
        except Exception as error:  # noqa: BLE001 - objects of the script; the event is recorded without them
            return f"a {type(ids).__name__} that JSON cannot hold: {type(error).__name__}"


BatchesByStep = Mapping[int | None, list[Batch]]
"""Batches by the number of their step."""


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


class SampleIds(StepObserver):
    """Assigns each batch to the step of its forward pass."""

    def __init__(self) -> None:
        self._coming: list[Batch] = []  # batches of the next forward passes
        self._evaluated = 0  # number of them that an evaluation has used meanwhile
        self._has_forward = False  # whether the present step has a training forward pass
        self._now: list[Batch] = []  # batches of the present step
        self._ended: deque[tuple[int | None, list[Batch]]] = deque(maxlen=KEPT_STEPS)
        self._lock = threading.Lock()

    def add(self, ids: Any) -> None:
        """Add the ids of the batch whose forward pass comes next."""
        batch = Batch.of(ids)
        with self._lock:
            del self._coming[: self._evaluated]
            self._evaluated = 0
            self._coming.append(batch)
            del self._coming[:-KEPT_STEPS]  # a limit, if no forward pass is detected

    def on_forward_begin(self) -> None:
        """Assign the named batches to the present step."""
        self._has_forward = True
        if self._coming:
            self._take()

    def on_evaluation_begin(self) -> None:
        """Mark the named batches as used by an evaluation, unless the script trains on them without naming another."""
        self._evaluated = len(self._coming)

    def on_backward_begin(self) -> None:
        """Assign the named batches if there was no training forward pass: the model trains in evaluation mode."""
        if self._coming and not self._has_forward:
            self._take()

    def _take(self) -> None:
        with self._lock:
            self._now += self._coming
            self._coming, self._evaluated = [], 0

    def on_step_end(self, pending_step: PendingStep) -> None:
        """Store the batches under the number of the step, which is final now: the script may have set it late."""
        with self._lock:
            self._ended.append((pending_step.step, self._now))
            self._now, self._has_forward = [], False

    def of(self, step: int | None) -> BatchesByStep:
        """Return the batches of step number `step`; empty if the script has named none."""
        with self._lock:
            found = next((batches for number, batches in reversed(self._ended) if number == step), [])
        return {step: found} if found else {}

    def of_last(self, steps: int) -> BatchesByStep:
        """Return the batches of the last `steps` steps that have ended, without steps that have none."""
        with self._lock:
            found = list(self._ended)[-steps:] if steps > 0 else []
        return {step: batches for step, batches in found if batches}


def read(batches: BatchesByStep, most_bytes: int = MOST_BYTES) -> tuple[dict[str, list[Any]], int]:
    """Return the ids by step, at most `most_bytes` of JSON, and the number of ids left out. Waits for copies."""
    limit = most_bytes // max(1, sum(map(len, batches.values())))
    ids: dict[str, list[Any]] = {}
    left_out = 0
    for step, items in batches.items():
        for batch in items:
            whole = batch.read()
            kept = _cut(whole, limit)
            ids.setdefault(str(step), []).append(kept)
            left_out += batch.left_out + (len(whole) - len(kept) if isinstance(whole, list) else 0)
    return ids, left_out


def _cut(ids: Any, most_bytes: int) -> Any:
    if not isinstance(ids, list):
        text = json.dumps(ids)
        return ids if len(text) <= most_bytes else text[: most_bytes // 2]
    while ids and len(json.dumps(ids)) > most_bytes:
        ids = ids[: len(ids) // 2]
    return ids
