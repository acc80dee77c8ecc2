"""Comparison of runs with rows made by hand: steps, attempts, ranks, tolerances, and rows of one side."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.storage.rows import table

from rankscope_storage.api.store import Batch
from rankscope_storage.diff.diff import DiffSelection, DiffSide, Divergence, Tolerance, divergence, relative_difference

A, B = DiffSide(run="a"), DiffSide(run="b")


class Rows:
    """Rows given as dicts, which are stored together before the first question."""

    def __init__(self, writer, connection) -> None:
        self.connection = connection
        self._writer = writer
        self._ordinals = itertools.count()
        self._rows: dict[str, list[dict]] = {}

    def __call__(self, run: str, dataset: str, *rows: dict) -> None:
        common = {"run": run, "attempt": 0, "rank": 0}
        self._rows.setdefault(dataset, []).extend({**common, "ordinal": next(self._ordinals), **row} for row in rows)

    def divergence(self, a: DiffSide = A, b: DiffSide = B, *tolerance: Tolerance, **options) -> Divergence:
        if tables := {dataset: table(dataset, rows) for dataset, rows in self._rows.items()}:
            self._writer.append(Batch(tables=tables, watermarks={}))
        self._rows = {}
        return divergence(self.connection, a, b, *tolerance, **options)


@pytest.fixture
def put(writer, connection):
    return Rows(writer, connection)


def stats(step: int, tensor: str = "w", norm: float | None = 1.0, **columns) -> dict:
    counts = {"nans": 0, "infs": 0, "zeros": 0, "numel": 4}
    return {"step": step, "kind": "param_after", "tensor": tensor, "norm": norm, **counts, **columns}


def test_equal_runs_have_no_difference(put):
    for run in "ab":
        put(run, "tensor_stats", *(stats(step, mean=None) for step in range(5)))
        put(run, "scalars", {"step": 1, "name": "loss", "value": math.nan})
    found = put.divergence()

    assert (None, 5, 6, ()) == (found.first, found.steps_compared, found.rows_compared, found.steps)


def test_last_attempt_of_a_step_counts_by_default(put):
    """A requeued job makes steps 3 and 4 again; what its first launch saw there went nowhere."""
    put("a", "tensor_stats", *(stats(step, norm=1.0) for step in range(5)))
    put("b", "tensor_stats", *(stats(step, norm=1.0 if step < 3 else 9.0) for step in range(5)))
    put("b", "tensor_stats", *(stats(step, norm=1.0, attempt=1) for step in (3, 4)))

    assert put.divergence().first is None
    first = put.divergence(A, DiffSide(run="b", attempt=0)).first
    assert first is not None
    assert (3, 1.0, 9.0) == (first.step, first.a, first.b)
    retried = put.divergence(DiffSide(run="b", attempt=0), DiffSide(run="b", attempt=1))
    assert (2, (0, 1, 2)) == (retried.steps_compared, retried.steps_only_in_a)


def test_mean_is_compared_on_the_scale_of_its_elements(put):
    """Four elements with norm 2 have the root mean square 1, so a mean near zero may differ by more than itself."""
    for run, mean in (("a", 1e-9), ("b", -2e-9)):
        put(run, "tensor_stats", stats(1, norm=2.0, mean=mean))
    found = put.divergence()
    (point,) = found.points

    assert ("mean", pytest.approx(3e-9)) == (point.op, point.relative)
    assert put.divergence(A, B, Tolerance(relative=1e-8)).first is None
    assert put.divergence(A, B, Tolerance(relative=1e-9)).first is not None
    assert pytest.approx(3e-9) == found.steps[0].worst


def test_small_difference_of_sums_looks_rounded(put):
    put("a", "tensor_stats", stats(1, min=0.5))
    changes = [(1.0 + 1e-6, 0.5), (1.0 + 1e-4, 0.5), (1.0 + 1e-6, 0.6)]
    for number, (norm, minimum) in enumerate(changes):
        put(f"b{number}", "tensor_stats", stats(1, norm=norm, min=minimum))

    assert [True, False, False] == [put.divergence(A, DiffSide(run=f"b{n}")).looks_rounded for n in range(3)]


def test_hashes_and_zeros_count_only_without_tolerance(put):
    for run, hash_, zeros in (("a", 5, 0), ("b", 6, 1)):
        put(run, "tensor_stats", stats(1, zeros=zeros))
        put(run, "hashes", {"step": 1, "kind": "param_after", "tensor": "w", "hash": hash_, "norm": 1.0})

    assert {"zeros", "hash"} == {point.op for point in put.divergence().points}
    assert put.divergence(A, B, Tolerance(absolute=1e-9)).first is None


def test_counts_of_nans_infs_and_elements_are_exact(put):
    put("a", "tensor_stats", stats(1))
    for op in ("nans", "infs", "numel"):
        put(op, "tensor_stats", stats(1, **{op: 1}))
        found = put.divergence(A, DiffSide(run=op), Tolerance(relative=0.9))

        assert [op] == [point.op for point in found.points]
        assert (op != "numel") == math.isnan(found.steps[0].worst)


def test_statistic_missing_on_one_side_is_no_difference(put):
    put("a", "tensor_stats", stats(1, mean=0.5, max=3.0))
    put("b", "tensor_stats", stats(1))

    assert put.divergence().first is None


def test_non_finite_values_exceed_every_tolerance(put):
    for value, other in ((math.nan, 1.0), (math.inf, 1.0), (math.inf, -math.inf), (1.0, math.nan)):
        sides = f"{value}", f"{value} or {other}"
        for run, number in zip(sides, (value, other), strict=True):
            put(run, "scalars", {"step": 1, "name": "loss", "value": number})
        a, b = (DiffSide(run=run) for run in sides)
        (point,) = put.divergence(a, b, Tolerance(relative=0.5, absolute=100.0)).points

        assert ("scalar", "loss", "value", None) == (point.kind, point.tensor, point.op, point.relative)


def test_times_are_compared_only_on_request(put):
    for run, value in (("a", 0.5), ("b", 0.6)):
        put(run, "scalars", {"step": 1, "name": "step_seconds", "value": value})
        put(run, "scalars", {"step": 1, "name": "loss", "value": 1.0})

    assert put.divergence().first is None
    assert () == put.divergence(selected=DiffSelection(kinds=("scalar",))).points
    timed = put.divergence(selected=DiffSelection(kinds=("timing",)))
    assert ["step_seconds"] == [point.tensor for point in timed.points]


@pytest.mark.parametrize(
    ("of_a", "of_b", "apart"),
    [
        ({"loss": None}, {"loss": "lm loss"}, ["loss"]),
        ({"loss": None, "train_loss": "train_loss"}, {"loss": "lm loss"}, ["loss"]),
        ({"a": "eval_a", "b": "eval_b"}, {"b": "eval_b"}, ['loss{"source_name":"eval_b"}']),
    ],
)
def test_scalars_of_one_stored_name_are_compared(put, of_a, of_b, apart):
    for run, rank, series in (("a", None, of_a), ("b", 0, of_b)):
        for source in series.values():
            labels = None if source is None else json.dumps({"source_name": source}, separators=(",", ":"))
            value = 1.0 if run == "a" else 2.0
            put(run, "scalars", {"step": 1, "rank": rank, "name": "loss", "labels": labels, "value": value})
    found = put.divergence()

    assert apart == [point.tensor for point in found.points]
    assert ((), ()) == (found.ranks_only_in_a, found.ranks_only_in_b)


def test_two_ranks_are_compared_by_their_replicated_rows(put):
    for rank in range(2):
        shared = {"rank": rank, "placement": "replica"}
        put("a", "tensor_stats", stats(1, **shared), stats(2, norm=1.0 + rank, **shared))
        put("a", "tensor_stats", stats(1, "x", 5.0 + rank, kind="act_out", rank=rank, placement="full"))
        put("a", "scalars", {"rank": rank, "step": 1, "name": "loss", "value": 1.0 + rank})
    sides = DiffSide(run="a", rank=0), DiffSide(run="a", rank=1)
    first = put.divergence(*sides).first

    assert first is not None
    assert (2, None, "norm", 1.0, 2.0) == (first.step, first.rank, first.op, first.a, first.b)
    activations = put.divergence(*sides, selected=DiffSelection(kinds=("act_out",))).first
    assert activations is not None
    assert (1, "x") == (activations.step, activations.tensor)


def test_ranks_tensors_and_steps_of_one_side_are_listed(put):
    put("a", "tensor_stats", *(stats(step, rank=rank) for step in (1, 2, 3) for rank in range(2)))
    put("b", "tensor_stats", *(stats(step) for step in (2, 3, 4)), stats(3, "new"))
    found = put.divergence()

    assert (None, 2, 2) == (found.first, found.steps_compared, found.rows_compared)
    assert ((), (("param_after", "new"),)) == (found.only_in_a, found.only_in_b)
    assert ((1,), ()) == (found.ranks_only_in_a, found.ranks_only_in_b)
    assert ((1,), (4,)) == (found.steps_only_in_a, found.steps_only_in_b)


def test_micro_batches_and_calls_of_a_tensor_are_distinguished(put):
    for run, norms in (("a", (1.0, 1.0, 1.0, 1.0)), ("b", (1.0, 1.0, 1.0, 2.0))):
        calls = zip(norms, (0, 0, 1, 1), (None, 1, None, 1), strict=True)
        put(run, "tensor_stats", *(stats(1, "w", norm, micro_step=micro, call_seq=call) for norm, micro, call in calls))
    found = put.divergence()

    assert [(1, 1)] == [(point.micro_step, point.call_seq) for point in found.points]


def test_only_selected_steps_are_compared(put):
    for run, norm in (("a", 1.0), ("b", 2.0)):
        put(run, "tensor_stats", stats(1, norm=norm), stats(2, norm=1.0), stats(3, norm=norm))
    found = put.divergence(selected=DiffSelection(steps=(2, 3)))

    assert [3] == [step.step for step in found.steps]
    assert 0.5 == found.steps[0].worst


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_relative_difference_is_relative_to_the_larger_value(a, b):
    found = relative_difference(a, b)

    assert found == relative_difference(b, a)
    assert found is not None
    assert (found == 0) == (a == b) or abs(a - b) < 1e-300
    assert found <= 2 or math.isinf(a - b)
