"""Event files, read back by TensorBoard itself."""

import math
import random
import struct

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data.provider import RunTagFilter
from tests.storage.formats.conftest import read_events, row, scalar, tensor

from rankscope_storage.base.errors import ExportError
from rankscope_storage.formats.tensorboard import SIZE_RATIO, SMALL_BYTES, THINNED
from rankscope_storage.tensorboard.tags import parse_tensor_tag, parse_tree_tag


def test_scalar_tags_are_name_and_labels(shelf):
    """Series with equal names get different tags."""
    losses = [scalar(1, 2.5), scalar(2, math.nan), scalar(3, math.inf)]
    rates = [scalar(1, 0.1, "learning_rate", labels=f'{{"group":"{group}"}}') for group in "ab"]
    alike = [scalar(1, 1.0, "a/k=v"), *(scalar(1, 2.0, "a", labels='{"k":"v"}', unit=unit) for unit in (None, "s"))]
    shelf.put(scalars=losses + rates + alike)
    target, _ = shelf.export("tensorboard")
    found = read_events(target / "rank0")

    assert repr([(1, 2.5), (2, math.nan), (3, math.inf)]) == repr(found["loss"])
    assert [(1, struct.unpack("f", struct.pack("f", 0.1))[0])] == found["learning_rate/group=a"]
    assert {"loss", "learning_rate/group=a", "learning_rate/group=b"} <= set(found)
    assert [1.0, 2.0, 2.0] == sorted(points[0][1] for tag, points in found.items() if tag.startswith("a/"))


def test_histograms_are_those_of_the_store(shelf):
    """TensorBoard shows the histograms of Adam's update on its page of histograms and distributions."""
    known = {"kind": "adam_update", "tensor": "w", "scheme": "linear:-1.0:1.0:4", "rank": 0, "nonfinite": 0}
    first = row(step=1, counts=[1, 2, 3, 4], below=5, above=0, **known)
    second = row(step=2, counts=[0, 9, 0, 1], below=0, above=2, **known)
    shelf.put(histograms=[first, second, second | {"counts": [1], "above": 0, "scheme": "log2"}])
    target, report = shelf.export("tensorboard")
    accumulator = EventAccumulator(str(target / "rank0"), size_guidance={"histograms": 0})
    accumulator.Reload()
    before, after = (one.histogram_value for one in accumulator.Histograms("0:w/rank0/adam_update"))

    assert [-1.0, -0.5, 0.0, 0.5, 1.0] == list(before.bucket_limit)
    assert [5.0, 1.0, 2.0, 3.0, 4.0] == list(before.bucket)
    assert (-1.5, 1.0, 15.0) == (before.min, before.max, before.num)
    assert [0.0, 9.0, 0.0, 1.0, 2.0] == list(after.bucket)
    assert {"histograms without linear bins": 1} == report.omitted


def test_tensorboard_shows_a_run_per_rank_and_attempt(shelf):
    """As its web page gets them: through the data provider, with times."""
    shelf.put(scalars=[scalar(1, 2.0), scalar(1, 3.0, attempt=1), scalar(1, 4.0, rank=1), scalar(1, 5.0, rank=None)])
    target, _ = shelf.export("tensorboard")
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(target))
    multiplexer.Reload()
    scalars = MultiplexerDataProvider(multiplexer, str(target)).read_scalars(
        RequestContext(), experiment_id="", plugin_name="scalars", run_tag_filter=RunTagFilter(), downsample=100
    )

    assert {"rank0": 2.0, "rank0-attempt1": 3.0, "rank1": 4.0, "run": 5.0} == {
        run: tags["loss"][0].value for run, tags in scalars.items()
    }
    assert 1772366401.0 == scalars["rank0"]["loss"][0].wall_time


def test_omitted_rows_are_counted(shelf):
    shelf.put(
        scalars=[scalar(1, None), scalar(None, 1.0), scalar(1, 1.0)],
        tensor_stats=[tensor(1, norm=None)],
        events=[row(type="note")],
    )
    _, report = shelf.export("tensorboard")

    assert {
        "rows without a step": 1,
        "events: not in event files": 1,
        "values that are null": 1,
        "tensors without any statistic": 1,
    } == report.omitted


def test_refused_export_leaves_nothing(shelf):
    """Nothing is selected, the folder cannot be created, or it has event files of another export."""
    shelf.put(scalars=[scalar(1, 1.0)])
    (shelf.folder / "file").write_text("")
    for target, options, said in (
        ("out", {"ranks": (7,)}, "no rows of tensor_stats, scalars"),
        ("file/out", {}, r"cannot write to .*file/out"),
    ):
        with pytest.raises(ExportError, match=said):
            shelf.export("tensorboard", target, **options)
        assert {"store", "file"} == {path.name for path in shelf.folder.iterdir()}
    shelf.export("tensorboard")
    with pytest.raises(ExportError, match="already contains event files"):
        shelf.export("tensorboard")


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("0:0.input:0/rank0/actv_norm", ("act_in", "0", "norm", 0, 0)),
        ("1:layers.1.mlp.output:2/rank3/actv_grad_min", ("act_grad_out", "layers.1.mlp", "min", 3, 2)),
        ("0:layer.weight/rank0/post_grad_norm", ("grad_reduced", "layer.weight", "norm", 0, None)),
        ("0:layer.weight/rank0/pre_grad_mean", ("grad_unreduced", "layer.weight", "mean", 0, None)),
        ("0:layer.weight:1/rank0/acc_grad_max", ("grad_unreduced", "layer.weight", "max", 0, 1)),
        ("0:w/0/exp_avg_sq_norm", ("exp_avg_sq", "w", "norm", 0, None)),
        ("0:w.in:0/1/actv_norm", ("act_in", "w", "norm", 1, 0)),
    ],
)
def test_msprobes_tags_are_parsed(tag, expected):
    found = parse_tensor_tag(tag)

    assert expected == (found.kind, found.tensor, found.op, found.rank, found.micro_step)


def test_tags_of_msprobes_conversion_are_parsed():
    """`rank0/grad_reduced/` with tags `vp0:name[:micro1]/norm`; for calls as the live sink writes them."""
    found = parse_tree_tag("vp1:layers.0.input:micro2/norm", "actv", 4)
    call = parse_tree_tag("vp0:all_gather@a/b.py[4].call_2_1/norm", "comm_out", 0)

    assert ("act_in", "layers.0", 4, 1, 2) == (found.kind, found.tensor, found.rank, found.vpp_stage, found.micro_step)
    assert ("comm_out", "all_gather@a/b.py[4]", 2, 1) == (call.kind, call.tensor, call.call_seq, call.index)
    assert "w" == parse_tree_tag("vp0:w/norm", "exp_avg", 0).tensor
    assert parse_tree_tag("vp0:w/norm", "other_folder", 0) is None


def test_other_tags_are_scalars():
    others = ["loss", "train/loss", "0:w/rank0/loss", "0:w/rank0/actv_norm", "w/rank0/exp_avg_norm"]

    assert [None] * 5 == [*map(parse_tensor_tag, others)]


# --- the size of event files, and the points that they keep


STEPS, SPIKE, BROKEN = 120, 57, 90
OPS = ("norm", "min", "max", "mean", "nans", "infs", "zeros", "numel", "norm_baseline", "mean_baseline")
NAMES = [f"model.layers.{place}.self_attention.weight" for place in range(1_000)]


def read_points(folder):
    return {tag: dict(points) for tag, points in read_events(folder / "rank0").items()}


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tensors(count, steps=STEPS):
    """Return rows of tensors, of which the first has a spike at one step and a NaN at another."""
    numbers, rows = random.Random(1), []
    for step in range(1, steps + 1):
        for name in NAMES[:count]:
            norm = 100.0 if (step, name) == (SPIKE, NAMES[0]) else round(numbers.uniform(1, 2), 2)
            values = dict.fromkeys(OPS, 0) | {"norm": norm, "norm_baseline": norm, "numel": 4096}
            rows.append(tensor(step, name, ts=None, **values | {"nans": int((step, name) == (BROKEN, NAMES[0]))}))
    return rows


@pytest.mark.usual(1)
@pytest.mark.parametrize(("count", "steps"), [(100, STEPS), (1_000, 24)])
def test_event_files_are_at_most_four_times_as_large_as_the_store(shelf, count, steps):
    """The loss, and the extremes, the NaN and the ends of each series are kept."""
    shelf.put(tensor_stats=tensors(count, steps), scalars=[scalar(step, step / 4) for step in range(1, steps + 1)])
    target, report = shelf.export("tensorboard")
    found = read_points(target)
    norms = found[f"0:{NAMES[0]}/rank0/grad_reduced_norm"]

    assert size(target) <= max(SMALL_BYTES, SIZE_RATIO * size(shelf.folder / "store"))
    assert count * steps + steps == report.omitted[THINNED] + sum(report.rows.values())
    assert {step: step / 4 for step in range(1, steps + 1)} == found["loss"]
    assert {f"0:{name}/rank0/grad_reduced_norm" for name in NAMES[:count]} <= found.keys()
    if steps == STEPS:
        assert 100.0 == norms[SPIKE]
        assert {1, STEPS, BROKEN} <= norms.keys()
        assert 1 == found[f"0:{NAMES[0]}/rank0/grad_reduced_nans"][BROKEN]
        assert 10 <= len(norms) < STEPS


def test_long_scalars_are_thinned_too(shelf):
    values = {step: math.nan if step == 777 else float(step % 100) for step in range(1, 40_001)}
    shelf.put(scalars=[scalar(step, value, ts=None) for step, value in values.items()])
    target, report = shelf.export("tensorboard")
    points = read_points(target)["loss"]

    assert size(target) <= max(SMALL_BYTES, SIZE_RATIO * size(shelf.folder / "store"))
    assert math.isnan(points[777])
    assert {1, 40_000} <= points.keys()
    assert len(points) == report.rows["scalars"]


def test_all_points_are_written_on_request(shelf):
    shelf.put(tensor_stats=tensors(40))
    target, report = shelf.export("tensorboard", all_points=True)

    assert {} == report.omitted
    assert {STEPS} == {len(points) for points in read_points(target).values()}
