"""Bodies of the record channel for a simulated fleet: encoded once by the real encoder, then only re-dated.

Encoding is the ranks' work, and in a cluster it is spread over all hosts; here it must not take the processor from the
service. Seq, step and time of a record are eight bytes each on the wire, put there as marks and overwritten for each
answer. What is shared: a set of values serves every rank in turn, another one at each step, so neither a rank's
neighbours nor its own steps repeat it, though over a long run the same sets come back. No bytes per sample are quoted.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
from _noise import plan_of

from rankscope_contract.model.schema import WIRE_COUNT_OPS, WIRE_VALUE_OPS
from rankscope_exporter.publish.ring import encode, stream
from rankscope_exporter.records.record import Scalar, Statistics, StepRecord

_SEQ, _STEP, _TS = 0x1122334455667788, 0x2233445566778811, 0x3344556677881122
_STRIDE = 37
"""Distance between the sets that a rank uses at two successive steps. It is a prime, so that a rank uses every set."""
_NORM_NOISE = 0.04
SETS = 1000
"""Largest number of sets of values. With fewer ranks, there are as many sets as ranks."""


class Bodies:
    """Answers for any rank and any stretch of its steps."""

    def __init__(self, tensors: int, sets: int, step_microseconds: int, first_ts: int) -> None:
        self.plan = plan_of(tensors)
        self._step_microseconds = step_microseconds
        self._first_ts = first_ts
        self._records = [self._record(tensors, number) for number in range(sets)]
        self._bodies = [stream(_SEQ, [encode(record)]).to_pybytes() for record in self._records]
        self._marks = [tuple(map(body.index, map(_packed, (_SEQ, _STEP, _TS)))) for body in self._bodies]
        self._several = lru_cache(maxsize=64)(self._encoded)

    def stretch(self, rank: int, born: int, first: int, last: int) -> bytes:
        """Return records `first` to `last` of a process whose record 0 is step `born`."""
        if first != last:
            return self._several(rank % len(self._bodies), born, first, last)
        step = born + first
        number = set_of(rank, step, len(self._bodies))
        body = bytearray(self._bodies[number])
        for mark, value in zip(self._marks[number], (first, step, self._time_of(step)), strict=True):
            struct.pack_into("<q", body, mark, value)
        return bytes(body)

    def _encoded(self, rank: int, born: int, first: int, last: int) -> bytes:
        steps = range(born + first, born + last + 1)
        records = [
            replace(self._records[set_of(rank, step, len(self._bodies))], step=step, ts=self._time_of(step))
            for step in steps
        ]
        return stream(first, list(map(encode, records))).to_pybytes()

    def _time_of(self, step: int) -> int:
        return self._first_ts + step * self._step_microseconds

    def _record(self, tensors: int, number: int) -> StepRecord:
        """Return one set of values: the scale of a tensor is that of all ranks, the noise is this set's own."""
        scale = _scale(tensors)
        random = np.random.default_rng(number + 1)
        norm, most, least = (scale * np.exp(random.normal(0, sigma, tensors)) for sigma in (_NORM_NOISE, 0.08, 0.08))
        values = np.full((len(WIRE_VALUE_OPS), tensors), np.nan, np.float32)  # no rule judges: no baselines
        values[:4] = np.stack([norm, -least, most, scale * random.normal(0, 0.3, tensors)])
        counts = np.zeros((len(WIRE_COUNT_OPS), tensors), np.int64)
        counts[2] = np.where(np.arange(tensors) % 4 == 0, random.integers(100, 20_000, tensors), 0)
        counts[3] = 1024 * 1024
        numbers = pa.array(values.ravel(), from_pandas=True), pa.array(counts.ravel())
        logged = {"loss": random.normal(2, 0.1), "learning_rate": 3e-4, "grad_norm": random.normal(1, 0.1)}
        scalars = tuple(Scalar(name, float(value)) for name, value in logged.items())
        return StepRecord(ts=_TS, step=_STEP, statistics=Statistics(self.plan, *numbers), scalars=scalars)


def set_of(rank: int, step: int, sets: int) -> int:
    """Return which set of values is that of a rank's step."""
    return (rank + _STRIDE * step) % sets


def first_norms(sets: int) -> list[float]:
    """Return the first tensor's norm of each set."""
    scale = _scale(1)[0]
    return [
        float(np.float32(scale * np.exp(np.random.default_rng(number + 1).normal(0, _NORM_NOISE))))
        for number in range(sets)
    ]


def _scale(tensors: int) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(-3, 2, tensors))


def _packed(number: int) -> bytes:
    return struct.pack("<q", number)
