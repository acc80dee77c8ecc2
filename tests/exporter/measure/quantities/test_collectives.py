"""Collectives of the script on two ranks, with numbers computed by hand, and the replacements of torch's functions."""

import copy
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.measure.quantities.collective_cases import cases, given
from tests.exporter.parts import config_of, small, train
from tests.exporter.ranks import RANKS, outcomes_of

from rankscope_exporter import Monitor
from rankscope_exporter.measure.quantities.collectives.interception import OPERATIONS

pytestmark = pytest.mark.timeout(400)  # the first test waits for the two ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    return outcomes_of(cases, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def runs(outcomes):
    return lambda name: [outcomes["sequences", rank][name] for rank in RANKS]


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

    place = r"\w+@tests/exporter/measure/quantities/collective_cases\.py\[\d+\]"
    assert all(re.fullmatch(place, entry.tensor) for entry in run.entries)
    found = {(entry.shape, entry.dtype, entry.micro_step, entry.placement) for entry in run.entries}
    assert ((4,), "float32", None, "full") in found


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
        place = r"> tests/exporter/measure/quantities/collective_cases\.py\[\d+\] sequences.<locals>.at_places$"
        assert re.search(place, run.notices[0])
        assert re.search(
            r"cases\.py\[\d+\] here > tests/exporter/measure/quantities/collective_cases\.py", run.notices[1]
        )
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
        assert "float32[10] -> float32[10], group default_pg of 2 ranks, called from " in notices[4]  # one bucket
        place = r" > tests/exporter/measure/quantities/collective_cases\.py\[\d+\] logged$"
        assert all(re.search(place, text) for text in notices)
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


NAMES = ("all_reduce", "isend", "irecv", "batch_isend_irecv", "all_to_all_single")


@pytest.fixture
def originals():
    found = {name: getattr(dist, name) for name in NAMES}
    waits = vars(dist.Work)["wait"]
    yield found
    for name, function in found.items():
        assert getattr(dist, name) is function, name
    assert vars(dist.Work)["wait"] is waits


def attached(**options: Any) -> tuple[Monitor, Callable[[], None]]:
    net, optimizer = small()
    monitor = Monitor(config_of("collectives", options={"collectives": options})).attach(net, optimizer)
    return monitor, functools.partial(train, net, optimizer)


def stands() -> list[str]:
    return [name for name in NAMES if type(getattr(dist, name)).__name__ == "_FunctionInterception"]


def test_detach_restores_every_function(originals):
    """The end of the last sampled step restores them, too."""
    monitor, step = attached(times=1)
    intercepted = stands()
    step()
    step()
    after = stands()
    monitor.detach()
    other, _ = attached()
    other.detach()

    assert (list(NAMES), [], []) == (intercepted, after, stands())


def test_switching_off_restores_functions_and_switching_on_intercepts(originals):
    monitor, step = attached()
    found = []
    for on in (False, True):
        step()
        monitor.switch(on=on)
        step()
        found.append(stands())
    monitor.detach()

    assert [[], list(NAMES)] == found


@pytest.mark.parametrize("first", [0, 1])
def test_second_monitor_still_intercepts_after_the_first_detaches(first, originals):
    monitors = [attached()[0], attached()[0]]
    monitors[first].detach()
    between = stands()
    monitors[1 - first].detach()

    assert list(NAMES) == between


def test_wrapper_on_top_remains_and_the_interception_forwards_calls(monkeypatch):
    original, calls = dist.all_reduce, []
    monitor, _ = attached()
    below = dist.all_reduce

    def foreign(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return below(*args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", foreign)
    monitor.detach()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(torch.ones(1))

    assert (foreign, 1) == (dist.all_reduce, len(calls))
    monkeypatch.undo()  # the previous function was ours, which forwards calls
    dist.all_reduce = original


def test_wrapper_between_two_interceptions_is_called_once_and_remains(originals, monkeypatch):
    """The other wrapper has copied the attributes of ours, as functools.wraps does."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_: calls.append("original"))
    first, _ = attached()
    below = dist.all_reduce

    @functools.wraps(below)
    def foreign(*args: Any) -> Any:
        calls.append("foreign")
        return below(*args)

    monkeypatch.setattr(dist, "all_reduce", foreign)
    second, _ = attached()
    first.detach()
    dist.all_reduce(torch.ones(1))
    second.detach()

    assert (["foreign", "original"], foreign) == (calls, dist.all_reduce)
    monkeypatch.undo()


def test_earlier_replacement_is_called_and_restored(monkeypatch):
    calls: list[Any] = []
    earlier = calls.append
    monkeypatch.setattr(dist, "all_reduce", earlier)
    monitor, step = attached()
    step()
    dist.all_reduce("x")
    monitor.detach()

    assert (["x"], earlier) == (calls, dist.all_reduce)


def test_stored_copied_or_pickled_function_is_the_original(originals):
    monitor, _ = attached()
    kept = dist.isend
    sent = pickle.loads(pickle.dumps(kept))
    copied = copy.deepcopy({"send": kept})["send"]
    equal = kept == originals["isend"], hash(kept) == hash(originals["isend"])  # as P2POp asks
    monitor.detach()

    assert (True, True) == equal
    assert sent is copied is originals["isend"]
    assert ("isend", originals["isend"].__doc__) == (kept.__name__, kept.__doc__)
