"""Outputs and inputs of the script's collectives on two ranks, with numbers computed by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.exporter.quantities.collective_cases import cases
from tests.exporter.quantities.collective_runs import Run, given
from tests.exporter.quantities.ranks import RANKS, outcomes_of

from rankscope_exporter.quantities.collectives.interception import OPERATIONS

pytestmark = pytest.mark.timeout(400)  # the first test waits for the two ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    return outcomes_of(cases, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def runs(outcomes):
    """Return the runs of one case on both ranks."""

    def both(name: str) -> list[Run]:
        return [outcomes["sequences", rank][name] for rank in RANKS]

    return both


# Numbers.


def test_every_function_has_statistics_of_its_inputs_and_outputs(outcomes):
    for rank in RANKS:
        run, expected, _ = outcomes["functions", rank]
        for kind, tensors in expected.items():
            found = run.of(kind)

            assert set(tensors) == set(found)
            for key, tensor in tensors.items():
                exact = tensor.double()
                numbers = {"norm": exact.norm(), "min": exact.min(), "max": exact.max(), "mean": exact.mean()}
                assert {op: pytest.approx(float(value), rel=1e-6) for op, value in numbers.items()} == {
                    op: found[key][op] for op in numbers
                }, (kind, key)
                assert (tensor.numel(), 0) == (found[key]["numel"], found[key]["nans"])
        assert (0, []) == (run.faults, run.notices)


def test_every_function_supported_by_msprobe_is_supported(outcomes):
    _, expected, refused = outcomes["functions", 0]
    called = {key[0] for tensors in expected.values() for key in tensors}

    assert set(OPERATIONS) == called
    assert {} == refused


def test_rows_are_named_by_function_and_call_site(outcomes):
    run, _, _ = outcomes["functions", 1]

    place = r"\w+@tests/exporter/quantities/collective_runs\.py\[\d+\]"
    assert all(re.fullmatch(place, entry.tensor) for entry in run.entries)
    assert ((4,), "float32", None, "full") in {
        (entry.shape, entry.dtype, entry.micro_step, entry.placement) for entry in run.entries
    }


def test_calls_of_one_call_site_are_numbered_within_the_step(runs):
    for run in runs("repeated"):
        for step in (1, 2):
            sums = [step * (given(0, number) + given(1, number)).norm() for number in range(3)]
            found = run.of("comm_out", step)

            assert [("all_reduce", None, seq) for seq in (None, 1, 2)] == list(found)
            assert pytest.approx([float(norm) for norm in sums]) == [row["norm"] for row in found.values()]


@pytest.mark.parametrize(("case", "rows"), [("after the update", {1: 3, 2: 3}), ("every", {1: 6, 3: 6})])
def test_calls_of_sampled_steps_have_rows_also_after_the_update(case, rows, runs):
    for run in runs(case):
        assert rows == {step: len(found) for step, found in run.rows.items()}


def test_output_of_asynchronous_call_is_read_after_its_wait(runs):
    """A call without a wait has no row and is reported once."""
    sums = [float((given(0, number) + given(1, number)).norm()) for number in (0, 1)]
    for run in runs("asynchronous"):
        (sentence,) = run.notices

        assert [pytest.approx(sums)] * 2 == [
            [row["norm"] for row in run.of("comm_out", step).values()] for step in (1, 2)
        ]
        assert re.search(r"broadcast@.*\]: is asynchronous and has no wait\(\) within its step", sentence)


# Which calls.


def test_call_sites_select_by_the_call_stack(runs):
    norm = float((given(0, 1) + given(1, 1)).norm())
    for run in runs("call sites"):
        assert pytest.approx(norm) == run.of("comm_out")["all_reduce", None, None]["norm"]
        assert (1, []) == (len(run.rows[1]), run.notices)


def test_unmatched_target_is_reported_with_the_nearest_function(runs):
    for run in runs("targets"):
        assert [("broadcast", None, None)] == list(run.of("comm_out"))
        assert ["collectives: target 'all_gathr' matches no collective; nearest: all_reduce"] == run.notices


@pytest.mark.parametrize(
    ("case", "rows", "sentence"),
    [
        ("none", 0, "no call of the script was seen in a sampled step"),
        ("beside", 0, "on another thread than the training"),
        ("coalesced", 0, "is coalesced with other calls"),
        ("another stream", 0, "is on another stream than the training"),
        ("no such site", 0, "call_sites matches the stack of no call; the calls are all_reduce@"),
        ("most calls", 2, "called more than 2 times in a step"),
    ],
)
def test_calls_that_are_not_measured_are_reported(case, rows, sentence, runs):
    for run in runs(case):
        assert (rows, 0, 1) == (len(run.rows.get(1, ())), run.faults, len(run.notices))
        assert sentence in run.notices[0]


# The log of calls.


def test_log_only_reports_every_call_once_and_measures_nothing(runs):
    for rank, run in enumerate(runs("log only")):
        assert {} == run.rows
        assert ["all_reduce", "all_reduce", "broadcast"] == [re.findall(r": (\w+)@", text)[0] for text in run.notices]
        assert "float32[4] -> float32[4], group default_pg of 2 ranks, called from … > " in run.notices[0]
        place = r"> tests/exporter/quantities/collective_cases\.py\[\d+\] sequences.<locals>.at_places$"
        assert re.search(place, run.notices[0])
        assert re.search(r"cases\.py\[\d+\] here > tests/exporter/quantities/collective_cases\.py", run.notices[1])
        assert [": nothing -> float32[4]", ": float32[4] -> float32[4]"][rank == 0] in run.notices[2]
        assert not any(re.search(r"[ >]/\w", text) for text in run.notices)  # no folder of this machine


def test_log_only_reports_calls_of_torch_itself_in_the_first_step(outcomes):
    """Calls of DDP, and a barrier, which no quantity measures; the second step has none."""
    for rank in RANKS:
        run = outcomes["logged", rank]
        notices = [text.removeprefix("collectives: ") for text in run.notices if text.startswith("collectives: ")]
        calls = [re.match(r"(?:(\d+) times )?(\w+)@", text).groups() for text in notices]

        assert [
            ("3", "all_reduce"), (None, "all_gather"), (None, "broadcast"), (None, "broadcast"),
            (None, "all_reduce"), (None, "barrier"),
        ] == calls  # fmt: skip
        assert "float32[4] -> float32[4], group default_pg of 2 ranks, called from " in notices[0]
        assert "int64[1] -> int64[2, 1], group default_pg of 2 ranks, called from " in notices[1]  # DDP compares shapes
        assert (
            "float32[10] -> float32[10], group default_pg of 2 ranks, called from " in notices[4]
        )  # gradients, one bucket
        assert all(
            re.search(r" > tests/exporter/quantities/collective_cases\.py\[\d+\] logged$", text) for text in notices
        )
        assert (0, {}) == (run.faults, run.rows)


# Nothing else changes.


def test_training_with_its_own_reduction_is_bit_identical(outcomes):
    for rank in RANKS:
        bare, watched = outcomes["training", rank]

        assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))


@pytest.mark.parametrize("framework", ["DDP", "FSDP1", "FSDP2"])
def test_collectives_of_torch_frameworks_are_reported_and_not_measured(framework, outcomes):
    for rank in RANKS:
        run, bare = outcomes["wrapped", rank][framework]

        assert ({}, 0) == (run.rows, run.faults)
        notices = [text for text in run.notices if text.startswith("collectives: ")]
        assert ["no call of the script was seen"] == [text[13:43] for text in notices]
        assert all(torch.equal(one, other) for one, other in zip(run.parameters, bare.parameters, strict=True))


def test_failing_call_raises_the_same_error(outcomes):
    for rank in RANKS:
        bare, watched = outcomes["sequences", rank]["errors"]

        assert (3, bare) == (len(bare), watched)
        assert 0 == outcomes["sequences", rank]["failing"].faults


def test_compiled_code_has_no_graph_break_and_reduces_as_before(outcomes):
    for rank in RANKS:
        bare, seen, run = outcomes["compiled", rank]

        assert ([bare] * 3, 0, {}) == (seen, run.faults, run.rows)


def test_rank_that_sent_a_nan_is_the_first_cause_and_its_effects_follow(outcomes):
    """The rank with the cause has the input as its first kind. Both have equal numbers for the calls."""
    first, second = (outcomes["cause", rank] for rank in RANKS)
    sent, received = ("AnomalyNan", "comm_in", 5), ("AnomalyNan", "comm_out", 6)  # after rows of the parameter

    assert ([sent, received], [received]) == (first[:2], second[:1])
    assert ["grad_reduced", "param_after"] == [kind for _, kind, _ in first[2:]] == [kind for _, kind, _ in second[1:]]
