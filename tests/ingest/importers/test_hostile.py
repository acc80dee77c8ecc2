"""All importers handle hostile content in the same way. Tests of a format have the content for this format."""

import gzip
import io
import itertools
import json
import math
import tarfile
import zipfile

import pytest

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import find_importer, importers

HEADER = "vpp_stage,name,step,norm,min,max,mean,nans,zeros,shape,dtype\n"
SAMPLES = {
    "megatron": ("train.log", "", "iteration {step}/ 10 | lm loss: {value} | grad norm: 1.0 |\n", ""),
    "jsonl": ("log.jsonl", "", '{{"step": {step}, "loss": {value}}}\n', ""),
    "textlog": ("train.log", "", "step {step} loss {value} lr 1e-4\n", ""),
    "columns": ("loss.csv", "step,loss\n", "{step},{value}\n", ""),
    "trainer_state": ("trainer_state.json", '{"log_history": [\n', '{{"step": {step}, "loss": {value}}},\n', "{}]}\n"),
    "openmetrics": ("metrics.txt", "# TYPE loss gauge\n", "loss {value} 171455760{step}\n", "# EOF\n"),
    "msprobe": ("grad_reduced_0-9.csv", HEADER, "0,w,{step},{value},1,1,1,0,0,[1],x\n", ""),
}
VALUE_OF = {
    "openmetrics": "SELECT value FROM samples ORDER BY ts",
    "msprobe": "SELECT coalesce(norm, CASE WHEN infs > 0 THEN 'inf' ELSE 'nan' END::DOUBLE) FROM tensor_stats "
    "ORDER BY step",
}


def text_of(kind, *values):
    _, begin, row, end = SAMPLES[kind]
    return begin + "".join(row.format(step=step, value=value) for step, value in enumerate(values, 1)) + end


def zip_of(*texts, compression=zipfile.ZIP_STORED):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"run/rank{number}.log", text)
    return packed.getvalue()


def tar_of(text):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("train.log")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


def path_of(logs, kind, content):
    return logs.write(f"out/Dec03_21-34-40-rank0-0123abcd/{SAMPLES[kind][0]}", content)


def values(logs, kind):
    rows = logs.query(VALUE_OF.get(kind, "SELECT value FROM scalars WHERE name = 'loss' ORDER BY step"))
    return [next(iter(row.values())) for row in rows]


@pytest.mark.usual(6)
@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.encode("utf-16"), "UTF-16: convert it first"),
        (lambda text: (text * 9).encode("utf-16-be"), "UTF-16: convert it first"),
        (lambda text: gzip.compress(text.encode()), "compressed: unpack it first"),
        (lambda _: b"\x7fELF" + bytes(9000), "binary file"),
    ],
    ids=["utf-16", "utf-16 without a mark", "gzip", "binary"],
)
def test_files_that_are_no_text_are_rejected_with_the_remedy(logs, kind, change, said):
    path = path_of(logs, kind, change(text_of(kind, 1.0)))

    with pytest.raises(IngestError, match=said):
        logs.import_log(path, kind=kind)
    with pytest.raises(IngestError, match=said):
        find_importer(path)


@pytest.mark.parametrize("kind", sorted(SAMPLES.keys() - {"msprobe"}))  # msprobe writes folders
def test_only_file_of_an_archive_without_compression_is_read(logs, kind):
    archive = zip_of(text_of(kind, 1.5, 2.5, 3.5))
    path = logs.write("train.zip", archive)

    assert kind == find_importer(path).name
    logs.import_log(path)
    assert [1.5, 2.5, 3.5] == values(logs, kind)
    assert 0 == logs.import_log(path).rows_stored

    damaged = logs.write("damaged.zip", archive.replace(b"3.5", b"3.6"))
    with pytest.raises(IngestError, match=r"damaged.zip cannot be read: Bad CRC-32"):
        logs.import_log(damaged, kind=kind)


@pytest.mark.parametrize("kind", ["jsonl", "megatron", "textlog"])
@pytest.mark.parametrize(
    "packed",
    [lambda text: zip_of(text, compression=zipfile.ZIP_DEFLATED), lambda text: zip_of(text, text), tar_of],
    ids=["compressed", "two logs", "tar"],
)
def test_other_archives_are_rejected_with_the_remedy(logs, kind, packed):
    path = logs.write("train.log", packed(text_of(kind, 1.5, 2.5, 3.5)))

    with pytest.raises(IngestError, match=r"train.log is an archive or compressed: unpack it first"):
        logs.import_log(path)


MARKED = {kind: lambda text: "\ufeff" + text.replace("\n", "\r\n") for kind in SAMPLES}
CHANGES = [
    *MARKED.items(),
    *itertools.product(
        ("megatron", "jsonl", "textlog", "columns"),
        (lambda text: "\0" * 100_000 + text, lambda text: text.replace("\n", "\r")),
    ),
]


@pytest.mark.usual(7)
@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_byte_order_marks_line_ends_and_holes_change_nothing(logs, kind, change):
    """A rotation that truncates a log leaves NUL bytes where the program continues to write."""
    path = path_of(logs, kind, change(text_of(kind, 1.5, 2.5, 3.5)).encode())

    assert kind == find_importer(path).name
    logs.import_log(path)
    assert [1.5, 2.5, 3.5] == values(logs, kind)


@pytest.mark.parametrize("kind", ["megatron", "jsonl", "textlog", "msprobe"])
def test_hole_instead_of_a_line_end_keeps_the_order_of_the_rows(logs, kind):
    lines = text_of(kind, *range(5_000)).splitlines(keepends=True)
    lines[4_000] = lines[4_000].rstrip() + "\0" * 9
    logs.import_log(path_of(logs, kind, "".join(lines).encode()), kind=kind)
    table = "tensor_stats" if kind == "msprobe" else "scalars WHERE name = 'loss'"
    rows = logs.query(f"SELECT step, attempt FROM {table} ORDER BY seq")

    assert [(rows[0]["step"] + place, 0) for place in range(5_000)] == [(row["step"], row["attempt"]) for row in rows]


@pytest.mark.usual(5)
@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize(("nan", "infinity"), [("NaN", "Infinity"), ("NaN", "1e999")])
def test_nan_infinity_and_overflow_are_values(logs, kind, nan, infinity):
    infinity = infinity.replace("Infinity", "+Inf") if kind == "openmetrics" else infinity
    report = logs.import_log(path_of(logs, kind, text_of(kind, nan, infinity, 0.0)), kind=kind)

    assert repr([math.nan, math.inf, 0.0]) == repr(values(logs, kind))
    assert 0 == report.malformed


@pytest.mark.usual(4)
@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/b\\c", "..", "con", "x" * 300, "学" * 90, "a\nb"])
def test_hostile_names_write_no_file_outside_the_store(logs, name):
    """Names of runs and quantities are values and never paths."""
    before = set(logs.folder.parent.iterdir())
    text = json.dumps({"step": 1, name: 2.0}) + "\n"
    logs.import_log(logs.write("log.jsonl", text), run=name, kind="jsonl")

    assert [(name, 2.0)] == [tuple(row.values()) for row in logs.query("SELECT run, value FROM scalars")]
    assert {path.name for path in logs.folder.iterdir()} == {"store", "log.jsonl"}
    assert before == set(logs.folder.parent.iterdir())


def test_hostile_samples_cover_every_text_importer():
    assert set(importers()) - {"tensorboard"} == set(
        SAMPLES
    )  # event files are binary and contain the lengths of records


def test_empty_file_is_rejected(logs):
    """S3-05."""
    with pytest.raises(IngestError, match="is empty: check the path"):
        find_importer(logs.write("log.jsonl", ""))
