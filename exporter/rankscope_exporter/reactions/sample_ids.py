"""Which samples a step was made of, as the script says: kept for the last steps, so that a bad one can be found again.

Said before the forward pass of a batch, on the training thread; asked for on others. Nothing waits for a device.
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
"""Of one batch; of the others only their number is kept."""

MOST_BYTES: Final = 16_384
"""Of all ids in one event, as JSON."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The ids of one batch, as far as they are kept."""

    ids: Any
    left_out: int = 0

    @classmethod
    def of(cls, ids: Any) -> Batch:
        """Take over what the script may change afterwards; a tensor without waiting for it."""
        if isinstance(ids, torch.Tensor):
            flat = ids.detach().reshape(-1)
            return cls(Transfer.of(flat[:MOST_IDS]), max(0, flat.numel() - MOST_IDS))
        if isinstance(ids, Mapping):
            return cls(dict(ids))
        if isinstance(ids, Collection) and not isinstance(ids, str | bytes):  # an iterator is the script's to consume
            return cls(list(itertools.islice(ids, MOST_IDS)), max(0, len(ids) - MOST_IDS))
        return cls(ids)

    def read(self) -> Any:
        """Return the ids as JSON has them; waits for a copy, so it is called off the training thread."""
        try:
            ids = self.ids.wait().tolist() if isinstance(self.ids, Transfer) else self.ids
        except Exception as error:  # noqa: BLE001 - a copy from a device may fail; the event is recorded without it
            return f"a tensor that cannot be read: {type(error).__name__}"
        try:
            return json.loads(json.dumps(ids, default=_plain, allow_nan=False))
        except Exception as error:  # noqa: BLE001 - objects of the script; the event is recorded without them
            return f"a {type(ids).__name__} that JSON cannot hold: {type(error).__name__}"


Named = Mapping[int | None, list[Batch]]
"""Batches by the number of their step."""


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


class SampleIds(StepObserver):
    """Gives each batch to the step that its forward pass belongs to."""

    def __init__(self) -> None:
        self._said: list[Batch] = []  # of forward passes to come
        self._evaluated = 0  # how many of them an evaluation has passed forward meanwhile
        self._has_forward = False  # whether the step under way has one
        self._now: list[Batch] = []  # of the step under way
        self._ended: deque[tuple[int | None, list[Batch]]] = deque(maxlen=KEPT_STEPS)
        self._lock = threading.Lock()

    def say(self, ids: Any) -> None:
        """Name the samples of the batch whose forward pass comes next."""
        batch = Batch.of(ids)
        with self._lock:
            del self._said[: self._evaluated]
            self._evaluated = 0
            self._said.append(batch)
            del self._said[:-KEPT_STEPS]  # where no forward pass is seen

    def forward_begins(self) -> None:
        """What was said is about this one."""
        self._has_forward = True
        if self._said:
            self._take()

    def evaluation_begins(self) -> None:
        """What was said is about this one, and of no step; unless the same batch is trained on without a new word."""
        self._evaluated = len(self._said)

    def backward_begins(self) -> None:
        """Without a training forward, what looked like an evaluation was one, in evaluation mode."""
        if self._said and not self._has_forward:
            self._take()

    def _take(self) -> None:
        with self._lock:
            self._now += self._said
            self._said, self._evaluated = [], 0

    def step_ends(self, pending_step: PendingStep) -> None:
        """Only now the number of the step is certain: the script may have given it late."""
        with self._lock:
            self._ended.append((pending_step.step, self._now))
            self._now, self._has_forward = [], False

    def of(self, step: int | None) -> Named:
        """Return the batches of step number `step` under it; nothing where the script named none."""
        with self._lock:
            found = next((batches for number, batches in reversed(self._ended) if number == step), [])
        return {step: found} if found else {}

    def of_last(self, steps: int) -> Named:
        """Return the batches of the last steps that ended, by number, without those that have none."""
        with self._lock:
            found = list(self._ended)[-steps:] if steps > 0 else []
        return {step: batches for step, batches in found if batches}


def read(batches: Named, most_bytes: int = MOST_BYTES) -> tuple[dict[str, list[Any]], int]:
    """Return the ids by step as far as they fit an event, and how many do not. Waits for copies."""
    room = most_bytes // max(1, sum(map(len, batches.values())))
    ids: dict[str, list[Any]] = {}
    left_out = 0
    for step, of_step in batches.items():
        for batch in of_step:
            whole = batch.read()
            kept = _cut(whole, room)
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
