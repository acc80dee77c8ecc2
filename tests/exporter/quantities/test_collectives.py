"""Outputs and inputs of the script's collectives on two ranks, with numbers computed by hand."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from tests.exporter.quantities.collective_cases import CASES, work
from tests.exporter.quantities.collective_runs import WORLD, Run, given
from tests.programs import warm_processes

from rankscope_exporter import ConfigError, MonitorConfig
from rankscope_exporter.quantities.collectives.interception import OPERATIONS

pytestmark = pytest.mark.timeout(400)  # the first test waits for the two ranks

RANKS = range(WORLD)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """Run all cases in one pair of processes."""
    context = warm_processes()
    results = context.Queue()
    store = str(tmp_path_factory.mktemp("collectives") / "store")
    workers = [context.Process(target=work, args=(rank, store, results), daemon=True) for rank in RANKS]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=180) for _ in range(WORLD * len(CASES))]
    for worker in workers:
        worker.join(60)

    assert [0] * WORLD == [worker.exitcode for worker in workers]
    return {(case, rank): pickle.loads(outcome) for case, rank, outcome in found}


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

    assert all(re.fullmatch(r"\w+@tests/exporter/quantities/collective_runs\.py\[\d+\]", name) for name in run.names)
    assert {((4,), "float32", None, "full")} <= run.attributes


def test_calls_of_one_call_site_are_numbered_within_the_step(runs):
    for run in runs("repeated"):
        for step in (1, 2):
            sums = [step * (given(0, number) + given(1, number)).norm() for number in range(3)]
            found = run.of("comm_out", step)

            assert [("all_reduce", None, seq) for seq in (None, 1, 2)] == list(found)
            assert pytest.approx([float(norm) for norm in sums]) == [row["norm"] for row in found.values()]


def test_calls_after_the_update_belong_to_the_step(runs):
    for run in runs("after the update"):
        assert {1: 3, 2: 3} == {step: len(rows) for step, rows in run.rows.items()}


def test_only_sampled_steps_have_rows_of_collectives(runs):
    for run in runs("every"):
        assert {1: 6, 3: 6} == {step: len(rows) for step, rows in run.rows.items()}


def test_output_of_asynchronous_call_is_read_after_its_wait(runs):
    sums = [float((given(0, number) + given(1, number)).norm()) for number in (0, 1)]
    for run in runs("asynchronous"):
        for step in (1, 2):
            assert pytest.approx(sums) == [row["norm"] for row in run.of("comm_out", step).values()]


def test_call_without_wait_has_no_row_and_is_reported_once(runs):
    for run in runs("asynchronous"):
        (sentence,) = run.notices

        assert re.search(r"broadcast@.*\]: is asynchronous and has no wait\(\) within its step", sentence)


# Which calls.


def test_call_sites_select_by_the_call_stack(runs):
    for run in runs("call sites"):
        assert (
            pytest.approx(float((given(0, 1) + given(1, 1)).norm()))
            == run.of("comm_out")["all_reduce", None, None]["norm"]
        )
        assert (1, []) == (len(run.rows[1]), run.notices)


def test_unmatched_call_sites_are_reported_with_the_existing_calls(runs):
    for run in runs("no such site"):
        (sentence,) = run.notices

        assert "call_sites matches the stack of no call; the calls are all_reduce@" in sentence
        assert {} == run.rows


def test_unmatched_target_is_reported_with_the_nearest_function(runs):
    for run in runs("targets"):
        assert [("broadcast", None, None)] == list(run.of("comm_out"))
        assert ["collectives: target 'all_gathr' matches no collective; nearest: all_reduce"] == run.notices


def test_rows_per_step_are_limited_by_most_calls(runs):
    for run in runs("most calls"):
        (sentence,) = run.notices

        assert 2 == len(run.rows[1])
        assert "called more than 2 times in a step" in sentence


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("none", "no call of the script was seen in a sampled step"),
        ("beside", "on another thread than the training"),
        ("coalesced", "is coalesced with other calls"),
        ("another stream", "is on another stream than the training"),
    ],
)
def test_calls_that_are_not_measured_are_reported(case, sentence, runs):
    for run in runs(case):
        assert ({}, 0, 1) == (run.rows, run.faults, len(run.notices))
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


def test_rank_that_sent_a_nan_is_the_first_cause(runs):
    first, second = runs("spoiled")

    assert [("anomaly", "AnomalyNan", "comm_in", 0), ("anomaly", "AnomalyNan", "comm_out", 1)] == first.events
    assert [("anomaly", "AnomalyNan", "comm_out", 1)] == second.events


def test_effects_of_a_nan_input_are_ordered_after_it(outcomes):
    """The rank with the cause has the input as its first kind."""
    assert ["comm_in", "comm_out", "grad_reduced", "param_after"] == outcomes["cause", 0]
    assert ["comm_out", "grad_reduced", "param_after"] == outcomes["cause", 1]


# Invalid options.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"call_sites": ["("]}, "call_sites: '\\(' is not a regular expression"),
        ({"call_sites": "train"}, "call_sites must be a list of regular expressions"),
        ({"inputs": 1}, "inputs must be true or false"),
        ({"log_only": "yes"}, "log_only must be true or false"),
        ({"most_calls": 0}, "most_calls must be a whole number of at least 1"),
        ({"most_calls": None}, "most_calls must be a whole number of at least 1"),
        ({"input": True}, "Did you mean options.collectives.inputs"),
    ],
)
def test_invalid_options_are_rejected(options, words):
    with pytest.raises(ConfigError, match=words):
        MonitorConfig(quantities=("collectives",), options={"collectives": options})
