"""A log is read in the same way with and without learned forms of lines."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope_ingest.importers import Faults, ImportedBlock, ImportedRun, importers
from rankscope_ingest.importers.common import log_records
from rankscope_ingest.importers.common.forms import Forms

NUMBERS = st.one_of(
    st.floats(allow_nan=True, width=32).map(repr),
    st.integers(-3, 10**16).map(str),
    st.floats(0, 1e6).map(lambda value: f"{value:,.2f}"),
    st.sampled_from(
        ["nan", "inf", "980K", "1.0M", "1,234", "5e-05", "1.", ".5", "0:01:05", "12.00m", "7 ms", "0007", "-"]
    ),
)
FORMS = (
    "step {step} loss {a} lr {b}",
    "step {step} loss {a}, {b}, {c} of 8 files",
    "[2026-01-17 10:{minute}:{second},{ms}] [INFO] step: {step}/900 | loss: {a} | lr: {b} | mem {c}GiB ({a}%)",
    "[rank{rank}]: iter {step:>5} loss={a}, grad norm={b}, {c} tok/s",
    "Epoch {epoch} [{step}/900] loss {a} ({b}) eta {minute}:{second}",
    "Epoch {epoch}/9",
    "eval: loss {a} acc {b}",
    "val_loss {a}",
    '{{"step": {step}, "loss": {a}, "time": "2026-01-17T10:{minute}:{second}Z", "note": "x{c}"}}',
    "{{'loss': {a}, 'lr': {b}, 'epoch': {epoch}}}",
    "epoch  step  loss\n{epoch}  {step}  {a}",
    "saved checkpoint at step {step}",
)


@st.composite
def logs(draw):
    """Return a log of a few kinds of lines, with steps that restart and numbers of many forms."""
    lines, step, epoch = [], 0, 0
    kinds = draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=3))
    for _ in range(draw(st.integers(1, 12))):
        form, common = draw(st.sampled_from(kinds)), draw(st.lists(NUMBERS, min_size=3, max_size=3))
        for _ in range(draw(st.integers(1, 6))):
            step, epoch = draw(st.sampled_from([(step + 1, epoch), (step, epoch), (0, epoch + 1)]))
            a, b, c = draw(st.lists(NUMBERS, min_size=3, max_size=3)) if draw(st.booleans()) else common
            clock = {"minute": f"{step % 60:02d}", "second": f"{step % 61:02d}", "ms": f"{step % 1000:03d}"}
            lines.append(form.format(step=step, epoch=epoch, rank=step % 2, a=a, b=b, c=c, **clock))
    return "\n".join(lines) + "\n"


def read(path, repetitions, monkeypatch):
    """Return all rows, facts and messages of a log whose forms are learned after this number of lines."""
    monkeypatch.setattr(Forms.__init__, "__defaults__", (64, repetitions))
    faults, rows, records = Faults(), [], 0
    kind = "jsonl" if path.read_bytes().startswith(b"{") else "textlog"
    items = list(importers()[kind].read(path, faults))
    for block in items:
        if isinstance(block, ImportedBlock):
            for name, table in block.tables.items():
                rows += [repr((name, row.pop("record") + records, row)) for row in table.to_pylist()]
            records += block.records
    runs = [item for item in items if isinstance(item, ImportedRun)]
    return sorted(rows), records, runs, faults.first, faults.notes, dict(faults.unkept), faults.choices


@given(log=logs())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_learned_forms_change_no_row(tmp_path, monkeypatch, log):
    path = tmp_path / "train.log"
    path.write_text(log)
    monkeypatch.setattr(log_records, "MAX_RECORDS", 5)  # rows of known layouts are added from the sixth row on

    assert read(path, 10**9, monkeypatch) == read(path, 1, monkeypatch)


@pytest.mark.parametrize("name", ["nanotron.log", "detectron2_console.log", "litgpt_console.log", "metaseq_opt.log"])
def test_learned_forms_change_no_row_of_a_field_log(data, tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.write_bytes((data / "field_logs" / name).read_bytes() * 20)
    monkeypatch.setattr(log_records, "MAX_RECORDS", 5)

    assert read(path, 10**9, monkeypatch) == read(path, 2, monkeypatch)


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("a.log", "2026-01-17 9:01:20 step {step} loss 0.5", "2026-01-17 10:01:20 step {step} loss 0.5"),
        ("a.log", "2026-01-2372 00:04:00 step {step} loss 0.5", "2026-01-17 00:04:00 step {step} loss 0.5"),
        ("a.log", "step {step} loss 0.5 eta: 0:00:4294967296", "step {step} loss 0.5 eta: 0:00:24"),
        ("a.log", "step {step} loss 0.5 after {step}.0 s", "step {step} loss 0.5 after 7.0 s"),  # no equal numbers
        ("a.jsonl", '{{"step": {step}, "loss": 12}}', '{{"step": {step}, "loss": 012}}'),
    ],
)
def test_numbers_with_another_meaning_are_not_of_the_form(tmp_path, monkeypatch, name, first, then):
    path = tmp_path / name
    path.write_text("".join(f"{form.format(step=step)}\n" for form in (first, then) for step in range(10, 90)))
    monkeypatch.setattr(log_records, "MAX_RECORDS", 5)

    assert read(path, 10**9, monkeypatch) == read(path, 1, monkeypatch)
