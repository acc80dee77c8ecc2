"""A log that grows: the next import reads only the new bytes, and the store has the rows of one import."""

import json
import math
import random

import pytest
from tests.ingest.importers.conftest import logs_in

from rankscope_ingest.importers import find_importer, importers, stored_scalars
from rankscope_ingest.importers.common import resume, runner
from rankscope_storage.connection import connect

ROWS = 2_300  # the decision about a log is final after 2,000 rows
TABLES = {
    "scalars": "* EXCLUDE (ordinal) FROM scalars",
    "events": "* EXCLUDE (ordinal) FROM events WHERE type <> 'import'",
    "attempts": "* EXCLUDE (ts, ordinal) FROM attempts",
    "runs": "* EXCLUDE (ts, ordinal) FROM runs",
}


def numbers(seed):
    """Return steps with a restart, and values with a spike, a NaN and slow steps."""
    noise = random.Random(seed)
    for place in range(ROWS):
        step = place if place < 1_500 else place - 200
        loss = math.nan if place == 1_900 else 9.0 if place == 2_100 else 2 + noise.random() / 9
        yield place, step, loss, 1.0 if 2_150 < place < 2_175 else 0.1 + noise.random() / 99


def text_line(place, step, loss, seconds):
    extra = {
        400: "Saving checkpoint to /a/b\n",
        1_499: "RuntimeError: CUDA error: device-side assert triggered\n",
        2_200: "step 2000 | val_loss 2.5\n",
    }.get(place, "")
    heading = f"Epoch {place // 1000}\n" if place % 1000 == 0 else ""
    moment = f"2026-01-17 10:{place // 60 % 60:02d}:{place % 60:02d}"
    return f"{heading}{moment} step {step} | loss {loss:.4f} | time {seconds:.3f}s\n{extra}"


def json_line(place, step, loss, seconds):
    row = {"step": step, "loss": loss, "step_time": seconds, "epoch": place / 1000}
    return json.dumps(row) + "\n" + ('{"step": 2000, "eval_loss": 2.5}\n' if place == 2_200 else "")


def csv_line(place, step, loss, seconds):
    return ("step,loss,step_seconds\n" if not place else "") + f"{step},{loss:.4f},{seconds:.3f}\n"


def megatron_line(place, step, loss, seconds):
    more = "".join(f" moe layer {layer} balance loss: {loss / 3:.6E} |" for layer in range(6))
    row = (
        f" [2026-01-17 10:{place // 60 % 60:02d}:{place % 60:02d}] iteration {step:8d}/   20000 | consumed samples: "
        f"{step * 64:12d} | elapsed time per iteration (ms): {1000 * seconds:.1f} | learning rate: 1.000000E-04 | "
        f"global batch size:    64 | lm loss: {loss:.6E} |{more} loss scale: 1.0 | grad norm: {loss / 2:.3f} | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )
    extra = {400: "  successfully saved checkpoint from iteration     400 to /a/b\n"}.get(place, "")
    validation = "validation loss at iteration 2000 | lm loss value: 2.500000E+00 | lm loss PPL: 1.2E+01 |\n"
    return row + extra + (validation if place == 2_200 else "")


LINES = {"textlog": text_line, "jsonl": json_line, "columns": csv_line, "megatron": megatron_line}


def stored(logs):
    """Return all rows of the store by table, without the columns that depend on the time of the import."""
    return {name: sorted(map(repr, logs.query(f"SELECT {source}"))) for name, source in TABLES.items()}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", LINES)
def test_pieces_of_a_log_are_the_rows_of_the_whole_log(tmp_path_factory, kind, seed):
    noise = random.Random(seed)
    cuts = [noise.uniform(0.1, 0.8), *sorted(noise.uniform(0.87, 1) for _ in range(4))]
    content = "".join(LINES[kind](*row) for row in numbers(seed)).encode()
    sizes = [int(cut * len(content)) for cut in cuts]
    pieces, whole = (tmp_path_factory.mktemp(name) for name in ("pieces", "whole"))
    with logs_in(pieces) as logs:
        for size in [*sizes, len(content)]:
            report = logs.import_again(logs.write("train.log", content[:size]))
        found = stored(logs)
    with logs_in(whole) as logs:
        expected_report = logs.import_again(logs.write("train.log", content))
        expected = stored(logs)

    assert expected == found
    assert (expected_report.records, kind) == (report.records, report.source_kind)


def test_grown_log_is_read_from_its_last_line(logs, monkeypatch):
    log = logs.write("train.log", "".join(text_line(*row) for row in numbers(1)))
    logs.import_again(log)
    read = find_importer(log).read
    begins = []

    class Reads:
        name = "textlog"

        def read(self, path, faults):
            begins.append(faults.read_bytes)
            yield from read(path, faults)

    size = log.stat().st_size
    with log.open("a") as file:
        file.write("2026-01-17 12:00:00 step 2101 | loss 2.0000 | time 0.100s\n")

    assert (3, ROWS + 4) == ((report := logs.import_again(log, importer=Reads())).rows_stored, report.records)
    assert [size] == begins


@pytest.mark.parametrize("rows", [100, ROWS])
@pytest.mark.parametrize("name", ["train.log", "train-2.log"])
def test_log_that_lost_its_beginning_is_continued(logs, rows, name):
    lines = [text_line(*row) for row in numbers(1)][:rows]
    more = "2026-01-17 12:00:00 step 9000 | loss 2.0000 | time 0.100s\n"
    first = logs.import_again(logs.write("train.log", "".join(lines)))
    report = logs.import_again(logs.write(name, "".join([*lines[-40:], more])))
    again = logs.import_again(logs.write(name, "".join([*lines[-40:], more, more.replace("9000", "9001")])))

    assert (3, first.records + 1, True) == (report.rows_stored, report.records, report.is_known)
    assert 3 == again.rows_stored
    assert 1 == logs.value("SELECT count(DISTINCT incarnation) FROM scalars")


def test_banner_at_the_end_of_one_log_and_the_beginning_of_another(logs):
    lines = [text_line(*row) for row in numbers(1)][:50]
    logs.import_again(logs.write("a.log", "".join([*lines, "world size: 8\n"])))
    other = logs.import_again(logs.write("b.log", "".join(["world size: 8\n", *lines[:20]]).replace(" 10:", " 11:")))

    assert (False, 20, 1) == (other.is_known, other.records, other.attempt)


def test_common_beginning_of_two_logs_is_stored_once(logs):
    """A training that resumed at step 50 has copied its log, and writes other values from there on."""
    lines = [text_line(*row) for row in numbers(1)][:100]
    others = [text_line(place, place, 5.0, 0.1).replace(" 10:", " 11:") for place in range(50, 120)]
    with connect(logs.folder / "store") as connection:
        options = {"stored": stored_scalars(connection, "r")}
        logs.import_again(logs.write("train.log", "".join(lines)), **options)
        report = logs.import_again(logs.write("resumed.log", "".join([*lines[:50], *others])), **options)
        more = text_line(1, 9000, 5.0, 0.1)
        logs.import_again(logs.write("resumed.log", "".join([*lines[:50], *others, more])), **options)

    assert (50, 1) == (report.first_step, report.attempt)
    assert [(0, 100), (1, 71)] == logs.tuples(
        "SELECT attempt, count(*) FROM scalars WHERE name = 'loss' GROUP BY 1 ORDER BY 1"
    )


def test_copy_of_a_log_is_the_same_log(logs):
    content = "".join(text_line(*row) for row in numbers(1))
    logs.import_again(logs.write("train.log", content))
    copied = logs.import_again(logs.write("copy/of.log", content))
    grown = logs.import_again(logs.write("other/copy.log", content + text_line(0, 9000, 1.0, 0.1)))

    shorter = logs.import_again(logs.write("shorter.log", content[: len(content) // 2]))

    assert (True, 0, ROWS + 3) == (copied.is_known, copied.rows_stored, copied.records)
    assert (True, 0, 9000) == (shorter.is_known, shorter.rows_stored, logs.value("SELECT last_step FROM runs"))
    assert 3 == grown.rows_stored


@pytest.mark.parametrize(
    ("line", "options", "rows"), [(json_line, {"importer": importers()["textlog"]}, 0), (text_line, {"rules": ()}, 3)]
)
def test_state_of_another_format_or_of_other_rules_is_not_used(logs, line, options, rows):
    """The complete log is read again, and no row is stored twice."""
    log = logs.write("train.log", "".join(line(*row) for row in numbers(1)))
    logs.import_again(log)
    before = logs.value("SELECT count(*) FROM scalars")
    log.write_text(log.read_text() + line(1, 9000, 1.0, 0.1))
    report = logs.import_again(log, **options)

    assert ("textlog", rows) == (report.source_kind, report.rows_stored)
    assert before + rows == logs.value("SELECT count(*) FROM scalars")


def test_state_of_older_code_is_not_used(logs, monkeypatch):
    """Its objects may have other attributes."""
    log = logs.write("train.log", "".join(megatron_line(*row) for row in numbers(1)))
    with monkeypatch.context() as older:
        older.setattr(runner, "_STATES", runner._STATES - 1)
        logs.import_again(log)
    log.write_text(log.read_text() + megatron_line(1, 9000, 1.0, 0.1))
    monkeypatch.setattr(resume._Decoder, "value", None)
    report = logs.import_again(log)

    assert 0 < report.rows_stored < 30


@pytest.mark.parametrize("value", [{"a": [1, (2.5, None)]}, {1: {"x"}, None: math.inf}, [[], {}]])
def test_state_is_restored(value):
    first, second = resume.decoded(json.loads(json.dumps(resume.encoded((value, value)))))

    assert value == first
    assert first is second


@pytest.mark.parametrize("table", [[], [["os:system", "x", 1]], [["builtins:eval"]], [["rankscope_none:X"]], "x"])
def test_state_of_other_classes_is_refused(table):
    with pytest.raises(ValueError, match=r"class|invalid"):
        resume.decoded(table)


def test_secret_in_a_state_is_masked():
    assert "correct-horse" not in json.dumps(resume.encoded(["train.py --password=correct-horse"]))
