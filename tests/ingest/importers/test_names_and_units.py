"""Tests of numbers in text, and of the attempts of steps; `cases` has stored names, units and durations."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.model.scalar_names import canonical
from rankscope_ingest.importers.common.step_streams import StepStreams
from rankscope_ingest.importers.common.values import micros, number, quantity, whole


@given(st.text(max_size=40))
def test_any_text_has_a_canonical_name(name):
    alias = canonical(name)

    assert alias.name.encode() is not None
    assert alias.labels(name) is None or alias.labels(name).isprintable() or "\\" in alias.labels(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.8674", (0.8674, None)),
        ("7.5e-05", (7.5e-05, None)),
        ("1,234.5", (1234.5, None)),
        ("213.66ms", (213.66, "ms")),
        ("0.23%", (0.23, "%")),
        ("-Infinity", (-math.inf, None)),
        ("1,234", (1234.0, None)),
        ("1,234,567 tok/s", (1234567.0, "tok/s")),
        ("0,439", (0.439, None)),
        ("-12,5%", (-12.5, "%")),
        ("1,234e-05", (1.234e-05, None)),
        ("0,439,123", None),
        ("0,439.5", None),
        ("1,2,3", None),
        ("v1.2", None),
        ("1.2.3", None),
        ("2024-01-01", None),
        ("", None),
    ],
)
def test_numbers_in_text_are_read_with_their_unit(text, expected):
    assert expected == quantity(text)


@given(st.floats(allow_nan=False))
def test_any_printed_float_is_read(value):
    assert (value, None) == quantity(repr(value))


def test_numbers_steps_and_times_are_validated():
    """True is no number; a step is an integer; a time before this century is no time of a training."""
    assert [1.0, None, None, None, math.inf] == [number(value) for value in (1, True, "1", None, 10**400)]
    assert [3, 3, 12, None, None, None] == [whole(value) for value in (3, 3.0, "12", 3.5, 1e300, "12ms")]
    assert [1_700_000_000_000_000] * 4 == [micros(1_700_000_000 * 1000**power) for power in range(4)]
    assert [None, None, None] == [micros(12.5), micros(math.nan), micros("12:00")]
    assert 1_771_532_412_264_373 == micros("2026-02-19T20:20:12.264373+00:00")


def attempts(steps):
    streams = StepStreams()
    return [streams.attempt(None, step) for step in steps]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 10))
def test_rising_steps_are_one_attempt(rises, interval):
    """The intervals may differ, and records may repeat a step or have none."""
    steps, at = [], 0
    for rise in rises:
        at += interval if rise % 3 else rise
        steps += [at, None, at]

    assert {0} == set(attempts(steps))


@given(st.integers(2, 200), st.integers(1, 50), st.integers(1, 200))
def test_each_restart_adds_one_attempt(length, interval, back):
    """S0-09, S4-08: the restart may continue at any earlier step."""
    first = [interval * n for n in range(length)]
    again = [interval * n for n in range(max(0, length - 1 - back), length + 20)]

    assert [0] * len(first) + [1] * len(again) == attempts([*first, *again])


def test_streams_of_ranks_are_separate():
    """Contract 6."""
    streams = StepStreams()

    assert [0, 0, 0, 0] == [streams.attempt(rank, step) for rank, step in [(0, 5), (1, 4), (0, 6), (1, 5)]]


def _of_two_writers(order):
    """Return (writer, step, loss) in the order in which two writers appended to a log."""
    steps = [0, 0]
    for writer in order:
        steps[writer] += 1
        yield writer, 10 * steps[writer], (5.0, 9.0)[writer] - steps[writer] / 1000


def _mixed(found):
    """Return the number of records that are in an attempt of which most records are of the other writer.

    Repeated steps are not counted: they belong to the same attempt while the writers are at the same step.
    """
    mixed = 0
    for group in found:
        most, _ = Counter(writer for writer, _ in group).most_common(1)[0]
        steps = {step for writer, step in group if writer == most}
        mixed += sum(writer != most and step not in steps for writer, step in group)
    return mixed


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("burst", [1, 7, 20])
def test_two_writers_of_one_file_are_two_streams(seed, burst):
    """Lines of both writers arrive in random order, in bursts of any length; their losses differ."""
    order = random.Random(seed).sample([0, 1] * (200 // burst), k=2 * (200 // burst))
    streams, found = StepStreams(), {}
    for writer, step, loss in _of_two_writers([writer for writer in order for _ in range(burst)]):
        found.setdefault(streams.attempt(None, step, None, None, loss), []).append((writer, step))

    assert len(found) <= 3
    assert _mixed(found.values()) <= 2
    assert streams.are_interleaved


@given(st.lists(st.integers(0, 1), min_size=2, max_size=60))
def test_writers_with_ids_are_separate_streams(order):
    """A restart of a writer is another attempt of this writer only."""
    streams, found = StepStreams(), {}
    for writer, step, _ in [*_of_two_writers(order), *_of_two_writers(order)]:
        found.setdefault(streams.attempt(None, step, None, f"host-{writer}"), []).append((writer, step))

    assert 0 == _mixed(found.values())
    assert sum(1 if order.count(writer) < 2 else 2 for writer in set(order)) == len(found)
