"""Times of logs without a year, or with an ambiguous order of day and month, and the printed decision."""

from __future__ import annotations

import datetime as dt
import os

import pytest

from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import Faults, ImportedBlock, Options, find_importer, import_records, known_imports
from rankscope_ingest.importers.common.importer import Imported
from rankscope_storage.connection import connect

CHANGED = dt.datetime(2025, 8, 12, 22, tzinfo=dt.UTC)


def read(tmp_path, lines, options=Options(), changed=CHANGED):  # noqa: B008 - frozen
    """Return the times of the losses as text, the seconds since the first one, and the messages of the import."""
    path = tmp_path / "train.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    os.utime(path, (changed.timestamp(), changed.timestamp()))
    faults = Faults(options=options)
    imported: list[Imported] = list(find_importer(path).read(path, faults))
    rows = [row for item in imported if isinstance(item, ImportedBlock) for row in item.tables["scalars"].to_pylist()]
    times = [row["ts"].strftime("%Y-%m-%d %H:%M:%S") if row["ts"] else None for row in rows if row["name"] == "loss"]
    return times, [row["value"] for row in rows if row["name"] == "elapsed_seconds"], faults.notes


def lines_of(*prefixes: str, tail: str = "") -> list[str]:
    return [f"{prefix} step: {step}, loss: 2.5{tail}" for step, prefix in enumerate(prefixes)]


GLOG = "I08{} 21:54:44.943716 140 metric_logger.py:226] completed"
NANOTRON = "[0000:0]:{} 16:31:56 [INFO|DP=0|PP=0|TP=0|node-0]:"
D2 = "[{} 19:16:15 d2.utils.events]: "
FORMS = {
    "year of the last change": (
        lines_of(GLOG.format(11), GLOG.format(12)),
        ["2025-08-11 21:54:44", "2025-08-12 21:54:44"],
        "the year 2025 is that of the file's last change",
    ),
    "another date in the log": (
        ["started at 2019-08-11 20:00:00", *lines_of(GLOG.format(11), GLOG.format(12))],
        ["2019-08-11 21:54:44", "2019-08-12 21:54:44"],
        "the year is that of 2019-08-11 in the log",
    ),
    "turn of the year": (
        ["started at 2019-12-31 20:00:00", *lines_of(D2.format("12/31"), D2.format("01/01"), D2.format("01/13"))],
        ["2019-12-31 19:16:15", "2020-01-01 19:16:15", "2020-01-13 19:16:15"],
        "are month and day, because a value is above 12; the year is that of 2019-12-31 in the log",
    ),
    "month first by its values": (
        lines_of("10/07/2025 16:31:56", "10/17/2025 16:31:56"),
        ["2025-10-07 16:31:56", "2025-10-17 16:31:56"],
        "are month, day and year, because a value is above 12",
    ),
    "day first by its values": (
        lines_of("07/10/2025 16:31:56", "17/10/2025 16:31:56"),
        ["2025-10-07 16:31:56", "2025-10-17 16:31:56"],
        "are day, month and year, because a value is above 12",
    ),
    "month first by its tool": (
        lines_of(NANOTRON.format("01/02/2026")),
        ["2026-01-02 16:31:56"],
        "are month, day and year, as the tool prints them",
    ),
    "neither value nor tool": (lines_of("01/02/2026 16:31:56"), [None], "are not stored: no value above 12"),
    "two digits of the year": (
        lines_of("26/01/02 16:31:56", "26/01/03 16:31:56"),
        ["2026-01-02 16:31:56", "2026-01-03 16:31:56"],
        "are year, month and day",
    ),
    "no year": (lines_of(D2.format("03/30"), D2.format("03/31")), [None, None], "only their differences are stored"),
}


@pytest.mark.parametrize("form", FORMS)
def test_times_have_the_year_and_the_order_that_the_import_names(tmp_path, form):
    lines, times, note = FORMS[form]
    found, elapsed, notes = read(tmp_path, lines)

    assert times == found
    assert any(note in text for text in notes), notes
    assert ([0.0, 86_400.0] if form == "no year" else []) == elapsed


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [("08/10", "08/11", 2025), ("12/31", "08/11", 2024), ("08/09", "08/09", None), ("08/12", "08/13", None)],
)
def test_last_row_is_within_two_days_before_the_last_change(tmp_path, first, last, expected):
    found, *_ = read(
        tmp_path,
        lines_of(D2.format("01/20"), D2.format(last))[1:]
        if first == last
        else lines_of(D2.format(first), D2.format(last)),
    )

    assert (None if expected is None else str(expected)) == (found[0] and found[0][:4])


def test_late_line_of_the_old_year_does_not_raise_the_year(tmp_path):
    lines = ["2019-12-31 20:00:00", *lines_of(*map(D2.format, ("12/31", "01/01", "12/31", "01/02")))]
    found, *_ = read(tmp_path, lines)

    assert ["2019", "2020", "2019", "2020"] == [text[:4] for text in found]


def test_given_year_is_that_of_the_last_row_and_remains(logs, tmp_path):
    read(tmp_path, lines_of(D2.format("12/31"), D2.format("01/01")))
    path = tmp_path / "train.log"
    options = Options(year=2024)
    import_records(path, logs._writer, find_importer(path), run="r", known=[], options=options)

    assert [2023, 2024] == [row["y"] for row in logs.query("SELECT year(ts) AS y FROM scalars ORDER BY seq")]
    with connect(logs.folder / "store") as connection:
        known = known_imports(connection, "r")
    with pytest.raises(IngestError, match="with the year 2023: `--reimport --year 2020` imports it again"):
        import_records(path, logs._writer, find_importer(path), run="r", known=known, options=Options(year=2020))
