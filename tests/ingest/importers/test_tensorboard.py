"""Tests of event files of any writer: rows, restarts, truncation and damage; no row is stored twice."""

from __future__ import annotations

import json
import os
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from torch.utils.tensorboard import SummaryWriter, summary

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer
from rankscope_ingest.importers.common.importer import SETTLED_SECONDS
from rankscope_ingest.importers.tensorboard import TensorBoard

NAME = "events.out.tfevents.1700000000.host.1.0"


def framed(data):
    length = len(data).to_bytes(8, "little")
    crcs = [masked_crc32c(part).to_bytes(4, "little") for part in (length, data)]
    return length + crcs[0] + data + crcs[1]


def scalar(tag, value, step, wall_time=1700000000.5):
    return Event(step=step, wall_time=wall_time, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def file_of(*events):
    """Return the bytes of an event file, made of TensorFlow's messages and checksums."""
    first = Event(file_version="brain.Event:2", wall_time=1700000000.0)
    return b"".join(framed(event.SerializeToString()) for event in (first, *events))


@pytest.fixture
def import_log(logs):
    """Return a function that writes a complete event file, and imports it or the given folder."""

    def bring_in(content, name=NAME, path=None, **options):
        if content is not None:
            written = logs.write(name, content)
            os.utime(written, (0, time.time() - 2 * SETTLED_SECONDS))
        return logs.import_log(logs.folder / (path or name), **options)

    return bring_in


def test_numbers_become_scalars_with_stored_names(logs, import_log):
    report = import_log(
        file_of(
            scalar("train/loss", 2.5, 1),
            scalar("train/learning_rate", 0.5, 1),
            scalar("eval/loss", 3.5, 1),
            scalar("my/own", float("nan"), 1),
            scalar("lm loss", float("inf"), 2),
        )
    )
    rows = logs.query("SELECT step, name, value, unit, labels, epoch_us(ts) AS us, ts_origin FROM scalars ORDER BY seq")

    assert [
        (1, "loss", "2.5", '{"source_name":"train/loss"}'),
        (1, "learning_rate", "0.5", '{"source_name":"train/learning_rate"}'),
        (1, "eval_loss", "3.5", '{"source_name":"eval/loss"}'),
        (1, "my/own", "nan", None),
        (2, "loss", "inf", '{"source_name":"lm loss"}'),
    ] == [(row["step"], row["name"], repr(row["value"]), row["labels"]) for row in rows]
    assert {(1700000000500000, "file")} == {(row["us"], row["ts_origin"]) for row in rows}
    assert ("tensorboard", 5, 2, 0) == (report.source_kind, report.records, report.last_step, report.malformed)


def test_event_files_of_torch_are_read(logs, import_log):
    """torch.utils.tensorboard.SummaryWriter writes a folder, as in user code."""
    with SummaryWriter(logs.folder / "runs") as writer:
        for step in range(3):
            writer.add_scalar("Loss/train", 1.0 / (step + 1), step, walltime=1700000000 + step)
            writer.add_scalars("acc", {"a": 0.5, "b": 0.25}, step)
        writer.add_hparams({"lr": 0.1}, {"hparam/score": 0.9})
    import_log(None, path="runs")
    found = logs.query("SELECT name, labels, count(*) AS n, min(value) AS low FROM scalars GROUP BY ALL ORDER BY ALL")

    assert {
        ("loss", 3, np.float32(1 / 3)),
        ("accuracy", 3, 0.5),
        ("accuracy", 3, 0.25),
        ("hparam/score", 1, np.float32(0.9)),
    } == {(row["name"], row["n"], row["low"]) for row in found}
    assert 4 == len(found)


def test_newer_summaries_of_every_number_type_are_read(logs, import_log):
    """`tf.summary.scalar` and `add_scalar(new_style=True)` write tensors."""
    events = [Event(step=1, summary=summary.scalar("modern", 1.25, new_style=True))]
    cases = {"half": (19, 0.5), "bfloat": (14, 1.5), "double": (2, 0.1), "long": (9, -7), "unsigned": (22, 7)}
    for name, (dtype, value) in cases.items():
        event = Event(step=1)
        tensor = event.summary.value.add(tag=name).tensor
        tensor.dtype = dtype
        if name in {"half", "bfloat"}:
            bits = np.float16(value).view(np.uint16) if name == "half" else np.float32(value).view(np.uint32) >> 16
            tensor.half_val.append(int(bits))
        else:
            getattr(tensor, {2: "double_val", 9: "int64_val", 22: "uint32_val"}[dtype]).append(value)
        events.append(event)
    content = Event(step=1)
    tensor = content.summary.value.add(tag="content").tensor
    tensor.dtype, tensor.tensor_content = 1, np.float32(2.5).tobytes()
    import_log(file_of(*events, content))

    assert {"modern": 1.25, "content": 2.5, **{name: value for name, (_, value) in cases.items()}} == {
        row["name"]: row["value"] for row in logs.query("SELECT name, value FROM scalars")
    }


def test_texts_become_notes_and_images_are_skipped(logs, import_log):
    picture = Event(step=1)
    picture.summary.value.add(tag="image").image.encoded_image_string = b"png"
    report = import_log(
        file_of(
            Event(step=1, summary=summary.text("args", "--lr 1e-4")),
            Event(step=1, summary=summary.histogram("weights", np.arange(9.0), "auto")),
            picture,
        )
    )
    notes = logs.query("SELECT step, message, details FROM events WHERE type = 'note'")

    assert [{"step": 1, "message": "--lr 1e-4", "details": '{"tag": "args/text_summary"}'}] == notes
    assert (2, 0) == (report.passed_over, report.malformed)


def test_msprobe_tags_become_rows_of_tensor_stats(logs, import_log):
    """The files of msprobe have an event per number. The numbers of one step and tensor become one row."""
    events = []
    for step in (0, 1):
        for op, value in (("norm", 2.0 + step), ("min", -1.0), ("nans", 3.0)):
            events.append(scalar(f"0:layers.0.input:1/rank2/actv_{op}", value, step))
        events.append(scalar("lm loss", 5.0, step))
        events.append(scalar("1:layers.0.weight/rank2/post_grad_norm", 7.0, step))
    import_log(file_of(*events))
    rows = logs.query(
        'SELECT step, rank, kind, tensor, vpp_stage, micro_step, norm, "min", mean, nans FROM tensor_stats ORDER BY ALL'
    )

    assert [
        (0, 2, "act_in", "layers.0", 0, 1, 2.0, -1.0, None, 3),
        (0, 2, "grad_reduced", "layers.0.weight", 1, None, 7.0, None, None, None),
        (1, 2, "act_in", "layers.0", 0, 1, 3.0, -1.0, None, 3),
        (1, 2, "grad_reduced", "layers.0.weight", 1, None, 7.0, None, None, None),
    ] == [tuple(row.values()) for row in rows]
    assert 2 == logs.value("SELECT count(*) FROM scalars")


def test_folders_of_msprobes_conversion_give_rank_and_family(logs, import_log):
    content = file_of(scalar("vp0:fc.weight/norm", 1.0, 3), scalar("vp0:fc.weight/mean", 0.5, 3))
    import_log(content, f"out/rank1/grad_reduced/{NAME}", "out")
    rows = logs.query("SELECT rank, kind, tensor, norm, mean FROM tensor_stats")

    assert [{"rank": 1, "kind": "grad_reduced", "tensor": "fc.weight", "norm": 1.0, "mean": 0.5}] == rows


def test_decreasing_step_begins_one_attempt_for_all_tags(logs, import_log):
    """TensorBoard draws zigzag lines (issue 3732) or drops the earlier values; here both attempts are stored."""
    first = [scalar(tag, 1.0, step) for step in (1, 2, 3) for tag in ("a", "b")]
    second = [scalar(tag, 2.0, step) for step in (2, 3, 4) for tag in ("a", "b")]
    import_log(file_of(*first), f"run/{NAME}", "run")
    report = import_log(file_of(*second), f"run/{NAME.replace('1700', '1800')}", "run")
    rows = logs.query("SELECT attempt, name, list(step ORDER BY step) AS steps FROM scalars GROUP BY ALL ORDER BY ALL")

    assert [
        {"attempt": attempt, "name": name, "steps": steps}
        for attempt, steps in ((0, [1, 2, 3]), (1, [2, 3, 4]))
        for name in ("a", "b")
    ] == rows
    assert 2 == report.attempts


def test_restarted_session_begins_an_attempt(logs, import_log):
    """SummaryWriter(purge_step=3) announces the restart before any step decreases."""
    restart = Event(step=3)
    restart.session_log.status = 1
    import_log(file_of(scalar("a", 1.0, 2), scalar("a", 1.0, 4), restart, scalar("b", 1.0, 3), scalar("a", 1.0, 5)))

    assert [("a", 2, 0), ("a", 4, 0), ("b", 3, 1), ("a", 5, 1)] == [
        tuple(row.values()) for row in logs.query("SELECT name, step, attempt FROM scalars ORDER BY seq")
    ]


def test_curves_over_samples_have_no_step(logs, import_log):
    """Megatron writes `lm loss vs samples` in addition to `lm loss`."""
    report = import_log(
        file_of(scalar("lm loss", 2.0, 10), scalar("lm loss vs samples", 2.0, 5120), scalar("lm loss", 1.0, 20))
    )

    assert 20 == report.last_step
    assert [{"step": None}] == logs.query("SELECT step FROM scalars WHERE name = 'lm loss vs samples'")


def test_train_and_validation_folders_are_distinguished_by_label(logs, import_log):
    import_log(file_of(scalar("epoch_loss", 1.0, 0)), f"logs/train/{NAME}", "logs")
    import_log(file_of(scalar("epoch_loss", 2.0, 0)), f"logs/validation/{NAME}", "logs")
    rows = logs.query("SELECT labels, value FROM scalars ORDER BY value")

    assert [("train", 1.0), ("validation", 2.0)] == [
        (json.loads(row["labels"])["folder"], row["value"]) for row in rows
    ]


def test_grown_file_adds_only_new_rows(logs, import_log):
    events = [
        scalar(tag, 1.0, step) for step in range(6) for tag in ("a", "0:w/rank0/exp_avg_norm", "0:w/rank0/exp_avg_min")
    ]
    content = file_of(*events)
    stored = sum(
        import_log(content[:cut]).rows_stored for cut in (len(content) // 3, len(content) // 2, len(content) - 5)
    )
    import_log(content)
    again = import_log(content)

    assert (6, 6) == (logs.value("SELECT count(*) FROM scalars"), logs.value("SELECT count(*) FROM tensor_stats"))
    assert stored >= 6
    assert 0 == again.rows_stored


def test_last_step_of_an_open_file_waits_for_the_next_import(logs):
    """Otherwise an incomplete set of statistics would count as the step, and the rest as known rows."""
    tags = ("0:w/rank0/exp_avg_norm", "0:w/rank0/exp_avg_min")
    content = file_of(*(scalar(tag, 1.0, step) for step in (1, 2) for tag in tags))
    half = content[: len(content) - len(framed(scalar(tags[1], 1.0, 2).SerializeToString()))]
    path = logs.write(NAME, half)
    logs.import_log(path)
    seen = logs.query("SELECT step FROM tensor_stats")
    logs.write(NAME, content)
    os.utime(path, (0, time.time() - 2 * SETTLED_SECONDS))
    logs.import_log(path)

    assert [{"step": 1}] == seen
    assert [(1, 1.0), (2, 1.0)] == [
        tuple(r.values()) for r in logs.query('SELECT step, "min" FROM tensor_stats ORDER BY step')
    ]


def test_damaged_record_is_reported_and_the_rest_is_read(logs, import_log):
    content = bytearray(file_of(*(scalar("a", 1.0, step) for step in range(20))))
    content[len(content) // 2] ^= 0xFF
    report = import_log(bytes(content))

    assert (19, 1) == (logs.value("SELECT count(*) FROM scalars"), report.malformed)
    assert "damaged at byte" in report.faults[0].text


def test_tag_that_is_no_utf_8_loses_no_record(logs, import_log):
    data = scalar("tag", 1.0, 1).SerializeToString().replace(b"tag", b"\xff\xfea")
    import_log(file_of() + framed(data))

    assert "\ufffd\ufffda" == logs.value("SELECT name FROM scalars")


@pytest.mark.parametrize(
    ("name", "content", "confidence"),
    [
        (NAME, file_of(), 1.0),
        ("renamed.bin", file_of(scalar("a", 1.0, 1)), 1.0),
        ("notes.txt", b"tfevents are fine", 0.0),
        ("events.tfevents.txt", b"some text about tfevents", 0.0),
    ],
)
def test_event_files_are_detected_by_their_first_record(logs, name, content, confidence):
    assert confidence == TensorBoard().detect(logs.write(name, content), content[:65536]).confidence


def test_event_files_among_other_files_lower_the_confidence(logs):
    logs.write(f"runs/a/{NAME}", file_of())

    assert "tensorboard" == find_importer(logs.folder / "runs").name
    logs.write("runs/trainer_state.json", "{}")
    assert TensorBoard().detect(logs.folder / "runs", b"").confidence < 0.5


def test_links_to_other_folders_are_not_followed(logs, import_log):
    logs.write(f"secret/{NAME}", file_of(scalar("secret", 1.0, 1)))
    logs.write(f"logs/{NAME}", file_of(scalar("a", 1.0, 1)))
    (logs.folder / "logs" / "link").symlink_to(logs.folder / "secret")
    (logs.folder / "logs" / f"x.{NAME}").symlink_to(logs.folder / "secret" / NAME)
    import_log(None, path="logs")

    assert [{"name": "a"}] == logs.query("SELECT name FROM scalars")


def test_error_without_the_extra_names_the_packages(logs, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "google_crc32c", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "google_crc32c" else True)
    with pytest.raises(IngestError, match="pip install protobuf google-crc32c"):
        list(TensorBoard().read(logs.write(NAME, file_of()), Faults()))


def read(path):
    """Import as blocks, because only the parser could be harmed by a hostile file."""
    faults = Faults()
    blocks = list(TensorBoard(clock=lambda: 1e12).read(path, faults))
    assert all(isinstance(block, ImportedBlock) for block in blocks)
    return sum(block.records for block in blocks), faults


@given(st.binary(max_size=300), st.integers(0, 5))
def test_random_bytes_never_crash_the_importer(tmp_path_factory, noise, place):
    """Fuzz test: random bytes as a file, and as the message of a valid record."""
    path = tmp_path_factory.mktemp("noise") / NAME
    path.write_bytes(noise)
    read(path)
    parts = [file_of(), *(framed(scalar("a", 1.0, step).SerializeToString()) for step in range(5))]
    parts.insert(place + 1, framed(noise))
    path.write_bytes(b"".join(parts))

    assert read(path)[0] >= 5


def test_mutated_files_never_crash_the_importer(tmp_path):
    """Fuzz test: valid files with bytes changed, removed and duplicated. Only damaged records may be lost."""
    rng = random.Random(4)
    writer = Event(file_version="brain.Event:2")
    writer.source_metadata.writer = 'rankscope {"rank": 1, "attempt": 2}'
    described = scalar("x", 1.0, 1)
    described.summary.value[0].metadata.summary_description = '{"dataset": "scalars", "name": "x", "vpp_stage": 3}'
    sound = [writer, described, scalar("0:w.input:1/rank0/actv_norm", 1.0, 1), Event(summary=summary.text("t", "x"))]
    sound += [Event(step=1, summary=summary.scalar("m", 1.0, new_style=True))]
    path = tmp_path / NAME
    for _ in range(400):
        parts = [bytearray(event.SerializeToString()) for event in sound]
        for _ in range(rng.randint(1, 4)):
            part = rng.choice(parts)
            if part:
                place = rng.randrange(len(part))
                part[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        path.write_bytes(b"".join(framed(bytes(part)) for part in parts))
        _, faults = read(path)
        assert faults.count <= len(sound)
