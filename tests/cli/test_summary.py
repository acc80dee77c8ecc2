"""`rankscope summary`: runs of a store, logs and checkpoints, formats and exit codes."""

import json
import shutil

import pytest


def test_checkpoint_has_the_four_sections_and_its_facts(in_process, logs):
    done = in_process("summary", "--checkpoint", logs / "outputs" / "checkpoint-60")
    lines = done.stdout.splitlines()

    assert 0 == done.returncode, done.stderr
    assert [60 * "="] * 3 == [line for line in lines if line.startswith("=")]
    assert ["progress", "loss", "parameters", "time"] == [line for line in lines if line[0] not in " ="][1:5]
    for line in (
        "outputs, stopped (imported from a log)",
        "  step: 60 / 90, 66.7 %",
        "  epoch: 2.00 / 3, 66.7 %",
        "  lowest: 0.448509 at step 60",
        "  trend: falling (mean of the last 10 rows against the 10 rows before)",
        "  eval_dev_loss: 0.016667 at step 60; best 0.016667 at step 60",
        "  best metric: 0.066700, outputs/checkpoint-15, step 15",
        "  learning rate: 8.00e-06",
        "  gradient norm: 0.2500",
        "  logged losses: 60",
    ):
        assert line in lines
    assert "(modification time of the file)" in done.stdout


def test_latest_is_the_checkpoint_with_the_largest_number(in_process, logs, monkeypatch):
    monkeypatch.chdir(logs)
    named = in_process("summary", "--outputs", "outputs", "--format", "json")
    without_store = in_process("summary", "--format", "json")

    assert "outputs" == json.loads(named.stdout)["run"]
    assert named.stdout.replace("60", "") == without_store.stdout.replace("60", "")
    assert "history is no store: showing outputs/checkpoint-60\n" == without_store.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--latest", "--outputs", "empty"], 1, "no folder checkpoint-N: name another folder with --outputs"),
        (["--outputs", "."], 1, "name one of outputs with --outputs"),
        (["--checkpoint", "empty"], 1, "empty contains no trainer_state.json"),
        (["--checkpoint", "missing"], 1, "missing does not exist"),
        (["missing.log"], 2, "missing.log is no file or folder"),
        (["metrics.jsonl", "--latest"], 2, "name one of"),
        (["metrics.jsonl", "--run", "other"], 2, "run 'other' not found"),
    ],
)
def test_nothing_found_is_an_error_that_names_the_remedy(in_process, logs, monkeypatch, arguments, code, message):
    monkeypatch.chdir(logs)
    (logs / "empty").mkdir(exist_ok=True)
    done = in_process("summary", *arguments, "--store", "none")

    assert (code, "") == (done.returncode, done.stdout)
    assert message in done.stderr


def test_run_by_steps_shows_no_share_of_epochs(in_process, logs, tmp_path):
    checkpoint = tmp_path / "checkpoint-60"
    shutil.copytree(logs / "outputs" / "checkpoint-60", checkpoint)
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    state["num_train_epochs"] = 9223372036854775807
    (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    progress = json.loads(in_process("summary", checkpoint, "--format", "json").stdout)["progress"]

    assert (None, None) == (progress["planned_epochs"], progress["epoch_share"])
    assert 2 / 3 == pytest.approx(progress["step_share"])


def test_log_has_speed_utilisation_and_hints(in_process, logs):
    done = in_process("summary", logs / "metrics.jsonl", "--format", "json")
    found = json.loads(done.stdout)

    assert "1 malformed lines (line 101" in done.stderr
    assert {"median": 100.0, "unit": "samples/s"}.items() <= found["speed"]["throughput"].items()
    assert (100.0, 5) == (found["speed"]["throughput"]["p10"], found["speed"]["throughput"]["rows_below_p10"])
    assert not found["speed"]["batch_check"]["is_off"]
    assert 0.3125 == pytest.approx(found["speed"]["data_wait"]["value"])
    assert ("field", 0.71) == (found["utilization"]["method"], pytest.approx(found["utilization"]["value"]))
    assert "data" in [hint["side"] for hint in found["hints"]]


def test_megatron_log_has_batch_loss_scale_and_counts(in_process, logs):
    found = json.loads(in_process("summary", logs / "megatron.log", "--format", "json", "--peak-tflops", "989").stdout)

    assert (20, 100) == (found["progress"]["step"], found["progress"]["planned_steps"])
    assert (1.0, 2, 0) == tuple(
        found["parameters"][name] for name in ("loss_scale", "skipped_iterations", "nan_iterations")
    )
    assert [46.3, 29.7] == pytest.approx([found["speed"]["first_step_seconds"], found["speed"]["step_seconds"]])
    assert ("flops", 341.9 / 989) == (found["utilization"]["method"], pytest.approx(found["utilization"]["value"]))


def test_markdown_has_a_table_for_each_section(in_process, logs):
    text = in_process("summary", logs / "megatron.log", "--format", "markdown").stdout

    assert text.startswith(
        "# megatron, stopped (imported from a log)\n\n## Progress\n\n|  |  |\n|---|---|\n| step | 20 / 100"
    )
    assert "\n## Loss\n" in text


@pytest.mark.usual(2)
@pytest.mark.parametrize(
    ("name", "factor"), [("data_time_s", 1.0), ("data_time", 1.0), ("dataloader_time_ms", 1e3), ("time/data", 1.0)]
)
def test_log_that_waits_for_data_has_the_share_and_a_hint(in_process, tmp_path, name, factor):
    """Most rows are fast, and one row in three waits for 8 s: the mean share is 84 %, the median share 20 %."""
    waits = [0.05, 0.05, 7.8] * 20
    rows = [
        {"loss": 2.0, "global_batch_size": 64, "throughput": 64 / (wait + 0.5), "step_time_s": wait + 0.5}
        for wait in waits
    ]
    lines = [json.dumps(row | {name: wait * factor}) for row, wait in zip(rows, waits, strict=True)]
    log = tmp_path / "train.jsonl"
    log.write_text("\n".join(lines), encoding="utf-8")
    found = json.loads(in_process("summary", log, "--format", "json").stdout)
    share = sum(waits) / sum(wait + 0.5 for wait in waits)

    assert share == pytest.approx(found["speed"]["data_wait"]["value"])
    assert f"data wait {100 * share:.1f} %, rest {100 - 100 * share:.1f} %" == found["speed"]["time_spent"]
    assert [f"{100 * share:.0f} %"] == [
        hint["observation"][:4] for hint in found["hints"] if "waiting for data" in hint["observation"]
    ]
    assert pytest.approx(1 - share) == found["utilization"]["value"]


def test_time_for_data_outside_of_the_steps_is_a_share_of_both(in_process, tmp_path):
    log = tmp_path / "train.jsonl"
    log.write_text("\n".join('{"loss": 2.0, "step_time_s": 0.1, "data_time": 0.4}' for _ in range(30)))
    found = json.loads(in_process("summary", log, "--format", "json").stdout)

    assert (pytest.approx(0.8), "data_time / (data_time + step_seconds)") == tuple(found["speed"]["data_wait"].values())


def test_log_of_several_ranks_has_the_losses_that_it_shows(in_process, tmp_path):
    """The loss of a step of live ranks is the mean over the ranks."""
    path = tmp_path / "train.log"
    path.write_text(
        "".join(f"[rank{rank}]: step {step} loss 2.{9 - step}{rank}\n" for step in (1, 2) for rank in (0, 1))
    )
    done = in_process("summary", path)

    assert "loss\n  current: 2.710000 at step 2\n  lowest: 2.700000 at step 2\n" in done.stdout
