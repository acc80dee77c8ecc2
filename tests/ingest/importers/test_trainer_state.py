"""Tests of the Trainer's state as a file, a checkpoint, a run or an archive: NaN, truncation, damage, branches."""

from __future__ import annotations

import contextlib
import json
import math
import os
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import (
    Faults,
    ImportedBlock,
    find_importer,
    import_records,
    known_imports,
    newer_log,
    stored_scalars,
)
from rankscope_ingest.importers.trainer_state import TrainerState
from rankscope_storage.api.store import Store
from rankscope_storage.connection import connect


def state(entries, **top):
    return json.dumps({"global_step": 0, "log_history": entries, "max_steps": 100, **top}, indent=2)


def steps(*numbers, base=1.0):
    return [{"step": step, "loss": base + step / 100, "epoch": step / 100} for step in numbers]


def history(logs):
    rows = logs.query("SELECT attempt, step, value FROM scalars WHERE name = 'loss' ORDER BY attempt, step")
    return [(row["attempt"], row["step"], round(row["value"], 4)) for row in rows]


def test_nan_and_infinity_are_values_and_null_is_absent(logs):
    """S1-18: the Trainer shows a NaN as a NaN gradient norm with an ordinary loss; this is an anomaly here."""
    text = (
        '{"log_history": [{"step": 1, "loss": NaN, "grad_norm": -Infinity}, {"step": 2, "loss": 0.0, "grad_norm": NaN},'
    )
    logs.import_log(logs.write("trainer_state.json", text + '{"step": 3, "loss": null}], "best_metric": NaN}'))
    rows = logs.query("SELECT step, name, value FROM scalars ORDER BY step, name")

    assert [(1, "grad_norm", "-inf"), (1, "loss", "nan"), (2, "grad_norm", "nan"), (2, "loss", "0.0")] == [
        (row["step"], row["name"], repr(row["value"])) for row in rows
    ]
    assert "NaN" == logs.value("SELECT config::JSON->>'$.trainer_state.best_metric' FROM runs")
    assert [1, 1, 2] == [
        row["step"] for row in logs.query("SELECT step FROM events WHERE type = 'anomaly' ORDER BY step")
    ]


def test_absent_gradient_norm_is_null(logs):
    """S1-10: old releases of transformers do not log it."""
    logs.import_log(logs.write("trainer_state.json", state(steps(1, 2))))

    assert 0 == logs.value("SELECT count(*) FROM scalars WHERE name IN ('grad_norm', 'learning_rate')")


def test_last_entry_keeps_its_own_names(logs):
    """S1-10: averages over the run are not the loss of its last step."""
    summary = {"step": 3, "train_runtime": 60.5, "train_loss": 1.5, "total_flos": 1e18, "train_samples_per_second": 9.0}
    logs.import_log(logs.write("trainer_state.json", state([*steps(1, 2), summary])))
    rows = logs.query("SELECT name, value, unit FROM scalars WHERE step = 3 ORDER BY name")

    assert [
        ("total_flos", 1e18, None),
        ("train_loss", 1.5, None),
        ("train_runtime", 60.5, "seconds"),
        ("train_samples_per_second", 9.0, "samples/s"),
    ] == [(row["name"], row["value"], row["unit"]) for row in rows]
    assert "completed" == logs.value("SELECT state FROM runs")


def test_evaluation_sets_are_labels_of_one_quantity(logs):
    """S1-17, S1-18: the Trainer writes `eval_<set>_runtime` for each set; custom keys are kept."""
    entry = {
        "step": 5,
        "eval_math_loss": 1.0,
        "eval_math_runtime": 2.0,
        "eval_code_loss": 3.0,
        "eval_code_runtime": 4.0,
    }
    logs.import_log(logs.write("trainer_state.json", state([{**entry, "eval_moe_aux_loss": 0.1}])))
    rows = logs.query("SELECT name, labels->>'$.dataset' AS which, value FROM scalars ORDER BY ALL")

    assert [
        ("eval_loss", "code", 3.0),
        ("eval_loss", "math", 1.0),
        ("eval_moe_aux_loss", None, 0.1),
        ("eval_runtime", "code", 4.0),
        ("eval_runtime", "math", 2.0),
    ] == [(row["name"], row["which"], row["value"]) for row in rows]


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ({"global_step": 100, "max_steps": 100}, ("completed", 100)),
        ({"global_step": 50, "max_steps": 100}, ("stopped", 100)),
        ({"global_step": 50, "max_steps": 0}, ("stopped", None)),
        ({"global_step": 50, "max_steps": -1, "num_train_epochs": 9223372036854775807}, ("stopped", None)),
    ],
)
def test_state_and_plan_of_the_run(logs, top, expected):
    """S1-18: zero divisors, and plans given in steps."""
    logs.import_log(logs.write("trainer_state.json", state(steps(10), **top)))
    row = logs.query("SELECT state, planned_steps FROM runs")[0]

    assert expected == (row["state"], row["planned_steps"])


def test_time_of_a_checkpoint_is_that_of_its_file(logs):
    """The time of the run is not the time of the import, although the entries have no time."""
    import os

    path = logs.write("trainer_state.json", state(steps(1)))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    logs.import_log(path)

    assert 1_700_000_000 == logs.value("SELECT epoch(ended_at) FROM runs")
    assert 0 == logs.value("SELECT count(ts) FROM scalars")


def test_run_with_its_checkpoints_is_one_history(logs):
    """S1-02, S1-08, S1-09: checkpoints ordered by number (1000 after 999), others ignored, the final state last."""
    logs.write("out/checkpoint-999/trainer_state.json", state(steps(1, 2), global_step=999))
    logs.write("out/checkpoint-1000/trainer_state.json", state(steps(1, 2, 3), global_step=1000, max_steps=2000))
    logs.write("out/checkpoint-best/trainer_state.json", state(steps(7)))
    logs.write("out/checkpoint-999/README.md", "no state")
    report = logs.import_log(logs.folder / "out")

    assert [(0, 1, 1.01), (0, 2, 1.02), (0, 3, 1.03)] == history(logs)
    assert 3 == report.records
    assert 1000 == logs.value("SELECT (config::JSON->>'$.trainer_state.global_step')::INT FROM runs")


def test_checkpoint_that_disagrees_is_another_attempt(logs):
    """S1-18: it belongs to an earlier training in the same folder, or to one resumed from an earlier checkpoint."""
    logs.write("out/checkpoint-2/trainer_state.json", state(steps(1, 2)))
    logs.write("out/checkpoint-4/trainer_state.json", state(steps(1, 2, 3, 4)))
    logs.write("out/checkpoint-5/trainer_state.json", state([*steps(1, 2), *steps(3, 5, base=7.0)]))
    logs.import_log(logs.folder / "out")

    assert [(0, 1, 1.01), (0, 2, 1.02), (0, 3, 1.03), (0, 4, 1.04), (1, 3, 7.03), (1, 5, 7.05)] == history(logs)
    message = logs.value("SELECT message FROM events WHERE type = 'note'")
    assert "checkpoint-5/trainer_state.json differs from earlier checkpoints" in message


def test_recorded_checkpoints_of_one_run_repeat_each_other(logs, data):
    """Four checkpoints, 1,200 entries in all, one history of 700."""
    for number in (500, 1500, 3000, 7000):
        source = data / "trainer_state" / f"sygoat_mistral-translator_checkpoint-{number}.json"
        logs.write(f"out/checkpoint-{number}/trainer_state.json", source.read_bytes())
    report = logs.import_log(logs.folder / "out")

    assert (700, 7000) == (report.records, report.last_step)
    assert 700 == logs.value("SELECT count(*) FROM scalars WHERE name = 'loss'")


def test_archive_of_a_checkpoint_is_read(logs):
    """S1-09."""
    path = logs.folder / "run.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run/checkpoint-2/trainer_state.json", state(steps(1, 2)))
        archive.writestr("../../evil.txt", "never written anywhere")
    logs.import_log(path)

    assert [(0, 1, 1.01), (0, 2, 1.02)] == history(logs)
    assert not (logs.folder.parent / "evil.txt").exists()


def test_folder_of_several_runs_names_them(logs):
    logs.write("out/a/trainer_state.json", state(steps(1)))
    logs.write("out/b/checkpoint-1/trainer_state.json", state(steps(1)))
    with pytest.raises(IngestError, match=r"contains 2 runs .*import them one at a time"):
        logs.import_log(logs.folder / "out")


def test_bare_list_of_entries_is_read(logs):
    """S1-09."""
    logs.import_log(logs.write("history.json", json.dumps(steps(1, 2))))

    assert [(0, 1, 1.01), (0, 2, 1.02)] == history(logs)


def test_truncated_file_gives_complete_entries_and_a_fault(logs):
    """S1-09: the file is truncated inside a number, which must not be read as a shorter number."""
    whole = state(steps(1, 2, 3))
    cut = whole[: whole.index("1.03") + 3]
    report = logs.import_log(logs.write("trainer_state.json", cut))

    assert [(0, 1, 1.01), (0, 2, 1.02)] == history(logs)
    assert 1 == report.malformed
    assert "ends inside a value, after 2 whole entries" in report.faults[0].text
    assert "true" == logs.value("SELECT config::JSON->>'$.import.cut' FROM runs")


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_file_truncated_anywhere_gives_a_prefix_of_the_history(tmp_path_factory, data):
    """The entries are a prefix of the history and never a wrong value; the complete file gives all of them."""
    entries = [{"step": n, "loss": n * 1.25, "é": "ü\n"} for n in range(5)]
    text = json.dumps({"a": [1, {"b": 2}], "log_history": entries, "z": 1}, ensure_ascii=False).encode()
    cut = data.draw(st.integers(2, len(text)))
    path = tmp_path_factory.getbasetemp() / "trainer_state.json"
    path.write_bytes(text[:cut])
    losses = _losses(path)

    assert [n * 1.25 for n in range(5)][: len(losses)] == losses
    assert cut < len(text) or len(losses) == 5


def test_damaged_entry_is_counted_and_skipped(logs):
    text = state(steps(1, 2, 3)).replace('"loss": 1.02', '"loss": ,1.02')
    report = logs.import_log(logs.write("trainer_state.json", text))

    assert [(0, 1, 1.01), (0, 3, 1.03)] == history(logs)
    assert (1, 100) == (report.malformed, logs.value("SELECT planned_steps FROM runs"))
    assert 1 < report.faults[0].line


def test_entries_without_numbers_are_kept(logs):
    """Every entry is a record; an entry with text only is a note."""
    logs.import_log(logs.write("trainer_state.json", state([{"step": 1, "note": "warm-up"}, *steps(2)])))

    assert [(1, "the record contains no number: its content is in details"), (2, None)] == [
        (row["step"], row["message"])
        for row in logs.query(
            "SELECT step, message FROM events WHERE type = 'note' UNION ALL SELECT step, NULL FROM scalars "
            "WHERE name = 'loss' ORDER BY step"
        )
    ]


def test_hostile_numbers_and_names(logs):
    """Numbers beyond float64, thousands of digits, keys that are no valid text."""
    text = '{"log_history": [{"step": 1, "a": 1e999, "b": ' + "9" * 5000 + ', "\\ud800": 1, "c": -1e400}]}'
    logs.import_log(logs.write("trainer_state.json", text))
    rows = logs.query("SELECT name, value FROM scalars ORDER BY name")

    assert [("?", 1.0), ("a", math.inf), ("b", math.inf), ("c", -math.inf)] == [(r["name"], r["value"]) for r in rows]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"log_history": [' + '{"a":' * 100_000, '{"' + "x" * 200_000])
def test_deep_nesting_and_long_text_are_counted_as_faults(logs, text):
    report = logs.import_log(logs.write("trainer_state.json", text), kind="trainer_state")

    assert (0, True) == (report.records, report.malformed > 0)


def test_file_without_a_state_is_rejected(logs):
    with pytest.raises(IngestError, match="not a trainer_state"):
        logs.import_log(logs.write("notes.txt", "hello"), kind="trainer_state")
    with pytest.raises(IngestError, match="UTF-16"):
        logs.import_log(logs.write("trainer_state.json", state(steps(1)).encode("utf-16")), kind="trainer_state")


def test_byte_order_mark_and_crlf_do_not_matter(logs):
    text = b"\xef\xbb\xbf" + state(steps(1)).replace("\n", "\r\n").encode()
    logs.import_log(logs.write("trainer_state.json", text))

    assert [(0, 1, 1.01)] == history(logs)


def test_folder_without_states_is_not_detected(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(IngestError):
        find_importer(tmp_path)


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:0123456789.eE-+NaIfinity \n\\u', max_size=200))
@settings(deadline=None, max_examples=examples(300))
def test_fuzzed_state_is_read_or_rejected(tmp_path_factory, text):
    """Any content gives entries, faults or IngestError; no other error and no endless loop."""
    body = text if isinstance(text, bytes) else b'{"log_history": [{"step": 1, "loss": 1.5},' + text.encode()
    path = tmp_path_factory.getbasetemp() / "trainer_state.json"
    path.write_bytes(body)
    with contextlib.suppress(IngestError):
        list(TrainerState().read(path, Faults()))


def _losses(path):
    blocks = [item for item in TrainerState().read(path, Faults()) if isinstance(item, ImportedBlock)]
    rows = [row for block in blocks for row in block.tables["scalars"].to_pylist()]
    return [row["value"] for row in rows if row["name"] == "loss"]


def test_rewritten_state_adds_only_new_entries(logs):
    """Contract 2: the Trainer rewrites the whole file, including its beginning, and keeps copies in checkpoints."""
    stored = []
    for count in (2, 4, 4):
        path = logs.write("trainer_state.json", state(steps(*range(count)), global_step=count))
        stored.append(logs.import_again(path).rows_stored)
    logs.write("out/checkpoint-5/trainer_state.json", state(steps(*range(5)), global_step=5))
    stored.append(logs.import_again(logs.folder / "out" / "checkpoint-5").rows_stored)

    assert [4, 4, 0, 2] == stored
    assert [(0, step, 1.0 + step / 100) for step in range(5)] == history(logs)


def test_other_training_with_the_same_name_is_another_attempt(logs):
    """S4-08: its first entry is different, and its steps begin again."""
    logs.import_again(logs.write("trainer_state.json", state(steps(1, 2))))
    logs.import_again(logs.write("trainer_state.json", state(steps(1, 2, 3, base=5.0))))

    assert [(0, 1, 1.01), (0, 2, 1.02), (1, 1, 5.01), (1, 2, 5.02), (1, 3, 5.03)] == history(logs)


def _entries(first, last, loss):
    return [{"step": step, "loss": loss + step / 1000, "grad_norm": float("nan")} for step in range(first, last + 1)]


_OLD = _entries(1, 50, 1.0)
_RESUMED = _OLD[:30] + _entries(31, 80, 9.0)
_RESUMED_AGAIN = _RESUMED[:60] + _entries(61, 90, 20.0)


@pytest.mark.usual(2)
@pytest.mark.parametrize(
    ("histories", "expected"),
    [
        ([_OLD, _RESUMED], [(0, 1, 30), (1, 31, 80)]),
        ([_RESUMED, _OLD], [(0, 1, 30), (1, 31, 50)]),
        ([_OLD, _RESUMED, _RESUMED_AGAIN], [(0, 1, 30), (1, 31, 60), (2, 61, 90)]),
        ([_OLD[:40], _OLD, _RESUMED[:40], _RESUMED], [(0, 1, 30), (1, 31, 80)]),
        ([_OLD, _RESUMED, _OLD[:20], _RESUMED[:35]], [(0, 1, 30), (1, 31, 80)]),
        ([_OLD, [*_OLD[:30], {**_OLD[30], "loss": float("inf")}]], [(0, 1, 30), (1, 31, 31)]),
    ],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_state_of_a_resumed_training_is_the_next_attempt(tmp_path, histories, expected, in_place):
    """The curve has the values of one file up to the step of the checkpoint, and those of the resumed file from it."""
    values = {}
    with (
        Store.open(tmp_path / "store", create=True).claim(owner="test") as writer,
        connect(tmp_path / "store") as connection,
    ):
        for number, history in enumerate(histories):
            path = tmp_path / ("state" if in_place else f"state-{number}") / "trainer_state.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"log_history": history}))
            for _ in range(2):  # the second import of a file adds nothing
                known, stored = known_imports(connection, "r"), stored_scalars(connection, "r")
                report = import_records(path, writer, find_importer(path), run="r", known=known, stored=stored)
            assert 0 == report.rows_stored
            values |= {entry["step"]: entry["loss"] for entry in history}
        curve = connection.query("SELECT attempt, step, loss FROM loss_curve ORDER BY step").to_pylist()
        spans = connection.query("SELECT attempt, min(step), max(step) FROM loss_curve GROUP BY 1 ORDER BY 1")
        events = connection.query("SELECT message FROM events WHERE type = 'import' AND severity = 'warning'")

    assert expected == [tuple(row.values()) for row in spans.to_pylist()]
    assert [values[row["step"]] for row in curve] == [row["loss"] for row in curve]
    assert len(expected) - 1 == events.num_rows


def test_nan_in_lower_case_does_not_lose_the_entry(logs):
    text = '{"best": nan, "log_history": [{"step": 1, "loss": 2.0, "grad_norm": nan}, {"step": 2, "loss": -inf}]}'
    report = logs.import_log(logs.write("trainer_state.json", text))

    assert [(1, "grad_norm", "nan"), (1, "loss", "2.0"), (2, "loss", "-inf")] == [
        (row["step"], row["name"], repr(row["value"]))
        for row in logs.query("SELECT step, name, value FROM scalars ORDER BY step, name")
    ]
    assert 0 == report.malformed


@pytest.mark.parametrize("folder", ["run", "run/checkpoint-10"])
def test_newer_log_next_to_checkpoints_is_found(logs, folder):
    """Only a log with later steps than the checkpoints."""
    path = logs.write("run/checkpoint-10/trainer_state.json", state(steps(1, 10)))
    log = logs.write("run/logging.jsonl", "".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(1, 16)))
    other = logs.write("run/predictions.jsonl", '{"prompt": "x"}\n')
    os.utime(other, (path.stat().st_mtime + 20,) * 2)
    older, newer = path.stat().st_mtime - 10, path.stat().st_mtime + 10
    found = []
    for moment in (older, newer):
        os.utime(log, (moment, moment))
        found.append(newer_log(logs.folder / folder))
    log.write_text('{"step": 10, "loss": 1}\n')
    os.utime(log, (newer, newer))

    assert [None, log, None] == [*found, newer_log(logs.folder / folder)]
