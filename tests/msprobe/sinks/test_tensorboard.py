"""Event files for TensorBoard, and the rows that code in the training process can read."""

import math
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.exporter.publish.sinks.records import ABSENT, FINITE, entry, identity, record
from torch import nn

from rankscope_contract.model.kinds import Kind
from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.publish.sinks import event_file
from rankscope_exporter.publish.sinks.memory import Api, ApiOptions
from rankscope_exporter.records.record import Scalar
from rankscope_msprobe.sinks.tensorboard import TensorBoard, TensorBoardOptions
from rankscope_storage.tensorboard.tags import TensorTag, tensor_tag


def sink(folder: Path, rank: int = 0, **options: Any) -> TensorBoard:
    return TensorBoard(TensorBoardOptions(folder=str(folder), **options), identity(rank))


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of every tag of one family, as TensorBoard reads them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tags_of_statistics_are_those_of_msprobes_manual(tmp_path):
    written = sink(tmp_path, rank=2)
    for step in (1, 2):
        rows = (
            (entry("m", Kind.ACT_IN, index=1, micro_step=3, vpp_stage=1), FINITE),
            (entry("m", Kind.ACT_GRAD_OUT, micro_step=0), FINITE),
            (entry("w", Kind.GRAD_REDUCED), FINITE | {"norm": step / 4}),
            (entry("w", Kind.EXP_AVG), FINITE),
        )
        feature = {"kind": "stable_rank", "module": "head", "index": None, "value": 2.5}
        written.put(record(step, *rows, features=(feature,)))
    found = {path.name: read(path) for path in (tmp_path / "rank2").iterdir()}

    assert {"actv", "actv_grad", "exp_avg", "grad_reduced", "linear_hook"} == found.keys()
    ops = ("norm", "min", "max", "mean", "nans", "zeros")
    assert {f"0:w/rank2/grad_reduced_{op}" for op in ops} == found["grad_reduced"].keys()
    assert {f"0:m.output:0/rank2/actv_grad_{op}" for op in ops} == found["actv_grad"].keys()
    assert [(0, 0.25), (1, 0.5)] == found["grad_reduced"]["0:w/rank2/grad_reduced_norm"]
    assert [(0, 5.0), (1, 5.0)] == found["actv"]["1:m.input_1:3/rank2/actv_norm"]
    assert [1, 2] == [step for step, _ in found["exp_avg"]["0:w/rank2/exp_avg_norm"]]
    assert {"0:head.linear/rank2/linear_hook_sr": [(0, 2.5), (1, 2.5)]} == found["linear_hook"]


@pytest.mark.parametrize("kind", [*Kind])
def test_live_tags_equal_those_of_an_export(tmp_path, kind):
    index = 1 if kind.startswith("act") else None
    named = entry("a/b:1%", kind, index=index, micro_step=2, vpp_stage=3)
    sink(tmp_path, rank=4, ops=("max",)).put(record(5, (named, FINITE)))
    parts = {"kind": kind, "tensor": "a/b:1%", "index": index, "micro_step": 2, "vpp_stage": 3}

    (folder,) = (tmp_path / "rank4").iterdir()
    assert {tensor_tag(TensorTag(op="max", rank=4, **parts))} == read(folder).keys()


def test_scalars_have_their_names_and_labels_as_tags(tmp_path):
    written = sink(tmp_path, rank=1)
    for step, loss in ((1, 2.5), (2, math.inf)):
        rates = [Scalar("learning_rate", step / 4, labels={"group": group}) for group in "ab"]
        written.put(record(step, scalars=(Scalar("loss", loss), *rates)))
    written.put(record(2, scalars=(Scalar("loss", 1.5),), micro_step=1))

    assert {
        "loss": [(0, 2.5), (1, math.inf)],
        "loss:1": [(1, 1.5)],
        "learning_rate/group=a": [(0, 0.25), (1, 0.5)],
        "learning_rate/group=b": [(0, 0.25), (1, 0.5)],
    } == read(tmp_path / "rank1")


@pytest.mark.parametrize(("below", "above"), [(0, 0), (7, 0), (7, 8)])
def test_histograms_are_read_by_tensorboard(tmp_path, below, above):
    bins = [(-0.5, 1), (0.0, 2), (0.5, 0), (1.0, 4)]
    bins = [*([(-1.0, below)] if below else []), *bins, *([(1.5, above)] if above else [])]
    limits, counts = (list(column) for column in zip(*bins, strict=True))
    written = sink(tmp_path, rank=1)
    for step in (1, 2):
        row = {"tensor": "layers.0.w", "scheme": "linear:-1:1:4", "counts": [1, 2, 0, 4], "nonfinite": 3}
        kinds = ("adam_update", "adam_ratio")
        written.put(record(step, histograms=tuple({**row, "kind": k, "below": below, "above": above} for k in kinds)))
    accumulator = EventAccumulator(str(tmp_path / "rank1" / "adam_update"), size_guidance={"histograms": 0})
    accumulator.Reload()
    first, second = accumulator.Histograms("0:layers.0.w/rank1/adam_update")

    assert (0, 1) == (first.step, second.step)
    found = first.histogram_value
    assert (limits, counts) == (list(found.bucket_limit), list(found.bucket))
    assert (limits[0] - 0.5, limits[-1], sum(counts)) == (found.min, found.max, found.num)
    centers = [(limit - 0.25, count) for limit, count in bins]
    assert sum(center * count for center, count in centers) == found.sum
    assert sum(center**2 * count for center, count in centers) == found.sum_squares
    assert ["adam_ratio", "adam_update"] == sorted(path.name for path in (tmp_path / "rank1").iterdir())


def test_histogram_with_other_bins_is_omitted(tmp_path):
    row = {"kind": "k", "tensor": "w", "scheme": "log:1:10:2", "below": 0, "above": 0, "counts": [1, 2]}
    sink(tmp_path).put(record(1, histograms=(row,)))

    assert [] == list(tmp_path.iterdir())


def test_nan_inf_and_absent_are_distinguished(tmp_path):
    written = sink(tmp_path, ops=("norm",))
    for step, numbers in enumerate(({"nans": 1}, {"infs": 1}, None, {"norm": 3e38}), 1):
        written.put(record(step, (entry(), ABSENT if numbers is None else FINITE | numbers)))

    (first, second, last) = read(tmp_path / "rank0" / "grad_reduced")["0:w/rank0/grad_reduced_norm"]
    assert (0, True) == (first[0], math.isnan(first[1]))
    assert (1, math.inf) == second
    assert (3, pytest.approx(3e38)) == last


def test_resumed_process_replaces_later_steps_in_tensorboard(tmp_path):
    """After three steps, a process resumes from the second: TensorBoard shows each step once."""
    for seconds, steps in ((100, (1, 2, 3)), (200, (2, 3))):
        written = sink(tmp_path, ops=("norm",))
        written._file = f"events.out.tfevents.{seconds:010d}.x"
        for step in steps:
            written.put(record(step, (entry(), FINITE | {"norm": float(seconds)})))

    points = read(tmp_path / "rank0" / "grad_reduced")["0:w/rank0/grad_reduced_norm"]
    assert [(0, 100.0), (1, 200.0), (2, 200.0)] == points


@given(st.binary(max_size=300))
def test_own_crc32c_equals_the_library(data):
    """The exporter uses its own function if the library is not installed."""
    assert google_crc32c.value(data) == event_file.crc32c(data)


@given(st.floats() | st.integers())
def test_numbers_out_of_float32_range_are_clamped(number):
    (written,) = struct.unpack("<f", event_file.number_bytes(number))

    assert math.isnan(written) == (number != number)  # noqa: PLR0124 - the definition of NaN, for integers too
    assert math.isinf(written) == (number in (math.inf, -math.inf))


def api(steps: int = 8) -> Api:
    return Api(ApiOptions(steps=steps), identity())


def test_rows_are_those_of_the_last_step_with_the_kind():
    kept = api()
    kept.put(record(1, (entry("w"), FINITE), (entry("w", "param_after"), FINITE)))
    nothing_finite = FINITE | dict.fromkeys(("norm", "min", "max", "mean")) | {"nans": 4}
    kept.put(record(2, (entry("w"), nothing_finite), (entry("w", "param_after"), ABSENT)))
    (row,) = kept.rows("grad_reduced")

    assert (2, "w", None, 4) == (row.step, row.entry.tensor, row.numbers["norm"], row.numbers["nans"])
    assert [1] == [row.step for row in kept.rows("param_after")]
    assert [1, 1] == [row.step for row in kept.rows(step=1)]
    assert () == kept.rows("exp_avg")


def test_at_most_the_configured_number_of_steps_is_kept():
    kept = api(steps=2)
    feature = {"kind": "stable_rank", "module": "head", "index": None, "value": 2.0}
    for step in range(1, 6):
        kept.put(record(step, (entry(), FINITE), features=(feature,)))
        kept.put(record(step))  # a later record of the same step has no rows

    assert (4, 5) == kept.steps()
    assert () == kept.rows(step=3)
    assert [2.0] == [row["value"] for row in kept.features("stable_rank")]
    assert () == kept.features("softmax_max")


def test_training_code_reads_gradients_from_the_sink(eventually):
    """The rows equal those of the record, which is also sent through the record channel."""
    config = MonitorConfig(console=False, exit_wait_seconds=60, sinks={"api": {"steps": 2}})
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(config).attach(net, optimizer) as monitor:
        assert monitor.sink("csv") is None
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        sink = monitor.sink("api")
        assert isinstance(sink, Api)
        rows = eventually(lambda: sink.rows("grad_reduced", step=2), 60)

    expected = {"weight": pytest.approx(4.0 * 6**0.5), "bias": pytest.approx(4.0 * 2**0.5)}
    assert expected == {row.entry.tensor: row.numbers["norm"] for row in rows}
    assert (2, 3) == sink.steps(), "it may still be asked after detaching, and the last step is there"
