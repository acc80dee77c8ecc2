"""Tests of the Trainer's state as an archive, of truncation anywhere, and of a newer log; `cases` has its entries."""

from __future__ import annotations

import json
import os
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer, newer_log
from rankscope_ingest.importers.trainer_state import TrainerState

STATE = json.dumps({"global_step": 0, "log_history": [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 2.5}]})


def test_time_of_a_checkpoint_is_that_of_its_file(logs):
    """The time of the run is not the time of the import, although the entries have no time."""
    path = logs.write("trainer_state.json", STATE)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    logs.import_log(path)

    assert 1_700_000_000 == logs.value("SELECT epoch(ended_at) FROM runs")
    assert 0 == logs.value("SELECT count(ts) FROM scalars")


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
        archive.writestr("run/checkpoint-2/trainer_state.json", STATE)
        archive.writestr("../../evil.txt", "never written anywhere")
    logs.import_log(path)

    assert [1.5, 2.5] == logs.value("SELECT list(value ORDER BY step) FROM scalars WHERE name = 'loss'")
    assert not (logs.folder.parent / "evil.txt").exists()


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_file_truncated_anywhere_gives_a_prefix_of_the_history(tmp_path_factory, data):
    """The entries are a prefix of the history and never a wrong value; the complete file gives all of them."""
    entries = [{"step": n, "loss": n * 1.25, "é": "ü\n"} for n in range(5)]
    text = json.dumps({"a": [1, {"b": 2}], "log_history": entries, "z": 1}, ensure_ascii=False).encode()
    cut = data.draw(st.integers(2, len(text)))
    path = tmp_path_factory.getbasetemp() / "trainer_state.json"
    path.write_bytes(text[:cut])
    blocks = [item for item in TrainerState().read(path, Faults()) if isinstance(item, ImportedBlock)]
    rows = [row for block in blocks for row in block.tables["scalars"].to_pylist()]
    losses = [row["value"] for row in rows if row["name"] == "loss"]

    assert [n * 1.25 for n in range(5)][: len(losses)] == losses
    assert cut < len(text) or len(losses) == 5


@pytest.mark.parametrize("text", ["[" * 100_000, '{"log_history": [' + '{"a":' * 100_000, '{"' + "x" * 200_000])
def test_deep_nesting_and_long_text_are_counted_as_faults(logs, text):
    report = logs.import_log(logs.write("trainer_state.json", text), kind="trainer_state")

    assert (0, True) == (report.records, report.malformed > 0)


def test_folder_without_states_is_not_detected(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(IngestError):
        find_importer(tmp_path)


@pytest.mark.parametrize("folder", ["run", "run/checkpoint-10"])
def test_newer_log_next_to_checkpoints_is_found(logs, folder):
    """Only a log with later steps than the checkpoints."""
    entries = [{"step": step, "loss": 1.0} for step in (1, 10)]
    path = logs.write("run/checkpoint-10/trainer_state.json", json.dumps({"log_history": entries}))
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
