"""Answers as Prometheus streams them: frames of XOR chunks, of one series each, with their check sums. Pure.

A client takes the first series of a frame and no other, so that each has frames of its own; one that is larger than a
frame goes on in the next, under the same labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import google_crc32c
import numpy as np

from rankscope_ingest.protobuf import as_varint, field, number_field
from rankscope_ingest.remote_read.messages import label_fields
from rankscope_ingest.remote_read.xor import SAMPLES_PER_CHUNK, chunks
from rankscope_storage.prometheus.series import Series

CONTENT_TYPE: Final = "application/x-streamed-protobuf; proto=prometheus.ChunkedReadResponse"
FRAME_BYTES: Final = 1 << 20
"""A frame is closed when it has this many; Prometheus does it at the same size, and refuses to read 50 times that."""

_SAMPLES_AT_ONCE: Final = 1 << 17
_XOR: Final = 1


def frames(answers: Sequence[Sequence[Series]], frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """Yield the answer in pieces of whole frames, series after series."""
    for query, series in enumerate(answers):
        for some in _groups(series):
            encoded = iter(_chunks_of(some))
            yield b"".join(frame for one in some for frame in _frames_of(one, query, encoded, frame_bytes))


def _groups(series: Sequence[Series]) -> Iterator[list[Series]]:
    """Yield series that are encoded together: many small ones cost little more than one."""
    group: list[Series] = []
    samples = 0
    for one in series:
        group.append(one)
        samples += len(one.times_ms)
        if samples >= _SAMPLES_AT_ONCE:
            yield group
            group, samples = [], 0
    if group:
        yield group


def _chunks_of(series: Sequence[Series]) -> list[bytes]:
    times = np.concatenate([one.times_ms for one in series])
    values = np.concatenate([one.values for one in series])
    ends = np.cumsum([0, *(len(one.times_ms) for one in series)])
    starts = [np.arange(first, end, SAMPLES_PER_CHUNK) for first, end in itertools.pairwise(ends)]
    return chunks(times, values, np.concatenate(starts).astype(np.int64)) if len(times) else []


def _frames_of(series: Series, query: int, encoded: Iterator[bytes], frame_bytes: int) -> Iterator[bytes]:
    labels = label_fields(series)
    message = bytearray(labels)
    for first in range(0, len(series.times_ms), SAMPLES_PER_CHUNK):
        last = min(first + SAMPLES_PER_CHUNK, len(series.times_ms)) - 1
        message += field(2, _chunk(int(series.times_ms[first]), int(series.times_ms[last]), next(encoded)))
        if len(message) >= frame_bytes and last < len(series.times_ms) - 1:
            yield _frame(bytes(message), query)
            message = bytearray(labels)
    yield _frame(bytes(message), query)


def _chunk(first_ms: int, last_ms: int, data: bytes) -> bytes:
    return number_field(1, first_ms) + number_field(2, last_ms) + number_field(3, _XOR) + field(4, data)


def _frame(chunked_series: bytes, query: int) -> bytes:
    message = field(1, chunked_series) + (number_field(2, query) if query else b"")
    check_sum: int = google_crc32c.value(message)
    return as_varint(len(message)) + check_sum.to_bytes(4, "big") + message
