"""Tests with logs of many tools, imported without options: the right axis, the right numbers, and nothing lost."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.importers.conftest import DATA
from tests.ingest.importers.field_logs import differences, read, series
from tests.properties import examples

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, find_importer
from rankscope_ingest.importers.common.pairs import parse

FOLDER = DATA / "field_logs"
INPUTS = sorted(path.name.removesuffix(".expected.json") for path in FOLDER.glob("*.expected.json"))
REFUSED = {"no_log_at_all.txt", "run-demo.wandb"}

MISREAD = {
    *("clu_writer.log", "coqui_tts.log", "docker_json.log", "glued_ranks.log", "mlagents.log", "mlperf_mllog.log"),
    *("nnunet.log", "rsl_rl.log", "run-demo_version_0-tag-train_loss.csv", "sb3_table.log"),
}
"""Logs that are refused, or read with a wrong axis or missing series. A repair has to remove the name of its log."""

UNKEPT = {
    "bigdl_console.log": {"Train": 40, "in": 40},  # "Train 1792 in 4.3878seconds"
    "metriclogger_console.log": {"Total time": 4},  # "Total time: 0:03:45 (0.5645 s / it)"
}

READ = [name for name in INPUTS if name not in REFUSED | MISREAD]
needs_inputs = pytest.mark.skipif(not INPUTS, reason=f"the recorded logs are not here ({DATA})")


def _cases(names):
    return list(names) or [pytest.param("", marks=needs_inputs)]


@pytest.mark.usual(21)
@pytest.mark.parametrize(
    "name",
    [*_cases(READ), *(pytest.param(name, marks=pytest.mark.xfail(strict=True)) for name in INPUTS if name in MISREAD)],
)
def test_log_of_a_tool_has_the_expected_series(logs, name):
    logs.import_log(FOLDER / name)
    want = json.loads((FOLDER / f"{name}.expected.json").read_text(encoding="utf-8"))
    rows = logs.query(
        "SELECT attempt, rank, step, ts IS NOT NULL AS timed, name, value, labels FROM scalars "
        "ORDER BY attempt, seq, rank, labels"
    )
    others = {row["type"]: row["n"] for row in logs.query("SELECT type, count(*) AS n FROM events GROUP BY type")}
    others["planned"] = logs.value("SELECT max(planned_steps) FROM runs")

    assert [] == differences(rows, others, want)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_inputs) for name in sorted(REFUSED)])
def test_file_that_is_no_log_is_refused_with_the_remedy(logs, name):
    words = json.loads((FOLDER / f"{name}.expected.json").read_text(encoding="utf-8"))["refused"]["words_one_of"]

    with pytest.raises(IngestError, match="|".join(map(re.escape, words))):
        logs.import_log(FOLDER / name)


@needs_inputs
def test_almost_all_numbers_of_the_logs_are_stored():
    stored, unkept = 0, {}
    for name in READ:
        rows, faults = read(FOLDER / name)
        stored += len(rows)
        unkept |= {name: dict(faults.unkept)} if faults.unkept else {}

    assert UNKEPT == unkept
    assert stored > 19 * sum(sum(counts.values()) for counts in unkept.values())


@pytest.mark.usual(9)
@pytest.mark.parametrize("name", READ or [pytest.param("", marks=needs_inputs)])
def test_growing_log_gives_the_same_records_in_any_number_of_imports(tmp_path, name):
    path = tmp_path / name
    content = (FOLDER / name).read_bytes()
    whole, _ = read(FOLDER / name)
    choices = None
    for part in range(1, 11):
        path.write_bytes(content[: len(content) * part // 10])
        try:
            rows, faults = read(path, choices)
        except IngestError:
            continue  # too short to be recognized
        choices = faults.choices

        assert repr(whole[: len(rows)]) == repr(rows)
    assert len(whole) == len(rows)


EPOCHS = [(epoch, place) for epoch in range(2) for place in range(1, 4)]
RISING = [1, 2, 3, 4, 5, 6]
FALLING = [1, 2, 3, 1, 2, 3]
COUNTERS = {
    "NeMo 2": ("Training epoch {e}, iteration {i}/3 | lr: 1e-05 | global_step: {g} | reduced_train_loss: {v}", RISING),
    "NeMo bar": ("Epoch {e}:  33%|█▏  | {i}/3 [00:10<01:30,  1.20it/s, loss={v}, global_step={g}.0]", RISING),
    "LMOps": ("train | epoch   {e} | Iter: {i:6d}/ 6 | global iter: {g:6d}/ 6 | loss: {v}", RISING),
    "fairseq": ("train_inner | epoch 00{e}:  {i} / 3 loss={v}, num_updates={g}, lr=1e-06", RISING),
    "percent": ("{i}% of epoch {e}: step {g} loss {v}", RISING),
    "MMEngine": ("2026/01/01 00:00:00 - INFO - Epoch(train)  [{e}][ {i}/3]  lr: 1e-2  loss: {v}", FALLING),
    "MindFormers": ("{{ Epoch:[  {e}/  2], step:[    {i}/   3], loss: {v}, overflow cond: False }}", FALLING),
    "torchvision": ("Epoch: [{e}]  [  {i}/3]  eta: 0:04:26  loss: {v} (2.2)", FALLING),
    "epoch only": ("Epoch [{g}/6], Loss: {v}", RISING),
}


@pytest.mark.parametrize("tool", COUNTERS)
def test_step_is_the_counter_that_rises_over_epochs(tmp_path, tool):
    pattern, steps = COUNTERS[tool]
    lines = [pattern.format(e=e, i=i, g=g, v=9.5 - g) for g, (e, i) in enumerate(EPOCHS, 1)]
    found, _ = series(tmp_path, lines)

    assert [(0, step, 9.5 - place) for place, step in enumerate(steps, 1)] == found["loss"]


def test_fall_of_all_counters_is_a_restart(tmp_path):
    """Amounts such as consumed samples are no counters."""
    steps = [10, 20, 30, 10, 20, 30, 40]
    lines = [f"epoch 1 step {step} iter {8 * step} consumed_samples {100 * k} loss 2.5" for k, step in enumerate(steps)]
    found, _ = series(tmp_path, lines)

    assert [*((0, step) for step in steps[:3]), *((1, step) for step in steps[3:])] == [
        row[:2] for row in found["loss"]
    ]


def test_row_of_an_evaluation_begins_no_attempt(tmp_path):
    lines = ["step 1 loss 3.5", "step 2 loss 3.0", "step 1 | val_loss 3.25", "val loss: 3.1", "step 3 loss 2.5"]
    found, _ = series(tmp_path, lines)

    assert [(0, 1, 3.5), (0, 2, 3.0), (0, 3, 2.5)] == found["loss"]
    assert [(0, 1, 3.25), (0, 1, 3.1)] == found["eval_loss"]


def test_contradiction_with_the_stored_choice_is_reported(logs, tmp_path):
    """The step that an earlier import has chosen remains; the message names the option that decides again."""
    lines = [f"epoch {e} step {i} iter {g} loss 2.5\n" for g, (e, i) in enumerate(EPOCHS, 1)]
    path = logs.write("train.log", "".join(lines[:3]))
    logs.import_again(path)
    path.write_text("".join(lines))
    report = logs.import_again(path)

    assert ("the step is step, but iter rises where it falls (1 records): --reimport decides again",) == report.notes
    assert [1, 2, 3, 1, 2, 3] == [
        row["step"] for row in logs.query("SELECT step FROM scalars WHERE name = 'loss' ORDER BY seq")
    ]


VALUES = {
    "1.5": 1.5, "-2": -2.0, "1,234.5": 1234.5, "2.5e-3": 0.0025, "nan": "nan", "27.4K": 27400.0, "25.2G": 25.2e9,
    "tensor(2.5, device='cuda:0')": 2.5, "np.float64(0.25)": 0.25, "2.0 (3.0)": 2.0,
    "DTensor(local_tensor=3.5, device_mesh=DeviceMesh('cuda', [0, 1]), placements=(Replicate(),))": 3.5,
}  # fmt: skip


@pytest.mark.parametrize("text", VALUES)
@pytest.mark.parametrize("mark", ["=", ": ", " is "])
def test_value_of_any_form_is_read(tmp_path, mark, text):
    found, faults = series(tmp_path, [f"step 1 loss 2.5 thing{mark}{text}"])

    assert repr(VALUES[text]).strip("'") == repr(found["thing"][0][2])
    assert not faults.unkept


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("eta: 2 days, 12:13:20", "remaining_seconds", 216_800.0),
        ("tps 31354.32(3919.29/gpu)", "tokens_per_second_per_gpu", 3919.29),
        ("tps 31354.32(3919.29/gpu)", "tokens_per_second", 31354.32),
        ("max_mem: 4237M", "device_memory_peak_bytes", 4237 * 2.0**20),
        ("cuda_memory: 8.86G", "cuda_memory", 8.86e9),
        ("train_throughput_per_npu: 131.7T", "tflops_per_gpu", 131.7),
        ("elapsed_time_per_iteration_ms: 27.4K", "step_seconds", 27.4),
        ("memory: 9.46GiB(64.99%)", "memory_percent", 64.99),
        ("grad_norm: 0.39 (0.41)", "grad_norm_average", 0.41),
        ("ratio: 0.5  tps: 7,000", "tokens_per_second_per_gpu", 7000.0),
        ("ratio: 0.5  size: 2,048", "size", 2048.0),
        ("| peak-gpu-memory 63.85 GB |", "peak-gpu-memory", 63.85e9),
    ],
)
def test_unit_of_a_value_is_applied(tmp_path, text, name, value):
    found, _ = series(tmp_path, [f"step: 1  loss: 2.5  {text}"])

    assert [(0, 1, value)] == found[name]


@pytest.mark.parametrize("text", ["Train 1792 in", "model: 7b", "tokens=1.5Bx", "share=1/2", "version=1.2.3"])
def test_number_that_is_no_value_is_counted_and_not_stored(tmp_path, text):
    found, faults = series(tmp_path, [f"step 1 loss: 2.5 {text}"])

    assert {"loss"} == set(found)
    assert faults.unkept.total()


NAMES = st.from_regex(r"[a-z]{3,8}([_/-][a-z]{2,6}){0,2}", fullmatch=True).filter(
    lambda name: not re.search("step|iter|update|epoch|batch|loss|val|test|rank|time|norm|nan|inf|is|s_it", name)
)
NUMBERS = st.floats(-1e6, 1e6).map(repr) | st.integers(0, 10**6).map(str) | st.sampled_from(["nan", "1,234,567.5"])


@given(
    prefix=st.sampled_from(
        ["", "2026-01-01 00:00:00 | INFO | ", "[rank3]: 2026-01-01 00:00:00,123 - root - INFO - ", "(T pid=12) "]
    ),
    separator=st.sampled_from([" | ", ", ", "  ", " - ", "\t"]),
    mark=st.sampled_from([": ", ":", "=", " ", " = "]),
    pairs=st.dictionaries(NAMES, NUMBERS, min_size=1, max_size=6),
    place=st.integers(0, 6),
)
@settings(deadline=None, max_examples=examples(300))
def test_every_value_of_a_pair_is_stored_or_counted(prefix, separator, mark, pairs, place):
    """The counter may be before, between or behind the pairs."""
    parts = [f"{name}{mark}{value}" for name, value in pairs.items()]
    text = separator.join([*parts[:place], f"step{mark}5/100", *parts[place:]])
    line = parse(prefix + text)

    assert {"step": "5/100"} == line.counters
    assert len(pairs) == len(line.pairs) + len(line.rest)


@pytest.mark.parametrize(
    "name",
    [
        "total_loss", "tot_loss", "step_loss", "train_loss_step", "avr_loss", "cross-entropy-loss", "loss/train/total",
        "reduced_train_loss", "train/CrossEntropyLoss", "running_loss",
    ],
)  # fmt: skip
def test_loss_under_another_name_is_the_loss_too(tmp_path, name):
    lines = [f"step={step}, {name}={3.5 - step}, loss_bbox=0.5, val_loss=4.5" for step in (1, 2)]
    found, faults = series(tmp_path, lines)

    assert [(0, 1, 2.5), (0, 2, 1.5)] == found["loss"] == found[name]
    assert [f"loss is {name}"] == faults.notes


@pytest.mark.parametrize(
    ("names", "notes"),
    [
        (["loss_bbox", "loss_cls"], []),
        (["d_loss", "g_loss"], []),
        (["load-balance-loss"], []),
        (["val_loss", "test_loss"], []),
        (
            ["total_loss", "avr_loss"],
            ["no loss was chosen among avr_loss, total_loss: name one with --reimport --loss NAME"],
        ),
    ],
)
def test_part_of_a_sum_or_evaluation_is_not_the_loss(tmp_path, names, notes):
    found, faults = series(
        tmp_path, [f"step={step}, lr=1e-4, " + ", ".join(f"{n}=1.5" for n in names) for step in (1, 2)]
    )

    assert "loss" not in found
    assert notes == faults.notes


def test_loss_that_comes_later_is_not_mixed_in(tmp_path):
    lines = ["step=1, total_loss=3.5", "step=2, total_loss=3.0, loss=1.5"]
    _, first = series(tmp_path, lines[:1])
    found, faults = series(tmp_path, lines, first.choices)

    assert [(0, 1, 3.5), (0, 2, 3.0)] == found["loss"]
    assert {"loss": 1} == dict(faults.unkept)
    assert "--reimport decides again" in faults.notes[1]


def test_names_beyond_a_thousand_are_counted(tmp_path):
    path = tmp_path / "wide.jsonl"
    path.write_text(json.dumps({"step": 1, "loss": 2.5} | {f"layer_{number}": 1.0 for number in range(1010)}) + "\n")
    rows, faults = read(path)

    assert (1000, 11) == (len(rows), faults.unkept.total())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\n\nloss: 3.5\n", "line 3 has a loss and no step"),
        ("Epoch 1/3\nsaved\n", "line 1 has an epoch and no number"),
    ],
)
def test_refusal_names_the_nearest_miss(logs, text, said):
    with pytest.raises(IngestError, match=said):
        find_importer(logs.write("notes.txt", text))


def test_step_of_a_progress_bar_is_that_of_the_dictionary_after_it(logs):
    """Bars of loading and evaluation, and a bar that has not moved, give no step."""
    bars = "Loading:  50%|█ | 1/2 [00:01<00:01, 1.0s/it]\n" + "".join(
        f" 1%|▌ | {step}/1752 [00:02<1:22:01,  2.83s/it]\n{{'loss': {step / 2}, 'epoch': 0.01}}\n" for step in (10, 20)
    )
    evaluation = " 50%|█ | 4/8 [00:01<00:01, 3.0it/s]\n{'eval_loss': 1.5, 'epoch': 0.01}\n{'loss': 1.0}\n"
    logs.import_log(logs.write("train.log", bars + evaluation))
    rows = logs.query("SELECT step, name, value FROM scalars WHERE name LIKE '%loss' ORDER BY seq")

    assert [(10, "loss", 5.0), (20, "loss", 10.0), (20, "eval_loss", 1.5), (None, "loss", 1.0)] == [
        tuple(row.values()) for row in rows
    ]
    assert 1752 == logs.value("SELECT planned_steps FROM runs")


def test_line_of_an_epoch_gives_its_epoch_to_the_lines_after_it(tmp_path):
    lines = [line for e in (1, 2) for line in (f"Epoch {e}/2", "step 1 loss 2.5", "step 2 loss 2.0", "val loss: 3.5")]
    found, _ = series(tmp_path, lines)

    assert [(0, 1, 2.5), (0, 2, 2.0)] * 2 == found["loss"]
    assert [(0, 2, 3.5)] * 2 == found["eval_loss"]
    assert [1.0] * 3 + [2.0] * 3 == [value for _, _, value in found["epoch"]]


@pytest.mark.parametrize(
    "line",
    [
        "100/100 [==============================] - 2s 20ms/step - loss: {v} - val_loss: 0.5",
        "100/100 ━━━━━━━━━━━━━━━━━━━━ 2s 20ms/step - loss: {v} - val_loss: 0.5",
        "\tTrain Loss: {v} | Train PPL: 1.5\n\t Val. Loss: 0.5 |  Val. PPL: 12.5",
    ],
)
def test_numbers_on_lines_below_an_epoch_are_read(tmp_path, line):
    lines = [text for e in (1, 2, 3) for text in (f"Epoch {e}/3", line.format(v=3.5 - e))]
    found, faults = series(tmp_path, lines)

    assert [(0, e, 3.5 - e) for e in (1, 2, 3)] == found["loss"]
    assert [(0, e, 0.5) for e in (1, 2, 3)] == found["eval_loss"]
    assert not faults.unkept


TEXT = b"step 1 loss 2.5\n" * 5_000


@pytest.mark.parametrize(
    "content",
    [b"step 1 loss 2.5\0\n" * 100, b"step 1 loss 2.5 \x01\x02\x03\n" * 9, TEXT + b"\0a\n" * 20, TEXT + b"\0a" * 99],
)
def test_binary_file_is_refused_wherever_its_bytes_are(logs, content):
    with pytest.raises(IngestError, match="binary file"):
        logs.import_log(logs.write("train.log", content), kind="textlog")


def test_holes_that_a_crash_left_hide_no_line(logs):
    """The file system fills the blocks that it lost with NUL bytes."""
    rows = [b"step %d loss 2.5\n" % step for step in range(8_000)]
    hole = b"\0" * 5_000
    content = b"".join([rows[0], hole, *rows[1:6_000], rows[6_000][:-4], hole, *rows[6_001:], hole])
    report = logs.import_log(logs.write("train.log", content))

    assert (7_999, 7_999) == (report.last_step, report.records)


def test_numbers_on_indented_lines_below_a_step_are_its_record(tmp_path):
    lines = [
        line
        for step in (1, 2)
        for line in (
            f"2026-01-01 00:00:0{step}.001 node-1:0  olmo.train:908  INFO    [step={step}/500,epoch=0]",
            f"    train/CrossEntropyLoss={9.5 - step}",
            "    System/Peak GPU Memory (MB)=40,960",
            "unindented=5",
        )
    ]
    path = tmp_path / "train.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    rows, faults = read(path)

    assert [(1, 8.5), (2, 7.5)] == [(row["step"], row["value"]) for row in rows if row["name"] == "loss"]
    assert [40.96e9] * 2 == [row["value"] for row in rows if row["name"] == "System/Peak GPU Memory"]
    assert "unindented" not in {row["name"] for row in rows}
    assert all(row["ts"] for row in rows)
    assert 0 == faults.count


def test_short_first_import_does_not_number_rows_of_a_log_with_steps(logs):
    """A log whose first record has no counter has the attempts of a single import, and the message names the remedy."""
    first = '{"seed": 1, "lr": 0.001}\n'
    later = ['{"step": 10, "loss": 2.0}\n', '{"step": 20, "loss": 1.0}\n', '{"loss": 9.0}\n']
    path = logs.write("train.jsonl", first)
    logs.import_again(path)
    path.write_text("".join([first, *later]))
    report = logs.import_again(path)
    rows = logs.query("SELECT attempt, step, value FROM scalars WHERE name = 'loss' ORDER BY seq")

    assert [(0, 10, 2.0), (0, 20, 1.0), (0, None, 9.0)] == [tuple(row.values()) for row in rows]
    assert any("later records have a counter: --reimport decides again" in note for note in report.notes)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train loss: 2.50, error: 0.31, step: 10, lr: 0.1", {"train loss": 2.5, "error": 0.31, "lr": 0.1}),
        ("loss 2.5 (trainer.py:12) step 3 lr 0.1", {"loss": 2.5, "lr": 0.1}),
        ("loss: 2.5 | time 12:00:01 | 2026-01-01 00:00:00 step 3", {"loss": 2.5, "time": "12:00:01"}),
        ("node-1:0  olmo.train:908  INFO  step=3 loss=2.5", {"loss": 2.5}),
    ],
)
def test_pair_before_the_counter_is_no_prefix(line, expected):
    assert expected == parse(line).pairs


@pytest.mark.parametrize(
    ("line", "split"),
    [("[test] step 1 | loss 2.5", None), ("INFO:test:step 1 | loss 2.5", None), ("Test: [1/3] loss: 2.5", "test"),
     ("2026-01-01 00:00:00 - INFO - Test: [1/3] loss: 2.5", "test"), ("[valid] step 1 | loss 2.5", "valid")],
)  # fmt: skip
def test_split_is_the_word_before_the_counter(line, split):
    assert split == parse(line).prefix.get("split")


@pytest.mark.parametrize(
    "lines",
    [
        ["Epoch: [0] [4/30] total_loss: 2.0 lr: 0.1", "Test: [10/30] total_loss: 5.0"],
        ['{"mode": "train", "iter": 1, "total_loss": 2.0, "lr": 0.1}', '{"mode": "val", "iter": 1, "total_loss": 5}'],
    ],
)
def test_chosen_loss_of_an_evaluation_is_not_the_loss(tmp_path, lines):
    found, _ = series(tmp_path, lines)

    assert [2.0] == [value for _, _, value in found["loss"]]
    assert 5.0 in {value for name in found for _, _, value in found[name]}


@pytest.mark.parametrize("text", ["host:1:2 [0] NCCL INFO Channel 00/02 : 0 1 2 3", "No space left on device " * 30])
def test_text_before_the_first_record_does_not_decide(tmp_path, text):
    """The step is decided over records: here `iter` begins again with each epoch."""
    lines = [f"epoch {e} iter {i} step {g} total_loss 2.5" for g, (e, i) in enumerate(EPOCHS, 1)]
    found, faults = series(tmp_path, [text] * 2_500 + lines)

    assert RISING == [step for _, step, _ in found["loss"]]
    assert ["loss is total_loss"] == faults.notes


def test_events_before_the_first_number_do_not_decide(tmp_path):
    path = tmp_path / "train.jsonl"
    events = ['{"event": "data_loaded", "step": 0}\n'] * 21_000
    rows = [
        json.dumps({"epoch": e, "iter": i, "step": g, "total_loss": 2.5}) + "\n" for g, (e, i) in enumerate(EPOCHS, 1)
    ]
    path.write_text("".join([*events, *rows]))
    found, faults = read(path)

    assert RISING == [row["step"] for row in found if row["name"] == "loss"]
    assert ["loss is total_loss"] == faults.notes


def test_names_of_numbers_that_are_not_kept_are_bounded():
    faults = Faults()
    faults.unkept.update(f"name_{number}" for number in range(3_000))

    assert (1_001, 3_000) == (len(faults.unkept), faults.unkept.total())
    assert 2_000 == faults.unkept["other names"]
