"""Tests of logs with one object per line, in the dialects of training programs, and of lines without an object."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer
from rankscope_ingest.importers.jsonl import JsonLines, printed_dict


def scalars(logs, order="seq, name"):
    return [
        (row["step"], row["name"], row["value"])
        for row in logs.query(f"SELECT step, name, value FROM scalars ORDER BY {order}")
    ]


def lines(*documents):
    return "".join(json.dumps(document) + "\n" for document in documents)


def test_numbers_become_scalars_and_text_does_not(logs):
    """S3-01, S3-02: NaN and Infinity are values; null, true and text are not. Nested objects are opened."""
    report = logs.import_log(
        logs.write(
            "log.jsonl",
            lines(
                {"step": 1, "loss": 2.5, "lr": 1, "note": "warm-up", "ok": True, "nested": {"a": 1}, "l": [1, 2]},
                {"step": 2, "loss": None},
                {"global_step": 3.0, "loss": math.nan, "grad_norm": math.inf},
                {"loss": -math.inf, "timestamp": "2026-02-19T20:20:12.264373+00:00", "rank": 3},
            ),
        )
    )
    rows = logs.query("SELECT seq, step, rank, name, value FROM scalars ORDER BY seq, name, labels")

    assert [
        (0, 1, None, "l", "1.0"),
        (0, 1, None, "l", "2.0"),
        (0, 1, None, "learning_rate", "1.0"),
        (0, 1, None, "loss", "2.5"),
        (0, 1, None, "nested/a", "1.0"),
        (2, 3, None, "grad_norm", "inf"),
        (2, 3, None, "loss", "nan"),
        (3, None, 3, "loss", "-inf"),
    ] == [(r["seq"], r["step"], r["rank"], r["name"], repr(r["value"])) for r in rows]
    assert (4, 3, 0) == (report.records, report.last_step, report.malformed)
    assert 1 == logs.value("SELECT count(*) FROM scalars WHERE ts = '2026-02-19 20:20:12.264373+00'")
    assert {"loss": 1} == json.loads(logs.value("SELECT config::JSON->'$.import.null_values' FROM runs"))


def test_lines_without_an_object_are_counted_with_their_numbers(logs):
    """S3-01: noise, lists, CRLF, invalid UTF-8, an incomplete last line."""
    text = b'{"step": 1, "loss": 1}\nEpoch 1 done\n\n[1, 2]\r\n{"step": 2, "loss": 2}\r\n\xff\xfe\n{"step": 3, "lo'
    report = logs.import_log(logs.write("log.jsonl", text))

    assert (2, [2, 4, 6, 7]) == (report.records, [fault.line for fault in report.faults])
    assert "Epoch 1 done" in report.faults[0].text


def test_llama_factory_log_is_read(logs):
    """Durations in text become seconds, also with days; total_steps is the plan; the last line ends the run."""
    logs.import_log(
        logs.write(
            "trainer_log.jsonl",
            lines(
                {
                    "current_steps": 5,
                    "total_steps": 10,
                    "loss": 2.3,
                    "lr": 1e-6,
                    "percentage": 50.0,
                    "elapsed_time": "0:32:48",
                    "remaining_time": "4 days, 7:19:52",
                },
                {"current_steps": 10, "total_steps": 10, "eval_loss": 2.2},
            ),
        )
    )

    assert [
        (5, "elapsed_seconds", 1968.0),
        (5, "learning_rate", 1e-6),
        (5, "loss", 2.3),
        (5, "percentage", 50.0),
        (5, "remaining_seconds", 4 * 86400 + 7 * 3600 + 19 * 60 + 52.0),
        (10, "eval_loss", 2.2),
    ] == scalars(logs)
    assert [{"planned_steps": 10, "state": "completed"}] == logs.query("SELECT planned_steps, state FROM runs")


def test_throughput_of_llama_factory_is_in_tokens(logs):
    """This holds if the object has `total_tokens`; otherwise throughput is in samples."""
    documents = {"current_steps": 5, "throughput": 13061.0, "total_tokens": 1614784}, {"step": 6, "throughput": 12.5}
    logs.import_log(logs.write("trainer_log.jsonl", lines(*documents)))

    assert [(5, "tokens_per_second", 13061.0), (5, "tokens_total", 1614784.0), (6, "samples_per_second", 12.5)] == (
        scalars(logs)
    )


def test_ms_swift_log_is_read(logs):
    """S3-04: `"global_step/max_steps": "1/873"`, a percentage in text, units in the names of keys."""
    logs.import_log(
        logs.write(
            "logging.jsonl",
            lines(
                {
                    "loss": 0.5,
                    "memory(GiB)": 2.5,
                    "train_speed(iter/s)": 0.25,
                    "global_step/max_steps": "1/873",
                    "percentage": "0.11%",
                    "elapsed_time": "49m 19s",
                    "remaining_time": "6s",
                }
            ),
        )
    )

    assert [
        (1, "device_memory_bytes", 2.5 * 2**30),
        (1, "elapsed_seconds", 2959.0),
        (1, "loss", 0.5),
        (1, "percentage", 0.11),
        (1, "remaining_seconds", 6.0),
        (1, "steps_per_second", 0.25),
    ] == scalars(logs)
    row = logs.query("SELECT unit, labels FROM scalars WHERE name = 'device_memory_bytes'")[0]
    assert ("bytes", {"source_name": "memory(GiB)", "source_unit": "GiB"}) == (row["unit"], json.loads(row["labels"]))
    assert 873 == logs.value("SELECT planned_steps FROM runs")


def test_dictionaries_printed_by_the_trainer_are_read(logs):
    """S3-01: after progress bars and logger prefixes, with nan, tensors, and numbers as text (newer releases).

    The bar gives the step of the dictionary after it.
    """
    text = """Loading model
{'loss': 2.5, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.1}
\r 10%|#         | 1/10 [00:01<00:09,  1.0it/s]\r{'loss': '1.5', 'epoch': '0.2'}
2026-02-19 20:20:12,264 [rank3] INFO - {'loss': tensor(1.25, device='cuda:0', grad_fn=<NllLossBackward0>), 'epoch': 0.3}
{'train_runtime': 12.5, 'train_loss': 1.9, 'epoch': 1.0}
"""
    report = logs.import_log(logs.write("train.log", text))

    assert [
        (None, "epoch", "0.1"),
        (None, "grad_norm", "nan"),
        (None, "learning_rate", "1e-05"),
        (None, "loss", "2.5"),
        (1, "epoch", "0.2"),
        (1, "loss", "1.5"),
        (None, "epoch", "0.3"),
        (None, "loss", "1.25"),
        (None, "epoch", "1.0"),
        (None, "train_loss", "1.9"),
        (None, "train_runtime", "12.5"),
    ] == [(step, name, repr(value)) for step, name, value in scalars(logs)]
    assert ("jsonl", 4, 1) == (report.source_kind, report.records, report.malformed)
    assert 3 == logs.value("SELECT rank FROM scalars WHERE ts = '2026-02-19 20:20:12.264+00' AND name = 'loss'")


def test_printed_dictionary_among_json_lines_is_counted(logs):
    """Such a dictionary is another program's output of the same step and must not be stored twice."""
    text = (
        lines({"step": 1, "loss": 2})
        + "{'loss': 2.0, 'epoch': 0.1}\nnoted "
        + lines({"step": 9}, {"step": 2, "loss": 1})
    )
    report = logs.import_log(logs.write("log.jsonl", text))

    assert [(1, "loss", 2.0), (2, "loss", 1.0)] == scalars(logs)
    assert [2, 3] == [fault.line for fault in report.faults]


def test_average_over_an_epoch_is_not_the_loss_of_a_step(logs):
    """`train_loss` is the loss if there is no other. In a log with `loss` it keeps its name."""
    logs.import_log(
        logs.write("a.jsonl", lines({"step": 1, "loss": 3}, {"step": 1, "train_loss": 2, "val_loss": 4})), run="a"
    )
    logs.import_log(logs.write("b.jsonl", lines({"step": 1, "train_loss": 2}, {"step": 2, "train/loss": 1})), run="b")
    rows = logs.query(
        "SELECT run, name, value, labels->>'$.source_name' AS source FROM scalars ORDER BY run, value DESC"
    )

    assert [
        ("a", "eval_loss", 4.0, "val_loss"),
        ("a", "loss", 3.0, None),
        ("a", "train_loss", 2.0, None),
        ("b", "loss", 2.0, "train_loss"),
        ("b", "loss", 1.0, "train/loss"),
    ] == [tuple(row.values()) for row in rows]


def test_rows_of_a_validation_split_get_evaluation_names(logs):
    documents = {"step": 1, "split": "train", "loss": 2}, {"step": 1, "split": "val", "loss": 3, "acc": 0.5}
    logs.import_log(logs.write("log.jsonl", lines(*documents)))

    assert [(1, "loss", 2.0), (1, "eval_accuracy", 0.5), (1, "eval_loss", 3.0)] == scalars(logs)


def test_log_of_events_only_becomes_events(logs):
    """S4-10: starts, phases and ends with their times; the configuration becomes that of the run."""
    logs.import_log(
        logs.write(
            "metrics.jsonl",
            lines(
                {"event": "train_start", "config": {"lr": 1}, "timestamp": "2026-02-19T20:20:12+00:00"},
                {"event": "epoch_end", "epoch": 0, "loss": 1.5},
                {"event": "checkpoint_saved", "path": "/x"},
                {"event": "train_end", "timestamp": "2026-02-19T20:22:33+00:00"},
            ),
        )
    )

    assert ["launch", "phase", "checkpoint", "exit"] == [
        row["type"] for row in logs.query("SELECT type FROM events ORDER BY seq")
    ]
    assert "completed" == logs.value("SELECT details->>'$.reason' FROM events WHERE type = 'exit'")
    run = logs.query("SELECT state, config::JSON->>'$.log.lr' AS lr, epoch(ended_at - started_at) AS lasted FROM runs")
    assert [{"state": "completed", "lr": "1", "lasted": 141.0}] == run
    assert [(None, "epoch", 0.0), (None, "loss", 1.5)] == scalars(logs)


def test_gpu_utilization_is_stored_per_gpu_and_as_mean(logs):
    """S3-11: a list with one number per GPU, or one number."""
    logs.import_log(logs.write("log.jsonl", lines({"step": 1, "gpu_util": [80, 90]}, {"step": 2, "gpu_util": 91})))
    rows = logs.query("SELECT step, name, labels->>'$.gpu' AS gpu, value FROM scalars ORDER BY ALL")

    assert [
        (1, "gpu_util", "0", 80.0),
        (1, "gpu_util", "1", 90.0),
        (1, "gpu_util_mean", None, 85.0),
        (2, "gpu_util", None, 91.0),
        (2, "gpu_util_mean", None, 91.0),
    ] == [tuple(row.values()) for row in rows]


def test_restart_is_another_attempt_and_a_repeated_step_is_not(logs):
    """S4-08, S0-09: both rows of a repeated step are stored, in order of arrival."""
    documents = [{"step": step, "loss": step} for step in (1, 2, 3, 3, 2, 3, 4)]
    logs.import_log(logs.write("log.jsonl", lines(*documents)))
    rows = logs.query("SELECT attempt, step FROM scalars ORDER BY seq")

    assert [(0, 1), (0, 2), (0, 3), (0, 3), (1, 2), (1, 3), (1, 4)] == [tuple(row.values()) for row in rows]


def test_two_writers_of_one_file_are_two_attempts(logs):
    """The lines of both writers alternate; each continues with its own steps."""
    steps = [100, 10, 101, 11, 102, 12, 103, 104, 13]
    logs.import_log(logs.write("log.jsonl", lines(*({"step": step, "loss": 1} for step in steps))))
    rows = logs.query("SELECT attempt, list(step ORDER BY seq) AS steps FROM scalars GROUP BY 1 ORDER BY 1")

    assert [(0, [100, 101, 102, 103, 104]), (1, [10, 11, 12, 13])] == [tuple(row.values()) for row in rows]


def test_names_are_case_insensitive_and_may_contain_units(logs):
    """S3-15."""
    logs.import_log(logs.write("log.jsonl", lines({"Step": 1, "Loss": 2, "Step_Time": 0.5, "Data Time (ms)": 20})))

    assert [(1, "Data Time", 0.02), (1, "loss", 2.0), (1, "step_seconds", 0.5)] == scalars(logs)


def test_nested_and_slash_separated_names_are_read(logs):
    """S3-13: the formats of DeepSpeed monitors and Weights & Biases."""
    logs.import_log(
        logs.write(
            "log.jsonl",
            lines(
                {"_step": 40, "train/global_step": 7, "Train/Samples/train_loss": 2, "_timestamp": 1700000000.5},
                {"_step": 41, "train/global_step": 8, "train": {"loss": 1.5, "grad_norm": 3}},
            ),
        )
    )

    assert [
        (7, "_step", 40.0),
        (7, "loss", 2.0),
        (8, "_step", 41.0),
        (8, "grad_norm", 3.0),
        (8, "loss", 1.5),
    ] == scalars(logs)
    assert 1700000000.5 == logs.value("SELECT epoch(ts) FROM scalars WHERE step = 7 AND name = 'loss'")


def test_record_without_numbers_is_a_note(logs):
    logs.import_log(logs.write("log.jsonl", lines({"step": 1, "loss": 1}, {"step": 2, "msg": "hello"})))

    assert [{"step": 2, "type": "note", "msg": "hello"}] == logs.query(
        "SELECT step, type, details->>'$.msg' AS msg FROM events"
    )


@pytest.mark.parametrize("end", ["\n", ""])
def test_line_of_many_megabytes_is_skipped_and_counted(logs, end):
    body = b'{"step": 1, "loss": 1}\n{"step": 2, "x": "' + b"y" * (17 << 20) + b'"}\n{"step": 3, "loss": 3}'
    report = logs.import_log(logs.write("log.jsonl", body + end.encode()))

    assert [(1, "loss", 1.0), (3, "loss", 3.0)] == scalars(logs)
    assert [2] == [fault.line for fault in report.faults]


def test_source_code_with_braces_is_not_detected(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import json\n\ndef nothing():\n    return {}\n\nprint(f'{nothing()}', {'a': 1})\n")

    with pytest.raises(IngestError, match="unknown format"):
        find_importer(path)


def test_file_that_is_no_text_is_rejected(logs):
    with pytest.raises(IngestError, match="UTF-16"):
        logs.import_log(logs.write("log.jsonl", lines({"step": 1}).encode("utf-16")), kind="jsonl")
    with pytest.raises(IngestError, match="binary"):
        logs.import_log(logs.write("log.jsonl", bytes(5000)), kind="jsonl")


def test_numbers_that_overflow_are_infinite(logs):
    text = '{"step": 1, "a": ' + "9" * 5000 + ', "b": -1e999, "c": 1e308}\n{"step": 1' + "0" * 30 + ', "loss": 1}\n'
    logs.import_log(logs.write("log.jsonl", text))

    assert [(1, "a", math.inf), (1, "b", -math.inf), (1, "c", 1e308), (None, "loss", 1.0), (None, "step", 1e30)] == (
        scalars(logs)
    )


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5).map(lambda name: f"my_{name}"),
            st.none() | st.booleans() | st.integers() | st.floats(),
            min_size=1,
            max_size=4,
        ),
        max_size=8,
    ),
    st.sampled_from([json.dumps, repr]),
)
def test_every_printed_number_is_restored(tmp_path_factory, documents, spelled):
    """The number is printed as JSON and as Python prints it."""
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    path.write_text("\n".join(map(spelled, documents)), encoding="utf-8")
    faults = Faults()
    found = [[] for _ in documents]
    for block in JsonLines().read(path, faults):
        if isinstance(block, ImportedBlock) and "scalars" in block.tables:
            for row in block.tables["scalars"].to_pylist():
                found[row["record"]].append((row["name"], repr(row["value"])))
    expected = [
        [
            (name, repr(float(value)))
            for name, value in document.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        for document in documents
    ]

    assert (0, expected) == (faults.count, found)


@given(st.binary(max_size=120) | st.text(alphabet="{}[]()'\",:0123456789.eE-+naif \r\\sStep", max_size=120))
@settings(deadline=None, max_examples=examples(400))
def test_fuzzed_lines_are_read_counted_or_rejected(tmp_path_factory, text):
    body = text if isinstance(text, bytes) else text.encode()
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1}\n' + body + b"\n{" + body + b"}\n")
    with contextlib.suppress(IngestError):
        list(JsonLines().read(path, Faults()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("np.float64(1.5)", 1.5),
        ("np.int64(3)", 3),
        ("-np.float32(1.5)", -1.5),
        ("tensor(1.5, device='cuda:0')", 1.5),
        ("tensor(1.5, grad_fn=<NllLossBackward0>)", 1.5),
        ("torch.tensor([1.0, 2.0])", [1.0, 2.0]),
        ("Array(1.5, dtype=float32)", 1.5),
        ("array([1., 2.])", [1.0, 2.0]),
        ("Decimal('1.5')", "1.5"),
        ("np.inf", math.inf),
        ("-inf", -math.inf),
        ("datetime.timedelta(seconds=3)", "datetime.timedelta(seconds=3)"),
        ("AdamW", "AdamW"),
    ],
)
def test_values_printed_by_python_are_read(text, expected):
    """A value that is no number is text and does not affect the numbers of the object."""
    assert {"loss": 2.0, "x": expected} == printed_dict(f"{{'loss': 2.0, 'x': {text}}}")


def test_dictionary_without_a_number_is_no_record():
    assert printed_dict("{'optimizer': AdamW, 'model': Llama()}") is None


@pytest.mark.usual(3)
@pytest.mark.parametrize(
    ("prefix", "rank"),
    [("[rank3]: ", 3), ("[default3]:", 3), ("3: ", 3), ("[Rank 3] ", 3), ("rank=3 ", 3), ("10:00:03: ", None)],
)
def test_rank_before_an_object_is_read(logs, prefix, rank):
    logs.import_log(logs.write("train.log", f'{prefix}{{"step": 1, "loss": 2.0}}\n' * 2))

    assert [rank] == [row["rank"] for row in logs.query("SELECT DISTINCT rank FROM scalars")]


@pytest.mark.parametrize(
    "text",
    [
        "{" * 5000,
        "__import__('os').system('true')",
        "{'a': __import__('os')}",
        "{'a': 1 + 1}",
        "{**{}}",
        "{'a': 1, **b}",
        "{1, 2}",
    ],
)
def test_printed_dictionary_is_never_evaluated(text):
    assert printed_dict(text) is None


def test_number_of_the_record_is_the_step_of_a_log_without_steps(logs):
    """S3-04: rows are counted per rank. Blank lines, other text and reports of a start are no rows."""
    rows = {"event": "train_start"}, {"loss": 2.0}, {"loss": "1.9", "lr": 1}, {"note": "x"}, {"loss": 1.5, "rank": 1}
    path = logs.write("log.jsonl", lines(*rows[:3]) + "\nnoise\n" + lines(*rows[3:], {"loss": 1.8}))
    logs.import_log(path)

    assert [(None, 1, 2.0), (None, 2, 1.9), (1, 1, 1.5), (None, 3, 1.8)] == [
        tuple(row.values())
        for row in logs.query("SELECT rank, step, value FROM scalars WHERE name = 'loss' ORDER BY seq")
    ]
    assert "number of the record" == logs.value("SELECT config::JSON->>'$.import.step' FROM runs")


def test_record_without_a_step_has_none_in_a_log_with_steps(logs):
    logs.import_log(logs.write("log.jsonl", lines({"model_size": 7}, {"step": 5, "loss": 2}, {"epoch_loss": 1})))

    assert [(None, "model_size", 7.0), (5, "loss", 2.0), (None, "epoch_loss", 1.0)] == scalars(logs)


def test_grown_log_without_steps_continues_its_numbers(logs):
    path = logs.write("log.jsonl", lines({"loss": 2.0}, {"loss": 1.9}))
    logs.import_again(path)
    path.write_text(lines({"loss": 2.0}, {"loss": 1.9}, {"loss": 1.8}))
    logs.import_again(path)

    assert [(1, "loss", 2.0), (2, "loss", 1.9), (3, "loss", 1.8)] == scalars(logs)


@pytest.mark.usual(3)
@pytest.mark.parametrize(
    ("spelled", "value"),
    [
        ("nan", "nan"),
        ("-nan", "nan"),
        ("NAN", "nan"),
        ("-nan(ind)", "nan"),
        ("inf", "inf"),
        ("+inf", "inf"),
        ("-inf", "-inf"),
        ("-INFINITY", "-inf"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_nan_and_infinity_are_read_in_any_spelling(logs, spelled, value, prefix):
    """Other JSON values on the line, and the same words in a text, do not matter."""
    text = f'{prefix}{{"step": 1, "ok": true, "t": "x: nan, \\"inf, y", "loss": {spelled}, "l": [{spelled}, 1]}}\n'
    report = logs.import_log(logs.write("log.jsonl", f'{prefix}{{"step": 0, "loss": 1}}\n{text}'))

    assert [value] == [repr(row[2]) for row in scalars(logs) if row[:2] == (1, "loss")]
    assert 0 == report.malformed


def test_ambiguous_number_is_not_stored_and_counted(logs):
    """`1,234` is a count in tokens, and a number with a decimal comma or a thousands separator elsewhere."""
    rows = (
        {"step": 1, "loss": "0,439"},
        {"step": "1,002", "loss": "12,5", "tok/s": "1,234"},
        {"step": 1003, "loss": "2,439"},
    )
    report = logs.import_log(logs.write("log.jsonl", lines(*rows)))

    assert [(1, "loss", 0.439), (1002, "loss", 12.5), (1002, "tokens_per_second", 1234.0)] == scalars(logs)
    assert [(3, "loss: 2,439 may have a decimal comma and is not stored")] == [(f.line, f.text) for f in report.faults]


@pytest.mark.parametrize("count", [1, 3, 100, 20 << 20])
def test_row_behind_nul_bytes_is_read(logs, count):
    """A crash leaves NUL bytes behind an incomplete row. The next program continues on the same line."""
    text = (
        lines({"step": 1, "loss": 1.0}) + '{"step": 2, "lo' * (count > 3) + "\0" * count + lines({"step": 3, "loss": 3})
    )
    logs.import_log(logs.write("log.jsonl", text))

    assert [(1, "loss", 1.0), (3, "loss", 3.0)] == scalars(logs)


def test_lone_carriage_returns_separate_rows(logs):
    """Also between lines that end with a line feed. A file without line feeds may be longer than a line."""
    many = "".join(json.dumps({"step": step, "loss": 1.0}) + "\r" for step in range(3000))
    logs.import_log(logs.write("a.jsonl", many), run="a")
    logs.import_log(logs.write("b.jsonl", lines({"step": 1}) + many[:100].rpartition("\r")[0] + "\n"), run="b")

    assert [{"run": "a", "n": 3000}, {"run": "b", "n": 4}] == logs.query(
        "SELECT run, count(*) AS n FROM scalars GROUP BY run ORDER BY run"
    )


def test_lines_longer_than_the_detection_window_are_recognized(logs):
    text = "launching\n" + lines(*({"step": step, "loss": 1, "note": "x" * 100_000} for step in range(3)))
    report = logs.import_log(logs.write("log.jsonl", text))

    assert ("jsonl", 3) == (report.source_kind, report.records)


def test_objects_in_lists_are_read_by_their_places(logs):
    """A list that is too long or mixed, and the history in the last row of ms-swift, are counted."""
    row = {
        "step": 1,
        "groups": [{"lr": 1}, {"lr": 2, "wd": 3}],
        "matrix": [[1, 2], [3]],
        "gaps": [1, None, 3],
        "long": list(range(300)),
        "mixed": [1, "a"],
        "tags": ["a"],
        "log_history": [{"loss": 2.0}],
    }
    logs.import_log(logs.write("log.jsonl", lines({"step": 0}, row)))

    assert [
        ("gaps", 1.0),
        ("gaps", 3.0),
        ("groups/0/lr", 1.0),
        ("groups/1/lr", 2.0),
        ("groups/1/wd", 3.0),
        ("matrix/0", 1.0),
        ("matrix/0", 2.0),
        ("matrix/1", 3.0),
    ] == [(name, value) for _, name, value in scalars(logs, "name, labels")]
    assert {"long": 1, "mixed": 1, "log_history": 1} == json.loads(
        logs.value("SELECT config::JSON->'$.import.omitted_values' FROM runs")
    )


@pytest.mark.parametrize("rows", [0, 20, 4000])
def test_last_row_of_ms_swift_is_a_row_of_json_lines(logs, rows):
    """It contains `log_history`, a speed and a memory without a unit, which is in GiB like those before it."""
    step = {"loss": 2.0, "global_step/max_steps": "1/20", "memory(GiB)": 2.5, "train_speed(iter/s)": 0.5}
    last = {
        "train_runtime": 10.0, "train_loss": 3.0, "train_speed(iter/s)": 0.25, "global_step": 20, "memory": 17.0,
        "log_history": [{"loss": 2.0, "step": 1}],
    }  # fmt: skip
    report = logs.import_log(logs.write("logging.jsonl", lines(step, *[step] * rows, last)))

    assert ("jsonl", rows + 2) == (report.source_kind, report.records)
    assert [
        ("device_memory_bytes", 17.0 * 2**30),
        ("steps_per_second", 0.25),
        ("train_loss", 3.0),
        ("train_runtime", 10.0),
    ] == [(name, value) for step, name, value in scalars(logs) if step == 20]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"memory": 2389, "data_time": 0.02}, ("device_memory_bytes", 2389 * 2.0**20)),
        ({"memory": 2.5, "train_speed(s/it)": 3}, ("device_memory_bytes", 2.5 * 2.0**30)),
        ({"memory": "2.5GiB"}, ("device_memory_bytes", 2.5 * 2.0**30)),
        ({"memory": 2.5}, ("memory", 2.5)),
    ],
)
def test_memory_without_a_unit_is_in_the_unit_of_its_program(logs, row, expected):
    logs.import_log(logs.write("log.jsonl", lines({"step": 1, **row})))

    assert expected in [found[1:] for found in scalars(logs)]
