"""Structure of the figures: size, axes, labels, and lines whose data equal SQL. Runs of any shape have figures."""

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from tests.view.data.test_curves import history
from tests.view.training import HOSTILE, MAIN, rows, run_row, scalars, write

from rankscope_storage.connection import connect
from rankscope_view import figures
from rankscope_view.data.comparison import compared_values
from rankscope_view.data.detail import read_detail
from rankscope_view.data.grid import UPDATE_RATIO, GridRequest, empty_grid, tensor_grid
from rankscope_view.data.ranks import rank_grid, rank_table
from rankscope_view.data.speed import Gpu, Method, Utilization, read_speed, read_utilization
from rankscope_view.data.summary import read_summary
from rankscope_view.figures.boxes import MOST_GPUS, gpu_boxes
from rankscope_view.figures.heatmaps import heat_map
from rankscope_view.figures.lines import average_width, loss_and_throughput, overlay, overview
from rankscope_view.figures.style import save
from rankscope_view.pages.sections import sections

FAILED = "qwen-7b-sft-tulu"


def artists(axes, gid):
    return [artist for artist in axes.get_children() if artist.get_gid() == gid]


def words(texts) -> list[str]:
    return [text.get_text() for text in texts]


def data(axes, gid) -> tuple[list[float], list[float]]:
    x, y = (np.concatenate([line.get_data()[part] for line in artists(axes, gid)]) for part in (0, 1))
    known = np.isfinite(y)
    return x[known].tolist(), y[known].tolist()


def column(connection, query):
    return [value for row in connection.query(query).to_pylist() for value in row.values()]


@pytest.fixture(scope="module")
def main(connection) -> Figure:
    return overview(read_detail(connection, MAIN))


def test_overview_has_four_panels_on_15_by_10_inches(main):
    titles = [axes.get_title(loc="left") for axes in main.axes]

    assert ["Loss", "Learning rate", "Gradient norm", "Distribution of losses"] == titles
    assert (15.0, 10.0) == tuple(main.get_size_inches())
    assert ["linear", "linear", "log", "log"] == [axes.get_yscale() for axes in main.axes]
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in main.axes)


def test_lines_and_30_bins_of_the_overview_equal_sql(connection, main):
    heights = [bar.get_height() for bar in main.axes[3].patches]
    for panel, name in enumerate(("loss", "learning_rate", "grad_norm")):
        query = f"""FROM scalar_history WHERE run = '{MAIN}' AND name = '{name}' AND stands ORDER BY cumulative_step"""
        x, y = data(main.axes[panel], "raw")

        assert column(connection, f"SELECT step::DOUBLE {query}") == x
        assert column(connection, f"SELECT value {query}") == pytest.approx(y)
    assert 30 == len(heights)
    assert column(connection, f"SELECT count(*) FROM loss_curve WHERE run = '{MAIN}'") == [sum(heights)]


def test_average_of_the_overview_is_empty_until_its_window_is_full(connection):
    figure = overview(read_detail(connection, "no-times"))
    x, y = data(figure.axes[0], "average")
    losses = column(connection, "SELECT loss FROM loss_curve WHERE run = 'no-times' ORDER BY step")

    assert [0, 0, 2, 10, 10] == [average_width(rows) for rows in (10, 19, 20, 100, 5000)]
    assert list(range(2, 30)) == x
    assert [sum(losses[at - 2 : at + 1]) / 3 for at in range(2, 30)] == pytest.approx(y)
    assert "moving average of 3 rows" in words(figure.axes[0].get_legend().get_texts())


def test_restarts_and_ranges_of_nan_are_marked(connection, main):
    loss = overview(read_detail(connection, FAILED)).axes[0]

    assert [36.0, 76.0] == [line.get_xdata()[0] for line in artists(main.axes[0], "restart")]
    (span,) = artists(loss, "nonfinite")
    assert (150.5, 186.5) == (span.get_x(), span.get_x() + span.get_width())
    assert {"NaN 151–186": 0.97}.items() <= {text.get_text(): text.xy[1] for text in loss.texts}.items()  # top edge


def test_axis_has_all_values_unless_it_is_cut(connection, main):
    (highest,) = column(connection, f"SELECT max(loss) FROM loss_curve WHERE run = '{MAIN}' AND isfinite(loss)")
    axes = overview(read_detail(connection, MAIN), is_cut=True).axes[0]
    top = axes.get_ylim()[1]

    assert top < highest < main.axes[0].get_ylim()[1]
    query = f"SELECT step::DOUBLE FROM loss_curve WHERE run = '{MAIN}' AND loss > {top} ORDER BY step"
    expected = column(connection, query)

    assert expected == data(axes, "above")[0]
    assert any(one.startswith(f"{len(expected)} values above") for one in words(axes.get_legend().get_texts()))


def test_reduced_curve_states_its_reduction_and_keeps_the_extremes():
    values = np.sin(np.arange(50_000) / 900)
    values[31_234] = 40.0
    figure = overlay("loss", [("long", history(values))])

    assert "50,000 rows drawn as" in figure.get_supxlabel()
    assert 40.0 == max(data(figure.axes[0], "raw")[1])


def test_speed_marks_rows_below_p10_and_has_a_second_axis(connection):
    detail = read_detail(connection, "no-loss")
    throughput = read_speed(connection, "no-loss", detail.histories, None).throughput
    figure = loss_and_throughput(detail, throughput)
    below = column(
        connection,
        """SELECT step::DOUBLE FROM scalars WHERE run = 'no-loss' AND name = 'tokens_per_second' AND value < (
        SELECT quantile_cont(value, 0.1) FROM scalars WHERE run = 'no-loss' AND name = 'tokens_per_second')
        ORDER BY step""",
    )

    assert (8.0, 6.0) == tuple(figure.get_size_inches())
    assert below == data(figure.axes[1], "below")[0]
    assert "2 rows below P10 = 799 k" in words(figure.axes[1].get_legend().get_texts())
    assert "tokens/s" == figure.axes[1].get_ylabel()
    figure.draw_without_rendering()
    panel, legend = figure.axes[1].get_window_extent(), figure.axes[1].get_legend().get_window_extent()
    assert legend.y1 <= panel.y0  # it covers no mark


def test_loss_has_a_dashed_average_of_20_rows_and_the_rate_at_the_right(connection):
    figure = loss_and_throughput(read_detail(connection, MAIN), None)
    loss, rate = figure.axes
    expected = column(
        connection,
        f"""SELECT avg(loss) OVER (PARTITION BY attempt ORDER BY step ROWS 19 PRECEDING) FROM loss_curve
        WHERE run = '{MAIN}' ORDER BY cumulative_step""",
    )

    assert expected == pytest.approx(data(loss, "average")[1])
    assert {"--"} == {line.get_linestyle() for line in artists(loss, "average")}
    assert "learning rate" == rate.get_ylabel()
    assert 120 == len(data(rate, "rate")[1])


def test_boxes_of_gpus_equal_sql(connection):
    speed = read_speed(connection, MAIN, {}, None)
    figure = gpu_boxes(MAIN, read_utilization(connection, MAIN, speed))
    expected = column(
        connection,
        f"""SELECT 100 * median(value) FROM scalars WHERE run = '{MAIN}' AND name = 'gpu_utilization'
        GROUP BY rank ORDER BY rank""",
    )
    medians = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_color() == "#14181d"]

    assert expected == pytest.approx(medians)
    assert ["0", "1"] == [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ["gpu-a07", "gpu-b07"] == words(figure.axes[0].texts)
    assert "measured: NVML" == figure.get_supxlabel()


def test_gpu_without_data_is_named_and_many_gpus_are_limited():
    gpus = [Gpu(rank=0, gpu="0", host=None, samples=0, mean=None, lowest=None, highest=None, quantiles=())]
    values = dict.fromkeys(("mean", "lowest", "highest"), 0.5)
    known = {"gpu": "0", "host": None, "samples": 5} | values
    gpus += [Gpu(rank=rank, quantiles=(rank / 200,) * 5, **known) for rank in range(1, 200)]
    axes = gpu_boxes("r", Utilization(value=0.5, method=Method.NVML, gpus=tuple(gpus))).axes[0]
    estimated = gpu_boxes("r", Utilization(value=0.47, method=Method.PACE)).axes[0]

    assert MOST_GPUS == len(axes.get_xticklabels())
    assert "no data" in words(axes.texts)
    assert "47 %" in estimated.texts[0].get_text(), "an estimate has no boxes"


def test_overlay_has_one_average_and_one_label_per_run():
    runs = [("a", history(np.arange(40.0))), ("b", history(np.arange(30.0))), ("empty", history([np.nan]))]
    axes = overlay("grad_norm", runs).axes[0]

    assert ["a", "b"] == words(axes.get_legend().get_texts())
    assert 2 == len({line.get_linestyle() for line in artists(axes, "raw")})
    assert ["b  29.00", "a  39.00"] == [one for one in words(axes.texts) if "  " in one]


def test_bytes_are_shown_in_gibibytes():
    axes = overlay("device_memory_allocated_bytes", [("r", history(np.full(40, 1.5 * 2**30)))]).axes[0]

    assert "Device memory allocated, GiB" == axes.get_ylabel()
    assert "r  1.500" in words(axes.texts)


def test_nan_of_one_run_covers_no_line_of_another():
    ruined = [history(np.where(np.arange(40.0) < 30 - start, np.arange(40.0), np.nan)) for start in (0, 10)]
    axes = overlay("loss", [("fine", history(np.arange(40.0))), *zip("ab", ruined, strict=True)]).axes[0]
    (low, high), (below, end) = sorted((one.get_y(), one.get_y() + one.get_height()) for one in axes.patches)

    assert 0.9 < low < high <= below < end < 1
    assert {"a: NaN 30–39", "b: NaN 20–39"} <= set(words(axes.texts))
    ends = {text.get_text(): text for text in axes.texts if "  " in text.get_text()}
    assert {"fine  39.00", "a  NaN", "b  NaN"} == set(ends)
    assert (29, 8, 0) == (ends["a  NaN"].xy[0], *ends["a  NaN"].xyann)


def test_maps_have_a_cell_for_each_value_and_name_the_first_nan(connection, course):
    grid = tensor_grid(connection, MAIN, GridRequest(kind="grad_unreduced"))
    figure = heat_map(MAIN, grid, title="Gradients", unit="÷ median")

    (image,) = figure.axes[0].images
    assert (14, 138) == image.get_array().shape[:2]
    assert "NaN" in words(figure.axes[0].get_legend().get_texts())
    first = f"step {course.nan_from}, layers.1.mlp.down_proj.weight"
    assert f"first values that are not finite: {first}" == figure.get_supxlabel()
    assert 2 == len(artists(figure.axes[0], "restart"))
    ranks = rank_grid(connection, MAIN, rank_table(connection, MAIN), whole_step=False)
    axes = heat_map(MAIN, ranks, title="Ranks", unit="÷ median rank").axes[0]
    assert ["rank 0", "rank 1"] == words(axes.get_yticklabels())


def test_update_size_is_the_norm_of_the_update_by_that_of_the_weight(opened):
    step = np.arange(3)
    own = {"run": "r", "attempt": 0, "rank": 0, "incarnation": "r-0", "seq": step, "ordinal": step, "step": step}
    update = own | {"kind": "update_norm", "value": np.array([0.02, 0.2, np.nan])}
    stats = [rows("tensor_stats", **own, kind="param_before", tensor=name, norm=np.full(3, 2.0)) for name in "ab"]
    tables = {"tensor_stats": stats, "features": [rows("features", **update, module=name) for name in "ab"]}
    store = opened(runs=run_row("r", "completed"), **{name: pa.concat_tables(one) for name, one in tables.items()})
    grid = tensor_grid(store, "r", GridRequest(kind=UPDATE_RATIO, is_relative=False))

    assert ["a", "b"] == [grid.names[holder] for *_, holder in grid.rows]
    assert (-2.0, -1.0) == pytest.approx(grid.scale, abs=0.01)
    assert [[0, 250, 255]] * 2 == grid.cells.tolist()


def drawn(connection, run) -> list[Figure]:
    detail = read_detail(connection, run)
    speed = read_speed(connection, run, detail.histories, None)
    grid = tensor_grid(connection, run, GridRequest(kind="grad_unreduced"))
    return [
        overview(detail),
        loss_and_throughput(detail, speed.throughput),
        gpu_boxes(run, read_utilization(connection, run, speed)),
        overlay("loss", [(run, detail.history("loss"))]),
        heat_map(run, grid, title="Gradients", unit=""),
        heat_map(run, rank_grid(connection, run, rank_table(connection, run), whole_step=True), title="Ranks", unit=""),
    ]


@pytest.mark.usual(1)
@pytest.mark.parametrize("run", ["one-row", "only-nan", "no-loss", "no-times", "mamba2-370m-32k-ctx", HOSTILE])
def test_run_of_any_shape_has_all_figures(connection, run):
    for figure in drawn(connection, run):
        figure.savefig(io.BytesIO(), format="svg")


def test_panel_without_data_names_the_missing_data(connection):
    figure = overview(read_detail(connection, "no-loss"))

    assert ["no loss logged", "no gradient norm logged", "no finite loss"] == [
        figure.axes[panel].texts[0].get_text() for panel in (0, 2, 3)
    ]
    assert "no cells" == heat_map("r", empty_grid("no cells"), title="t", unit="").axes[0].texts[0].get_text()


@pytest.mark.usual(1)
@pytest.mark.parametrize("value", [1e300, 0.0, -1.0, 1e-300])
def test_extreme_gradient_norms_can_be_drawn(connection, value):
    detail = read_detail(connection, "one-row")
    found = {"grad_norm": history([value, value, 1.0]), "loss": history([value, np.inf, value])}

    overview(replace(detail, histories=found)).savefig(io.BytesIO(), format="svg", dpi=20)


@pytest.mark.usual(1)
@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figures_are_saved_in_the_format_of_the_suffix(main, tmp_path, suffix, magic):
    path = tmp_path / f"figure.{suffix}"
    save(main, path, dpi=20)

    assert path.read_bytes().startswith(magic)


def test_figures_need_no_display():
    sources = [path.read_text(encoding="utf-8") for path in Path(figures.__file__).parent.glob("*.py")]

    assert sources
    assert [] == [text for text in sources if re.search(r"^\s*(import|from) .*pyplot", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a connection to a store with runs of two rows, and with a NaN at the end of 120 rows."""
    two, many, batches = np.arange(2), np.arange(120), []
    losses = {"two": (two, 2.0 - two / 10), "nan": (many, np.where(many < 50, 2.0, np.nan))}
    for run, (steps, loss) in losses.items():
        tables = [scalars(run, "loss", steps, loss), scalars(run, "grad_norm", steps, 1.1 + steps / 1000)]
        batches.append({"runs": run_row(run, "completed"), "scalars": pa.concat_tables(tables)})
    with connect(write(tmp_path_factory.mktemp("small") / "store", *batches)) as opened:
        yield opened


def test_figures_of_few_rows_claim_no_average_and_have_several_ticks(small):
    detail = read_detail(small, "two")
    figures = [overview(detail), loss_and_throughput(detail, None), overlay("loss", [("two", detail.history("loss"))])]
    for figure in figures:
        figure.draw_without_rendering()

    assert [] == [one for figure in figures for one in words(figure.findobj(Text)) if "average" in one]
    for axes in figures[0].axes[2:]:
        low, high = axes.get_ylim()
        assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) > 1


def test_nan_at_the_end_is_inside_of_its_panel_and_finite_losses_are_named(small):
    figure, summary = overview(read_detail(small, "nan")), read_summary(small, "nan")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    (label,) = [text for text in axes.texts if "NaN 50–119" in text.get_text()]
    (row,) = [value for part in sections(summary) for value in part.rows if "mean of" in value[0]]

    assert label.get_window_extent().x1 <= axes.get_window_extent().x1
    assert ("mean of the 50 finite", "2.000000") == tuple(row)
    assert "mean finite loss" in [value.name for value in compared_values([summary, read_summary(small, "two")])]
