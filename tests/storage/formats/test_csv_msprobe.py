"""CSV in the layout of the msprobe monitor, read back with nothing but the csv module."""

import csv
import datetime as dt
import shutil

import pytest
from tests.storage.formats.conftest import row, scalar, tensor

from rankscope_msprobe.files.csv_layout import parse_folder, plain
from rankscope_storage.base.errors import ExportError
from rankscope_storage.formats import csv_msprobe

STATISTICS = ("norm", "min", "max", "mean", "nans", "zeros")


def read(target):
    """Return {(folder, file): rows} of all that was written, rows as dictionaries."""
    found = {}
    for path in sorted(target.rglob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            found[path.parent.name, path.name] = list(csv.DictReader(file))
    return found


def cells(target, *columns):
    """Return these values of all rows, by file name; the folders differ by their time."""
    return {name: [tuple(map(row.get, columns)) for row in rows] for (_, name), rows in read(target).items()}


def only(target, column):
    return [row[column] for rows in read(target).values() for row in rows]


def put_steps(shelf, *steps):
    shelf.put(tensor_stats=[tensor(step, name) for step in steps for name in ("w", "b")])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((7,), {"grad_reduced_5-9.csv": ["6"], "exp_avg_5-9.csv": ["7"], "exp_avg_sq_5-9.csv": ["7"]}),
        (
            (0, 1),
            {f"{kind}_0-4.csv": ["1", "2"] for kind in ("exp_avg", "exp_avg_sq")}
            | {"grad_reduced_0-4.csv": ["0", "1"]},
        ),
    ],
)
def test_steps_count_from_0_and_moments_have_the_step_before(shelf, steps, expected):
    """A training that counts from 0 keeps its steps."""
    kinds = ("grad_reduced", "exp_avg", "exp_avg_sq")
    shelf.put(tensor_stats=[tensor(step, "w", kind) for step in steps for kind in kinds])
    target, report = shelf.export("csv", step_count_per_record=5)

    assert {name: [(step,) for step in told] for name, told in expected.items()} == cells(target, "step")
    assert {} == report.omitted


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"nans": 2, "infs": 0, "numel": 8}, ("nan", "nan", "nan", "nan", "2", "nan")),
        ({"nans": 0, "infs": 1, "numel": 8}, ("inf", "nan", "nan", "nan", "0", "nan")),
        ({"norm": None, "min": None, "nans": 0, "infs": 0, "numel": 0}, ("0.0", "nan", "nan", "nan", "0", "nan")),
        ({"max": None, "zeros": 0, "numel": 4}, ("1.5", "-2.0", "nan", "nan", "nan", "0.0")),
    ],
)
def test_statistics_cover_all_elements(shelf, ours, theirs):
    """Ours are of the finite ones: what theirs would be is Inf, NaN, or not known."""
    shelf.put(tensor_stats=[tensor(1, **{"min": -2.0} | ours)])
    target, _ = shelf.export("csv")

    assert {"grad_reduced_0-0.csv": [theirs]} == cells(target, *STATISTICS)


def test_seed_rounding_is_by_decimals(shelf):
    shelf.put(
        tensor_stats=[tensor(1, name, norm=norm) for name, norm in (("a", 3.5e-11), ("b", 0.12345678), ("c", 2.0))]
    )

    assert ["0.0", "0.123", "2.0"] == only(shelf.export("csv", seed_rounding=3)[0], "norm")
    exact = map(float, only(shelf.export("csv", "exact")[0], "norm"))
    assert [pytest.approx(norm, rel=1e-7) for norm in (3.5e-11, 0.12345678, 2.0)] == [*exact]


def test_second_export_adds_only_new_rows(shelf):
    """A step that was exported before it was complete is completed; files without news are not touched."""
    put_steps(shelf, 1, 2, 3)
    shelf.put(scalars=[scalar(1, 0.5)])
    target, first = shelf.export("csv", step_count_per_record=2)
    before = {path: (path.stat().st_mtime_ns, path.read_text()) for path in first.files}
    put_steps(shelf, 4, 5)
    shelf.put(tensor_stats=[tensor(4, "late")])
    _, second = shelf.export("csv", step_count_per_record=2)
    _, third = shelf.export("csv", step_count_per_record=2)
    keys = list(zip(only(target, "name"), only(target, "step"), strict=True))

    assert [6, 5, 0] == [report.rows["tensor_stats"] for report in (first, second, third)]
    assert [1, 0, 0] == [report.rows["scalars"] for report in (first, second, third)]
    assert [0, 7, 12] == [report.omitted.get(csv_msprobe.ALREADY_THERE, 0) for report in (first, second, third)]
    assert () == third.files
    assert len(keys) == len(set(keys)) == 12
    assert before[first.files[0]] == (first.files[0].stat().st_mtime_ns, first.files[0].read_text())
    assert first.files[1].read_text().startswith(before[first.files[1]][1])
    assert not list(target.rglob(".*"))


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("window", "continued"),
    [
        (("Dec03_21-34-40", "Dec03_21-34-41"), "Dec03_21-34-41-rank0-bbbbbbbb"),  # closed; the latest within
        (("Dec03_21-34-40", "Dec03_21-34-40"), "Dec03_21-34-40-rank0-aaaaaaaa"),
        (("Dec03_21-34-42", "Jan02_00-00-00"), "Jan01_00-00-00-rank0-cccccccc"),  # over the turn of the year
    ],
)
def test_append_output_continues_the_folders_of_its_window(shelf, window, continued):
    """As the tool's own files are: their order of columns, their rows, and the ranks that have a folder."""
    folders = ("Dec03_21-34-40-rank0-aaaaaaaa", "Dec03_21-34-41-rank0-bbbbbbbb", "Jan01_00-00-00-rank0-cccccccc")
    old = "vpp_stage,name,step,mean,norm,id,shape,dtype\n0,w,0,9.0,9.0,nan,[1],torch.float32\n"
    for name in folders:
        folder = shelf.folder / "out" / name
        folder.mkdir(parents=True)
        (folder / "grad_reduced_0-4.csv").write_text(old)
    put_steps(shelf, 1, 2)
    shelf.put(tensor_stats=[tensor(1, "w", rank=1)])
    target, _ = shelf.export("csv", step_count_per_record=5, append_output=window)
    found = read(target)
    added = "0,b,0,nan,1.5,nan,nan,nan\n0,w,1,nan,1.5,nan,nan,nan\n0,b,1,nan,1.5,nan,nan,nan\n"

    assert old + added == (target / continued / "grad_reduced_0-4.csv").read_text()
    assert {1} == {len(found[name, "grad_reduced_0-4.csv"]) for name in set(folders) - {continued}}
    assert [1] == [parse_folder(name).rank for name, _ in found if name not in folders]


def test_append_output_takes_the_latest_attempt_of_each_step(shelf):
    for attempt, steps in ((0, (1, 2, 3)), (1, (3, 4))):
        shelf.put(tensor_stats=[tensor(step, norm=float(attempt), attempt=attempt) for step in steps])
    window = ("Mar01_00-00-00", "Mar02_00-00-00")
    target, report = shelf.export("csv", append_output=window, step_count_per_record=10)

    expected = [("0", "0.0"), ("1", "0.0"), ("2", "1.0"), ("3", "1.0")]
    assert {"grad_reduced_0-9.csv": expected} == cells(target, "step", "norm")
    assert {csv_msprobe.HIDDEN: 1} == report.omitted


def test_each_attempt_and_rank_has_a_folder_named_after_its_beginning(shelf):
    began = dt.datetime(2026, 12, 31, 20, 0, tzinfo=dt.UTC)
    ranks = [(rank, attempt) for rank in (0, 1) for attempt in (0, 1)]
    shelf.put(
        tensor_stats=[tensor(1, rank=rank, attempt=attempt, ts=None) for rank, attempt in ranks],
        attempts=[row(step=None, attempt=0, state="failed", started_at=began, ts=began)],
    )
    names = sorted(path.name for path in shelf.export("csv")[0].iterdir())

    # In Shanghai the new year has begun. The start of the second attempt is unknown, but not before the first one.
    assert [("Jan01_04-00-00", 0), ("Jan01_04-00-00", 0), ("Jan01_04-00-00", 1), ("Jan01_04-00-00", 1)] == [
        (name.split("-rank")[0], parse_folder(name).rank) for name in names
    ]
    assert 4 == len(set(names))


def test_time_zone_of_folders_is_an_option(shelf):
    shelf.put(tensor_stats=[tensor(1, ts=dt.datetime(2026, 12, 31, 20, 0, tzinfo=dt.UTC))])
    expected = {"UTC": "Dec31_20-00-00", "UTC-05:30": "Dec31_14-30-00", "Asia/Tokyo": "Jan01_05-00-00"}

    for time_zone, began in expected.items():
        (folder,) = shelf.export("csv", time_zone.replace("/", " "), time_zone=time_zone)[0].iterdir()
        assert began == folder.name.split("-rank")[0]


@pytest.mark.parametrize(
    ("header", "said"), [("a,b\n1,2\n", "has the columns a,b"), ("vpp_stage,name,step,norm\n", "micro_step are needed")]
)
def test_file_of_another_shape_is_not_continued(shelf, header, said):
    folder = shelf.folder / "out" / "Dec03_21-34-40-rank0-aaaaaaaa"
    folder.mkdir(parents=True)
    (folder / "actv_0-0.csv").write_text(header)
    shelf.put(tensor_stats=[tensor(1, "m", "act_in")])

    with pytest.raises(ExportError, match=said):
        shelf.export("csv", append_output=("Dec03_21-34-40", "Dec03_21-34-40"))
    assert header == (folder / "actv_0-0.csv").read_text()
    assert ["actv_0-0.csv"] == [path.name for path in folder.iterdir()]


def test_partial_line_of_a_killed_writer_remains_a_separate_line(shelf):
    put_steps(shelf, 1)
    _, first = shelf.export("csv", step_count_per_record=5)
    torn = first.files[0].read_text() + "0,w,3,0.1"
    first.files[0].write_text(torn)
    put_steps(shelf, 2)
    shelf.export("csv", step_count_per_record=5)

    assert first.files[0].read_text().startswith(f"{torn}\n0,w,1,1.5")


def test_names_cannot_be_formulas_or_break_a_row(shelf):
    names = ["=cmd|' /C calc'!A0", "+1", "-1", "@sum", "'=x", 'a,"b"', "línea 学习", "tab\tnewline\nend"]
    shelf.put(tensor_stats=[tensor(1, name) for name in names])
    target, _ = shelf.export("csv")
    found = only(target, "name")

    assert not {name[0] for name in found} & {*"=+-@"}
    assert ["0"] * len(names) == only(target, "step")
    assert sorted(name.translate({9: "�", 10: "�"}) for name in names) == sorted(map(plain, found))


def test_options_restrict_the_exported_rows(shelf):
    shelf.put(
        tensor_stats=[
            tensor(step, "w", kind, rank=rank)
            for step in (1, 2)
            for kind in ("grad_reduced", "param_after", "grad_clipped")
            for rank in (0, 1)
        ],
        features=[row(kind="stable_rank", module="fc", value=2.0)],
    )

    def names(folder, **options):
        return {name for _, name in read(shelf.export("csv", folder, **options)[0])}

    chosen = {"data_type_list": ("grad_reduced", "linear_hook"), "ranks": (0,), "steps": (2, 2)}
    assert {"grad_reduced_1-1.csv"} == names("chosen", **chosen)
    assert [("tensor_stats", 1)] == [pair for pair in shelf.export("csv", **chosen)[1].rows.items() if pair[1]]
    assert {"linear_hook_0-0.csv"} == names("hooks", data_type_list=("linear_hook",))
    assert {"grad_clipped_0-0.csv", "grad_clipped_1-1.csv"} == names("others", data_type_list=("other",))
    start = dt.datetime(2026, 3, 1, 12, 0, 2, tzinfo=dt.UTC)
    assert {"1"} == {*only(shelf.export("csv", "late", time_start=start, time_end=start)[0], "step")}


def test_parallel_writers_write_equal_files(shelf):
    shelf.put(tensor_stats=[tensor(step, rank=rank, norm=step / 7) for step in range(1, 50) for rank in range(4)])
    one, _ = shelf.export("csv", "one", step_count_per_record=10)
    many, _ = shelf.export("csv", "many", step_count_per_record=10, process_num=3)

    assert read(one) == read(many)
    assert 20 == len(read(one))


def test_run_beyond_one_window_is_written_in_order(shelf, monkeypatch):
    monkeypatch.setattr("rankscope_storage.formats.export.WINDOW_ROWS", 3)
    put_steps(shelf, *range(1, 12))
    target, report = shelf.export("csv", step_count_per_record=4)

    assert [f"grad_reduced_{first}-{first + 3}.csv" for first in (0, 4, 8)] == [path.name for path in report.files]
    assert 22 == len(only(target, "step"))


def test_last_call_is_kept_and_omitted_rows_are_counted(shelf):
    calls = [tensor(1, call_seq=call, norm=float(call)) for call in (1, 2)]
    shelf.put(tensor_stats=[*calls, tensor(None), tensor(1, kind="of my own")], events=[row(type="note")])
    shelf.put(features=[row(kind="something_else", module="w", value=0.5)])
    target, report = shelf.export("csv")

    assert ["2.0"] == only(target, "norm")
    assert {
        "features that msprobe does not have": 1,
        csv_msprobe.HIDDEN: 1,
        "rows without a step": 1,
        "tensors of kinds that msprobe does not have": 1,
        "events: not in msprobe's layout": 1,
    } == report.omitted


def test_run_without_values_is_an_error_and_leaves_nothing(shelf):
    shelf.put(events=[row(type="note")])

    with pytest.raises(ExportError, match="nothing was written"):
        shelf.export("csv")
    assert not (shelf.folder / "out").exists()


def test_failed_export_keeps_the_old_files(shelf, monkeypatch):
    put_steps(shelf, 1)
    target, first = shelf.export("csv", step_count_per_record=5)
    before = first.files[0].read_text()
    put_steps(shelf, 2)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(ExportError, match="No space left"):
        shelf.export("csv", step_count_per_record=5)

    assert before == first.files[0].read_text()
    assert not list(target.rglob(".*"))
