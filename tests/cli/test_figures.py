"""`rankscope plot`, `compare` and `events`: files, tables, formats and errors, for runs and logs."""

import json
import subprocess
import sys

import pytest
from tests.cli.conftest import NAN_STEP, table

from rankscope_storage.api.store import Batch, Store


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plot_writes_a_png_of_300_dpi_named_after_the_run(in_process, logs, folder):
    done = in_process("plot", "--checkpoint", logs / "outputs" / "checkpoint-60", "--kind", "speed")

    assert (0, "", "wrote outputs-speed.png\n") == (done.returncode, done.stdout, done.stderr)
    head = (folder / "outputs-speed.png").read_bytes()[:24]
    width, height = int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    assert 8 * 300 == pytest.approx(width, rel=0.03)
    assert 3.6 * 300 == pytest.approx(height, rel=0.1)  # without a throughput, only the loss


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "speed",
            ["Loss", "Throughput", "samples/s", "5 rows below P10 = 100", "EMA 0.9, then moving average of 20 rows"],
        ),
        ("gpu", ["GPU utilisation", "measured: field gpu_util of the log"]),
    ],
)
def test_each_kind_of_figure_of_a_log(in_process, logs, folder, kind, words):
    done = in_process("plot", logs / "metrics.jsonl", "--kind", kind, "--smoothing", "both", "--output", "figure.svg")
    text = (folder / "figure.svg").read_text(encoding="utf-8")

    assert 0 == done.returncode, done.stderr
    assert [] == [word for word in words if f">{word}" not in text]


def test_map_of_tensors_of_one_rank_has_the_statistic_in_its_title(in_process, sample_store, folder):
    options = ("--kind", "tensors", "--tensor-kind", "grad_unreduced", "--op", "max", "--rank", "1", "--absolute")
    done = in_process("plot", "my-run", "--store", sample_store, *options, "-o", "map.svg")

    assert 0 == done.returncode, done.stderr
    text = (folder / "map.svg").read_text(encoding="utf-8")
    assert ">Max of grad unreduced by tensor and step, rank 1" in text
    assert f"first values that are not finite: step {NAN_STEP}, blocks.0.weight" in text


def test_plot_without_matplotlib_names_the_extra(sample_store):
    script = "import sys; sys.modules['matplotlib'] = None; from rankscope.__main__ import main; main()"
    command = [sys.executable, "-c", script, "plot", "my-run", "--store", sample_store]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert 1 == done.returncode
    assert "`rankscope plot` needs matplotlib, which is not installed: pip install 'rankscope[plot]'" in done.stderr


def test_compare_draws_all_checkpoints_and_reports_a_broken_one(in_process, logs, folder):
    checkpoints = [logs / "outputs" / name for name in ("checkpoint-60", "checkpoint-9")]
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "trainer_state.json").write_text("{}", encoding="utf-8")
    done = in_process("compare", *checkpoints, "checkpoint-1", "--output", "compare.svg")

    assert 0 == done.returncode, done.stderr
    assert "not shown: checkpoint-1 contains no record" in done.stderr
    text = (folder / "compare.svg").read_text(encoding="utf-8")
    assert ">Loss of 2 runs" in text
    assert all(f">{checkpoint.name}" in text for checkpoint in checkpoints)
    assert done.stdout.splitlines()[1].split() == ["checkpoint-60", "checkpoint-9"]


def test_compare_prints_values_and_settings_that_differ(in_process, logs, folder):
    outputs = logs / "outputs"
    done = in_process("compare", outputs / "checkpoint-60", outputs / "checkpoint-9", "--no-figure")
    lines = [line.split() for line in done.stdout.splitlines()]

    assert ["step", "60", "9"] in lines
    assert not [line for line in lines if line and line[0].startswith(("trainer_state.global", "trainer_state.epoch"))]
    assert "planned" not in [line[0] for line in lines if line]
    assert done.stdout.endswith("9 common steps: no difference beyond the tolerance\n")
    assert [] == list(folder.iterdir())


def test_compare_of_a_run_and_a_log_as_markdown(in_process, logs, sample_store):
    options = ("-s", sample_store, "--no-figure", "--format", "markdown")
    done = in_process("compare", "my-run", logs / "megatron.log", *options)

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("## States, and values that differ\n\n|  | my-run | megatron |\n")


def test_compare_as_json_has_all_values_and_the_first_difference(in_process, sample_store):
    done = in_process("compare", "my-run", "../other run", "-s", sample_store, "--no-figure", "--format", "json")
    found = json.loads(done.stdout)

    assert ["my-run", "../other run"] == found["runs"]
    assert 0 == found["difference"]["rows_compared"]
    assert {"name": "step", "values": [30, 7], "differs": True} in found["values"]


def test_events_have_filters_and_counts(in_process, sample_store):
    options = ("--type", "incident", "--severity", "critical", "--rank", "1", "--newest", "1")
    text = in_process("events", "my-run", "-s", sample_store, *options).stdout.splitlines()
    markdown = in_process("events", "my-run", "-s", sample_store, *options, "--format", "markdown").stdout

    assert ["time", "(UTC)", "attempt", "step", "type", "severity", "ranks", "event"] == text[0].split()
    assert ["anomaly", "critical", "0-1", "AnomalyNan:"] == text[1].split()[4:8]
    assert "(1 of 32 events: 30 step (--type step), 2 anomaly or incident)" == text[-1]
    assert markdown.startswith(
        "# Events of my-run\n\n1 of 32 events: 30 step (--type step), 2 anomaly or incident\n\n| time (UTC) |"
    )


def test_lines_of_steps_are_printed_only_on_request(in_process, sample_store):
    every, steps, wrong = (
        in_process("events", "my-run", "-s", sample_store, *more)
        for more in ((), ("--type", "step"), ("--type", "chekpoint"))
    )

    assert "AnomalyNan: " in every.stdout
    assert (0, 30) == (every.stdout.count("  loss "), steps.stdout.count("  loss "))
    message = "rankscope: --type 'chekpoint' is no type of events. Did you mean 'checkpoint'?\n"
    assert (2, message) == (wrong.returncode, wrong.stderr)


@pytest.fixture(scope="module")
def own_store(tmp_path_factory):
    """Return a store whose run has own metrics, and histograms of two tensors."""
    folder = tmp_path_factory.mktemp("own") / "history"
    source = {"run": "own", "rank": 0, "attempt": 0, "incarnation": "own-0", "ts_origin": "rank"}
    bins = {"kind": "adam_update", "scheme": "linear:-1.0:1.0:4", "counts": [1, 2, 3, 4], "below": 5, "above": 0}
    scalars, histograms = [], []
    for step in range(20):
        common = source | {"step": step, "seq": step, "ordinal": step}
        values = [("loss", 4 - step / 10, None), ("val/accuracy", step / 20, None), ("acc", 0.5, '{"key":"top1"}')]
        values += [("acc", 0.75, '{"key":"top5"}'), ("eval_loss", 2.0, '{"source_name":"val/loss"}')]
        scalars += [common | {"name": name, "value": value, "labels": labels} for name, value, labels in values]
        histograms += [common | bins | {"tensor": name, "nonfinite": 0} for name in ("0.weight", "1.weight")]
    ended = {"run": "own", "state": "completed", "last_step": 19, "ordinal": 1, "ts_origin": "ingest"}
    tables = {"scalars": table("scalars", scalars), "histograms": table("histograms", histograms)}
    tables["runs"] = table("runs", [ended])
    with Store.open(folder, create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=tables, watermarks={"own-0": 19}))
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scalar", "val/accuracy"], ["val/accuracy", "20 rows stored, all drawn"]),
        (["--scalar", "val/loss"], ["val/loss"]),
        (["--scalar", "acc"], ["own: acc", "key top1", "key top5"]),
        (
            ["--kind", "histograms"],
            ["Adam update of 0.weight by step", "-0.5 to 0", "below -1", "share of the elements"],
        ),
        (["--kind", "histograms", "--tensor", "1.weight"], ["Adam update of 1.weight by step"]),
    ],
)
def test_own_metrics_and_histograms_are_drawn(in_process, own_store, folder, options, words):
    done = in_process("plot", "own", "--store", own_store, *options, "--output", "figure.svg")
    text = (folder / "figure.svg").read_text(encoding="utf-8")

    assert (0, "wrote figure.svg\n") == (done.returncode, done.stderr)
    assert [] == [word for word in words if word not in text.replace("−", "-")]
