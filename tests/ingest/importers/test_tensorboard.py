"""Tests of event files of torch, of all types of summaries, and of damage; `cases` has rows, restarts and folders."""

import os
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tests.ingest.importers.cases import framed
from torch.utils.tensorboard import SummaryWriter, summary

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, find_importer
from rankscope_ingest.importers.common.importer import SETTLED_SECONDS
from rankscope_ingest.importers.tensorboard import TensorBoard

NAME = "events.out.tfevents.1700000000.host.1.0"


def scalar(tag, value, step, wall_time=1700000000.5):
    return Event(step=step, wall_time=wall_time, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def file_of(*events):
    """Return the bytes of an event file, made of TensorFlow's messages and checksums."""
    first = Event(file_version="brain.Event:2", wall_time=1700000000.0)
    return b"".join(framed(event.SerializeToString()) for event in (first, *events))


@pytest.fixture
def import_log(logs):
    """Return a function that writes a complete event file, and imports it or the given folder."""

    def bring_in(content, path=NAME):
        if content is not None:
            os.utime(logs.write(path, content), (0, time.time() - 2 * SETTLED_SECONDS))
        return logs.import_log(logs.folder / path)

    return bring_in


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
        *((NAME, file_of(), 1.0), ("renamed.bin", file_of(scalar("a", 1.0, 1)), 1.0)),
        *(("notes.txt", b"tfevents are fine", 0.0), ("events.tfevents.txt", b"some text about tfevents", 0.0)),
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
    monkeypatch.delitem(sys.modules, "rankscope_storage.tensorboard.frames", raising=False)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
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
