"""Curves, the chart of one tensor, the grid of all tensors and the comparison of two runs: numbers equal SQL."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from tests.programs import run_command
from tests.view.test_site import Reader
from tests.view.training import MAIN, event, events, rows, run_row, scalars, write

from rankscope_storage.connection import connect
from rankscope_view.data import cells, grid
from rankscope_view.data.cells import Window, cell_query, read_cells, sampled_columns
from rankscope_view.data.comparison import compared_values, difference
from rankscope_view.data.curves import Axis, CurveRequest, Role, Smoothing, curve, ema, ema_at, moving_average, notice
from rankscope_view.data.detail import read_chart
from rankscope_view.data.detail import total_gradient_norm as gradient_norm
from rankscope_view.data.grid import Grid, GridRequest, Order, cell_value, natural, tensor_grid
from rankscope_view.data.series import History
from rankscope_view.data.speed import Method, Utilization
from rankscope_view.data.summary import read_summary
from rankscope_view.data.tensor import Limit, allowed_range, firing_groups, first_to_leave, tensor_curve, tensor_detail
from rankscope_view.site import Site


def history(values, *, attempt=None, step=None, time=None) -> History:
    value = np.asarray(values, float)
    rows = np.arange(len(value))
    attempts = np.zeros(len(value), np.int64) if attempt is None else np.asarray(attempt)
    steps = rows if step is None else np.asarray(step)
    return History(
        name="loss",
        attempt=attempts,
        step=steps,
        cumulative=rows,
        time=rows.astype(float) if time is None else np.asarray(time, float),
        value=value,
        lowest=value,
        highest=value,
        stands=np.ones(len(value), bool),
    )


AVERAGE = CurveRequest(smoothing=Smoothing.AVERAGE, width=7)


def test_arrival_axis_has_raw_steps_as_labels():
    found = curve(history([3, 1, 2, 4], step=[30, 10, 20, 30], attempt=[0, 1, 1, 1]), CurveRequest(axis=Axis.ARRIVAL))

    assert [30, 10, 10, 20, 30] == found.lines[0].step.tolist()
    assert (1.0,) == found.restarts


def test_no_line_crosses_a_restart(connection):
    loss = read_chart(connection, MAIN, "loss")
    for axis in Axis:
        found = curve(loss, CurveRequest(axis=axis))
        if axis is Axis.ATTEMPT:
            assert ["attempt 0", "attempt 1", "attempt 2"] == [line.label for line in found.lines]
        for line in found.lines:
            assert (np.diff(line.x) > 0).all()
            breaks = [] if axis is Axis.ATTEMPT else [np.flatnonzero(line.x < at)[-1] for at in found.restarts]
            assert np.isnan(line.value[breaks]).all()


def test_nan_breaks_the_line_and_is_a_range():
    found = curve(history([1, np.nan, np.inf, 2, 3]), CurveRequest())

    (line,) = found.lines
    assert [1.0, None, 2.0, 3.0] == found.document()["lines"][0]["value"]
    assert [0.0, 1.0, 3.0, 4.0] == line.x.tolist()
    assert [[1.0, 2.0, "NaN, Inf 1–2"]] == found.document()["nonfinite"]


def test_curve_without_points_has_an_extent_and_a_pause_is_a_gap():
    only_nan, timeless = history([np.nan] * 6), history([1, 2], time=[np.nan, np.nan])
    found, without = curve(only_nan, CurveRequest()), curve(timeless, CurveRequest(axis=Axis.TIME))
    paused = curve(history([1, 2, 3, 4], time=[0, 1, 2, 500]), CurveRequest(axis=Axis.TIME))

    assert (0, (0.0, 5.0), 6) == (len(found.lines[0].x), found.extent, found.nonfinite[0].rows)
    assert (0, None) == (without.rows, without.extent)
    assert [1.0, 2.0, 3.0, None, 4.0] == paused.document()["lines"][0]["value"]


@pytest.mark.parametrize("axis", [Axis.STEP, Axis.TIME, Axis.ARRIVAL])
def test_reduction_keeps_extremes_at_their_places(axis):
    values = np.sin(np.arange(100_000) / 900)
    values[61_234], values[77_777] = 90.0, -90.0
    found = curve(history(values), CurveRequest(axis=axis))

    (line,) = found.lines
    assert len(line.x) <= 4000
    assert 90.0 == line.value[line.x == 61_234]
    assert -90.0 == line.value[line.x == 77_777]
    assert (values[0], values[-1]) == (line.value[0], line.value[-1])
    np.testing.assert_array_equal(values[line.x.astype(int)], line.value)
    assert f"{found.buckets:,} stretches of 128" in notice(found)
    assert "1 row stored, drawn" == notice(curve(history([3]), CurveRequest()))


@pytest.mark.parametrize("first", [2**53 + 1, 2**60 + 129, 2**62 + 3])
def test_steps_that_are_no_floats_are_reduced(first):
    """A step may be a time in nanoseconds."""
    values = np.sin(np.arange(1000))
    values[500] = np.nan
    (line,) = curve(history(values, step=first + np.arange(1000)), CurveRequest(points=300)).lines

    assert {0, np.nanargmin(values), np.nanargmax(values), 999} <= set(line.step - first)
    np.testing.assert_allclose(line.x, line.step.astype(float), rtol=1e-12)


def test_zoom_and_the_newest_rows_are_drawn_exactly():
    values = np.random.default_rng(1).normal(size=70_000)
    zoomed = curve(history(values), CurveRequest(first=1000, last=2000))
    newest = curve(history(values), CurveRequest(newest=4000))

    before, after = (curve(history(values[:count]), CurveRequest()).lines[0] for count in (60_000, 63_000))
    done = before.x < 60_000 - 64

    np.testing.assert_array_equal(before.x[done], after.x[: done.sum()], "old buckets do not change")
    assert zoomed.bucket_width is None
    assert [999.0, 2001.0] == [zoomed.lines[0].x[0], zoomed.lines[0].x[-1]]
    np.testing.assert_array_equal(values[-4000:], newest.lines[0].value)
    assert "66,000 older rows are left out" in notice(newest)


@pytest.mark.parametrize(("macro", "request_"), [("ema", CurveRequest(decay=0.9)), ("moving_average", AVERAGE)])
def test_smoothing_equals_the_macro_of_the_store_without_its_first_bias(connection, macro, request_):
    found = curve(read_chart(connection, "no-times", "loss"), request_).lines[0].smoothed
    parameter = 0.1 if macro == "ema" else AVERAGE.width
    stored = connection.query(
        "WITH points AS (SELECT step, loss FROM loss_curve WHERE run = 'no-times') "
        f"FROM {macro}(points, step, loss, {parameter})"
    )
    expected, first = stored[macro].to_numpy(), stored["loss"].to_numpy()[0]
    weight = 0.9 ** np.arange(1, len(expected) + 1) if macro == "ema" else 0.0
    # The weight of the first value, which the macro `ema` counts for all before it.

    np.testing.assert_allclose(found, (expected - weight * first) / (1 - weight))


def test_both_is_the_moving_average_of_the_exponential_one():
    values = np.random.default_rng(0).normal(size=60)
    series = np.zeros(60, np.int64)
    found = curve(history(values), CurveRequest(smoothing=Smoothing.BOTH, width=5))

    np.testing.assert_allclose(found.lines[0].smoothed, moving_average(ema(values, series, 0.9), series, 5))


@pytest.mark.parametrize("spike", [1.0, 1e3, 1e12, np.nan, np.inf])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.99])
def test_average_at_few_rows_is_that_of_all_rows(spike, decay):
    values = np.random.default_rng(0).normal(3, 1, 20_000)
    values[[7_000, 12_345]] = spike
    series = np.repeat([0, 1, 2], [5, 9_995, 10_000])
    chosen = np.array([0, 4, 5, 6, 7_000, 7_001, 7_400, 9_999, 10_000, 10_030, 12_345, 12_800, 19_999])

    np.testing.assert_allclose(ema_at(values, series, decay, chosen), ema(values, series, decay)[chosen], rtol=1e-12)


def test_range_of_the_axis_has_all_values_unless_a_reader_cuts_it():
    values = np.r_[np.linspace(9, 3, 30), np.full(60, 2.5), 40.0, np.full(60, 2.4)]
    found = curve(history(values), CurveRequest())

    assert (2.4, 40.0) == found.range()
    assert 9 > found.range(is_cut=True)[1]


@pytest.mark.parametrize("smoothing", [Smoothing.EMA, Smoothing.AVERAGE])
def test_smoothing_starts_again_at_a_restart_and_skips_nan(smoothing):
    values = [8.0, 8.0, np.nan, 8.0, 2.0, 2.0]
    request = CurveRequest(axis=Axis.ARRIVAL, smoothing=smoothing)
    found = curve(history(values, attempt=[0, 0, 0, 0, 1, 1]), request)

    drawn = np.isfinite(found.lines[0].value)
    assert [8.0, 8.0, 8.0, 2.0, 2.0] == pytest.approx(found.lines[0].smoothed[drawn].tolist())


def test_spike_does_not_disturb_a_later_moving_average():
    values = np.ones(100)
    values[10] = 1e30
    found = curve(history(values), CurveRequest(smoothing=Smoothing.AVERAGE, width=5))

    assert 1.0 == found.lines[0].smoothed[20]


TENSOR, KIND = "layers.1.mlp.down_proj.weight", "grad_unreduced"
REQUEST = CurveRequest(axis=Axis.ARRIVAL, smoothing=Smoothing.NONE)


@pytest.fixture(scope="module")
def detail(connection):
    return tensor_detail(connection, MAIN, KIND, "norm", TENSOR)


@pytest.fixture(scope="module")
def drawn(connection, detail):
    return tensor_curve(connection, MAIN, detail, REQUEST)


def test_lines_of_ranks_baseline_and_limit_equal_sql(connection, drawn, detail):
    lines, roles = ({getattr(line, name): line for line in drawn.lines} for name in ("label", "role"))
    stored = connection.query(
        "SELECT rank, list(norm ORDER BY attempt, step) FILTER (norm IS NOT NULL) AS norms, "
        "any_value(norm_baseline) AS baseline FROM tensor_stats WHERE run = $run AND kind = $kind AND tensor = $tensor "
        "GROUP BY rank",
        {"run": MAIN, "kind": KIND, "tensor": TENSOR},
    ).to_pylist()
    levels = {role: set(roles[role].value[np.isfinite(roles[role].value)]) for role in (Role.BASELINE, Role.LIMIT)}

    assert {f"rank {row['rank']}": row["norms"] for row in stored} == {
        label: line.value[np.isfinite(line.value)].tolist() for label, line in lines.items() if "rank" in str(label)
    }
    assert Role.SUBJECT is lines["rank 1"].role, "the first to fire"
    assert Limit(high=4.0) == detail.limit
    assert {Role.BASELINE: {stored[0]["baseline"]}, Role.LIMIT: {4 * stored[0]["baseline"]}} == levels


def test_firings_are_on_the_line_of_their_rank(connection, drawn, detail):
    expected = connection.query(
        "SELECT step, op FROM events WHERE run = $run AND type = 'anomaly' AND tensor = $tensor ORDER BY step",
        {"run": MAIN, "tensor": TENSOR},
    ).to_pylist()
    fired = next(one for one in detail.firings if one["op"] == "norm") | {"rank": 0, "value": 1e9}
    other = tensor_curve(connection, MAIN, replace(detail, firings=(*detail.firings, fired)), REQUEST)
    lines = {line.label: dict(zip(line.x.tolist(), line.value.tolist(), strict=True)) for line in other.lines}
    placed = [one for one in drawn.firings if one.value is not None]

    assert [lines["rank 1"][one.x] for one in placed] == [one.value for one in placed]
    assert [row["step"] for row in expected if row["op"] == "norm"] == sorted(one.step for one in placed)
    assert len(expected) == len(drawn.firings)
    assert lines["rank 0"][other.firings[-1].x] == other.firings[-1].value


def test_firings_of_a_rule_at_consecutive_steps_are_one_group():
    fired = {"attempt": 0, "rank": 1, "rule": "A", "severity": "warning", "op": "norm", "baseline": 2.0}
    steps = {200: 4.0, 102: 3.0, 101: 9.0, 100: 5.0}
    found = firing_groups([fired | {"step": step, "value": value} for step, value in steps.items()])

    assert [(100, 102, 3, 4.5, 101), (200, 200, 1, 2.0, 200)] == [
        (one.first, one.last, one.times, one.ratio, one.step) for one in found
    ]


def test_newest_values_of_all_ranks_equal_sql(connection, detail):
    expected = connection.query(
        "SELECT rank, arg_max(norm, (attempt, step)) AS value, max(norm) AS highest, sum(nans) AS nans "
        "FROM tensor_stats WHERE run = $run AND kind = $kind AND tensor = $tensor GROUP BY rank ORDER BY rank",
        {"run": MAIN, "kind": KIND, "tensor": TENSOR},
    ).to_pylist()

    assert expected == [{name: row[name] for name in ("rank", "value", "highest", "nans")} for row in detail.ranks]


def test_curve_of_one_attempt_is_on_the_axis_of_steps(connection, detail):
    found = tensor_curve(connection, MAIN, detail, CurveRequest(axis=Axis.ATTEMPT, smoothing=Smoothing.NONE), attempt=1)

    assert found.lines[0].x.tolist() == found.lines[0].step.tolist()
    assert all(np.diff(found.lines[0].x) > 0)


def test_limit_is_known_from_the_configuration_without_a_firing(connection, opened):
    arguments = {"threshold": 24.0, "direction": "both", "ops": ["norm"], "kinds": None}
    config = json.dumps({"rules": [{"rule_name": "AnomalyTurbulence", "args": arguments}]})
    bad = [None, "[]", "not JSON", '{"rules": [1]}', '{"rules": 3}']
    states = [run_row(f"r{at}", "completed", config=text) for at, text in enumerate([config, *bad])]
    store = opened(runs=pa.concat_tables(states))

    assert Limit(high=25.0, low=0.04) == allowed_range(store, "r0", KIND, "norm")
    places = [("r0", "mean"), *((f"r{at}", "norm") for at in range(1, 6))]
    assert {None} == {allowed_range(store, run, KIND, op) for run, op in places}
    assert allowed_range(connection, MAIN, KIND, "max") is None, "a statistic without a baseline"


def test_total_gradient_norm_has_each_replica_once_and_all_shards(opened):
    known = {"run": "r", "attempt": 0, "seq": [0], "step": [0], "kind": "grad_reduced", "numel": 4}
    parts = []
    for rank in (0, 1):
        own = known | {"rank": rank, "incarnation": f"r-{rank}"}
        parts.append(rows("tensor_stats", **own, tensor="a", placement="replica", norm=12.0))
        parts.append(rows("tensor_stats", **own, tensor="b", placement="shard", shard_group="0-1", norm=3.0 + rank))

    assert [13.0] == gradient_norm(opened(tensor_stats=pa.concat_tables(parts)), "r").value.tolist()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Return a connection to a store with 2,500 tensors of 40 steps: one has a spike, another one a NaN."""
    tensors, steps = 2500, 40
    step, number = np.tile(np.arange(steps), tensors), np.repeat(np.arange(tensors), steps)
    norm = np.where((number == 1700) & (step == 20), 500.0, 1.0)
    bad = (number == 2001) & (step == 30)
    known = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "seq": step, "step": step, "infs": 0 * step}
    names = [f"layers.{one}.weight" for one in number]
    values = {"norm": pa.array(norm, mask=bad), "nans": np.where(bad, 3, 0)}
    table = rows("tensor_stats", kind="grad_reduced", tensor=names, **known, **values)
    with connect(write(tmp_path_factory.mktemp("grid") / "store", {"tensor_stats": table})) as opened:
        yield opened


def holder(found: Grid, row: int) -> str:
    return found.names[found.rows[row][2]]


def test_pooled_rows_name_the_tensor_with_the_extreme(many):
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced"))

    assert (1250, 40) == found.cells.shape
    assert ("layers.1700.weight", 2, 1700) == (holder(found, 850), found.rows[850][1], found.rows[850][0])
    assert found.cells[850, 20] == found.cells[found.cells <= grid.LEVELS].max()
    assert cells.NOT_A_NUMBER == found.cells[1000, 30]
    assert "layers.2001.weight" == holder(found, 1000)
    assert (1000, 30) == found.first_bad


@pytest.mark.parametrize(
    ("kind", "first"), [("grad_reduced", "layers.2.a"), ("exp_avg", "layers.2.a"), ("act_out", "layers.0.a")]
)
def test_first_nan_is_that_of_the_causal_order_in_each_order_of_rows(opened, kind, first):
    """All layers become NaN at a step: in the backward pass, the last one is the first."""
    names = [f"layers.{layer}.{part}" for layer in range(3) for part in "ab"]
    nan = {"rule": "AnomalyNan", "op": "nans", "kind": kind, "rank": 0}
    wanted = [name for name in names if name.endswith("a")]
    calls = wanted if kind == "act_out" else wanted[::-1]
    listed = [event("r", "anomaly", 3, 3, tensor=name, call_id=at, **nan) for at, name in enumerate(calls)]
    bad = [3 if step == 3 and name in wanted else 0 for name in names for step in range(5)]
    step, tensor = list(range(5)) * 6, [name for name in names for _ in range(5)]
    known = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "i", "seq": step, "norm": 1.0, "infs": 0}
    table = rows("tensor_stats", step=step, kind=kind, tensor=tensor, nans=bad, **known)
    store = opened(tensor_stats=table, events=events(listed))
    grids = [tensor_grid(store, "r", GridRequest(kind=kind, order=order)) for order in Order]
    leaving = first_to_leave(store, "r")[0].tensor

    assert [first] * 4 == [leaving, *(holder(found, found.first_bad[0]) for found in grids)]
    assert [3] * 3 == [found.first_bad[1] for found in grids]


def test_zoom_shows_single_tensors_and_steps(many):
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced", rows=(1690, 1710), columns=(15, 25)))

    assert (20, 10) == found.cells.shape
    assert (15, 24) == (found.steps[0], found.last_steps[-1])
    assert "layers.1700.weight" == holder(found, 10)
    assert "no pooling" in found.notice


def test_rows_are_the_worst_ones_or_pooled_to_the_height_of_the_screen(many):
    worst = tensor_grid(many, "r", GridRequest(kind="grad_reduced", order=Order.WORST, rows=(0, 2)))
    found = tensor_grid(many, "r", GridRequest(kind="grad_reduced", most_rows=100))

    assert ("layers.2001.weight", "layers.1700.weight") == worst.names
    assert (100, 40) == found.cells.shape
    assert "layers.1700.weight" == holder(found, 68)
    assert 2500 == sum(tensors for _, tensors, _ in found.rows) == len(found.names)
    assert (0, 0) == tensor_grid(many, "no such run", GridRequest(kind="grad_reduced")).cells.shape


def test_exact_value_of_a_pooled_cell_names_its_tensor_and_nan_has_priority(many):
    def value(column, *numbers):
        names = tuple(f"layers.{number}.weight" for number in numbers)
        return cell_value(many, "r", GridRequest(kind="grad_reduced", tensors=names), column)

    for column, number, expected in ((20, 1700, 500.0), (3, 1699, 1)):
        found = value(column, *range(1699, 1703))
        assert (f"layers.{number}.weight", column, expected) == (found["tensor"], found["step"], found["value"])
    found = value(30, 2000, 2001)
    assert ("layers.2001.weight", 3) == (found["tensor"], found["nans"])


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Return a connection to two parts of four layers on three ranks, two attempts, two kinds and an odd stride."""
    random, batches = np.random.default_rng(3), []
    for attempt, steps in ((0, range(0, 60, 3)), (1, range(45, 90, 3))):
        for kind in ("grad_reduced", "param_after"):
            for rank in range(3):
                step = np.repeat(np.array(steps), 8)
                names = [f"layers.{at // 2}.{('a', 'b')[at % 2]}.weight" for at in range(8)] * len(steps)
                source = {"run": "r", "attempt": attempt, "rank": rank, "incarnation": f"{attempt}-{rank}", "seq": step}
                norm, mean = np.exp(random.normal(0, 2, len(step))), random.normal(0, 1, len(step))
                table = rows("tensor_stats", **source, step=step, kind=kind, tensor=names, norm=norm, mean=mean)
                batches.append({"tensor_stats": table})
    with connect(write(tmp_path_factory.mktemp("spread") / "store", *batches)) as opened:
        yield opened


def test_tensors_are_grouped_by_layer_or_by_part(spread):
    by = {order: tensor_grid(spread, "r", GridRequest(kind="grad_reduced", order=order)).names for order in Order}

    assert ["layers.0.a.weight", "layers.0.b.weight", "layers.1.a.weight"] == list(by[Order.MODEL][:3])
    assert ["layers.0.a.weight", "layers.1.a.weight", "layers.2.a.weight"] == list(by[Order.PART][:3])


@pytest.mark.parametrize(("op", "rank"), [("norm", None), ("mean", 2)])
def test_cells_equal_sql(spread, op, rank):
    query = cell_query(spread, "r", GridRequest(kind="grad_reduced", op=op, rank=rank))
    columns = sampled_columns(spread, query)
    for width in (1, 4):
        found = read_cells(query, Window(columns, 2, columns.count, width))
        place = f"((CASE coalesce(attempt, 0) WHEN 0 THEN step // 3 ELSE (step - 45) // 3 + 20 END) - 2) // {width}"
        own = "true" if rank is None else f"rank = {rank}"
        expected = spread.query(
            f"SELECT tensor, {place} AS place, min({op}) AS low, max({op}) AS high FROM tensor_stats "
            f"WHERE kind = 'grad_reduced' AND {own} AND NOT (attempt = 0 AND step < 6) GROUP BY ALL"
        ).to_pylist()

        assert len(expected) == np.isfinite(found.high).sum()
        for row in expected:
            at = found.names.index(row["tensor"]), row["place"]
            assert (row["low"], row["high"]) == (found.low[at], found.high[at])


def test_names_sort_by_their_numbers():
    names = ["lm_head", "layers.10.w", "layers.2.w", "embed.weight", "²", "1.x"]

    assert ["embed.weight", "1.x", "layers.2.w", "layers.10.w", "²", "lm_head"] == sorted(names, key=natural)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a store with three runs of 200 steps on two ranks: `other` differs from step 150, and `long` is longer."""
    # In the run `long`, the replicas of rank 1 differ from step 40.
    batches = []
    for run, steps in (("same", 200), ("other", 200), ("long", 260)):
        tables, statistics, step = [], [], np.arange(steps)
        for rank in (0, 1):
            source = {"rank": rank, "incarnation": f"{run}-{rank}"}
            loss = 5 - step / 100 + np.where((run == "other") & (step >= 150), 0.5, 0.0) + rank
            times = np.where(step == steps - 1, 9.0, 0.5 + rank / 10)
            tables += [scalars(run, "loss", step, loss, **source), scalars(run, "step_seconds", step, times, **source)]
            apart = (run == "long") & (rank == 1) & (step >= 40)
            known = {"attempt": 0, "seq": step, "step": step, "tensor": "w.0", "placement": "replica"} | source
            norm = 2.0 + step / 7 + np.where(apart, 0.25, 0.0)
            statistics.append(rows("tensor_stats", run=run, kind="param_after", norm=norm, **known))
        rate = 1e-3 if run == "other" else 1e-4
        config = json.dumps({"optimizer": {"lr": rate}, "argv": ["train.py", f"--lr={rate}"], "run": run})
        row = run_row(run, "completed", config=config, last_step=steps - 1)
        tables = {"scalars": pa.concat_tables(tables), "tensor_stats": pa.concat_tables(statistics)}
        batches.append({"runs": row, **tables})
    return write(tmp_path_factory.mktemp("compare") / "store", *batches)


@pytest.fixture(scope="module")
def compared(folder):
    with connect(folder) as connection:
        yield connection


def test_compare_prints_the_number_of_steps_that_both_runs_have(folder):
    """The comparison of values ends after the steps 16 to 143, in which the first difference is."""
    printed = run_command("compare", "same", "long", "--store", folder, "--no-figure").stdout

    assert "200 common steps: first difference at step 40:" in printed


def test_curves_of_a_rank_and_of_a_difference_equal_sql(compared):
    a, b = (read_chart(compared, run, "loss") for run in ("same", "other"))
    expected = compared.query(
        "SELECT step, avg(value) FILTER (run = 'other') - avg(value) FILTER (run = 'same') AS value, "
        "any_value(value) FILTER (run = 'same' AND rank = 1) AS own FROM scalars "
        "WHERE name = 'loss' AND run IN ('same', 'other') GROUP BY step ORDER BY step"
    )
    found = difference(a, b)

    assert expected["step"].to_pylist() == found.step.tolist()
    assert expected["value"].to_pylist() == pytest.approx(found.value)
    assert expected["own"].to_pylist() == read_chart(compared, "same", "loss", rank=1).value.tolist()


def page(folder, **sides) -> str:
    return Reader(Site(folder).respond(("compare",), sides).body.decode()).text


def test_page_states_the_first_difference_of_each_side(folder):
    html = Site(folder).respond(("compare",), {"a": "same", "b": "other", "c": "long"}).body.decode()

    assert "B and A differ first at step 150" in html
    assert "C and A differ first at step 40, on rank 1" in html
    assert "The 150 common steps before it are equal." in html
    assert "The 40 common steps before it are equal." in html
    assert "/compare?a=same&amp;b=long" in html  # removes B


def test_page_has_the_changed_command_and_the_usual_speed(folder):
    """The last step of a run has another length: 9 s instead of 0.5 s on rank 0 and 0.6 s on rank 1."""
    runs = page(folder, a="same", b="other")

    assert "command train.py --lr=0.0001 train.py --lr=0.001" in runs
    assert "s/step, newest 20 steps 0.5500 0.5500 0" in runs
    of_run = Reader(Site(folder).respond(("runs", "same"), {}).body.decode()).text
    assert "0.5500 s/step median, newest 20 steps" in of_run


def test_curves_of_all_sides_have_their_letters(folder):
    site, query = Site(folder), {"a": "same", "b": "other", "c": "long", "smooth": "none"}
    for name, labels in {"loss": ["A", "B", "C"], "difference": ["B − A", "C − A"]}.items():
        answer = json.loads(site.respond(("data", "compare"), query | {"name": name}).body)
        assert labels == [line["label"] for line in answer["lines"]]
    assert 404 == site.respond(("data", "compare"), {"a": "same"}).status


def test_estimated_utilisation_is_named_so_and_has_a_row_of_its_own(compared):
    summary = read_summary(compared, "same")
    runs = [
        replace(summary, utilization=Utilization(value=0.5, method=method)) for method in (Method.NVML, Method.PACE)
    ]
    found = {one.name: one.values for one in compared_values(runs)}

    assert (0.5, None) == found["GPU utilisation"]
    assert (None, 0.5) == found["GPU utilisation (estimated)"]


def test_page_of_two_ranks_names_their_first_difference_and_swaps_them(folder):
    sides = {"a": "long", "b": "long", "a.rank": "0", "b.rank": "1"}
    html = Site(folder).respond(("compare",), sides).body.decode()

    assert "The ranks differ first at step 40" in html
    assert "w.0" in html
    assert "a.rank=1&amp;b=long&amp;b.rank=0" in html  # swap
    assert "s/step, newest 20 steps 0.5000 0.6000 +0.1000" in Reader(html).text


def test_first_difference_of_a_scalar_is_in_words_for_people(stored):
    rates = [
        scalars(run, "learning_rate", np.arange(5), np.full(5, rate), labels='{"group":"0"}')
        for run, rate in (("a", 0.0), ("b", 1e-3))
    ]
    states = [run_row(run, "completed") for run in "ab"]
    store = stored(scalars=pa.concat_tables(rates), runs=pa.concat_tables(states))
    text = page(store, a="a", b="b")
    printed = run_command("compare", "a", "b", "--store", store, "--no-figure").stdout

    assert "The runs differ first at step 0, in the learning rate, group 0" in text
    assert "Learning rate, group 0: 0 against 0.001000, a difference of 100 %." in text
    assert "first difference at step 0: learning rate, group 0, rank 0" in printed
    assert "{" not in printed
