"""`rankscope export`: every format, and one-line error messages."""

import pyarrow.parquet as pq
import pytest

from rankscope_storage.formats import export_formats


def test_export_writes_the_run_and_reports_omitted_rows(rankscope, tmp_path):
    done = rankscope("export", "my-run", "--format", "tensorboard", "-o", str(tmp_path / "events"))

    assert 0 == done.returncode, done.stderr
    assert (
        f"my-run: tensorboard, rows: 704 tensor_stats, 240 scalars; in 2 files below {tmp_path}/events\n" == done.stdout
    )
    assert "omitted 5: events: not in event files\n" == done.stderr


def test_default_file_name_is_run_and_format(rankscope, tmp_path):
    done = rankscope("export", "my-run", "--format", "openmetrics", cwd=tmp_path)

    assert "my-run: openmetrics, rows: 704 tensor_stats, 240 scalars; in my-run-openmetrics.txt\n" == done.stdout
    assert ["my-run-openmetrics.txt"] == [path.name for path in tmp_path.iterdir()]


def test_options_reach_the_export_format(rankscope, tmp_path):
    target = tmp_path / "out"
    done = rankscope(
        "export", "my-run", "--format", "parquet", "-o", str(target), "--data-type-list", "grad_reduced",
        "--time-start", "Mar01_12-00-05", "--time-end", "2026-03-01T12:00:09+00:00", "--steps", "1:8", "--ranks", "1-3",
    )  # fmt: skip
    rows = pq.read_table(target / "tensor_stats.parquet").to_pylist()

    assert 0 == done.returncode, done.stderr
    assert {("grad_reduced", 1, step) for step in (5, 6, 7, 8)} == {(r["kind"], r["rank"], r["step"]) for r in rows}


def test_ranks_are_separated_by_commas_only(rankscope, tmp_path):
    given = {text: rankscope("export", "my-run", "--ranks", text, cwd=tmp_path) for text in ("0 1", "0,, 1,")}

    assert {"0 1": 2, "0,, 1,": 0} == {text: done.returncode for text, done in given.items()}
    assert "rankscope: --ranks '0 1': write numbers and ranges, such as 0,8-15\n" == given["0 1"].stderr


def test_run_named_like_a_path_is_written_into_the_folder(rankscope, tmp_path):
    rankscope("export", "../other run", "--format", "parquet", cwd=tmp_path)

    (path,) = tmp_path.iterdir()

    assert path.name.startswith("_other_run-parquet~")


@pytest.mark.usual(2)
@pytest.mark.parametrize("form", sorted(export_formats()))
def test_run_name_longer_than_a_file_name_can_be_exported(rankscope, tmp_path, form):
    """80 of these characters are 720 bytes in a file name."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "loss": 2.0, "timestamp": "2026-03-01T12:00:00"}\n')
    run, store = "学" * 80, str(tmp_path / "store")
    rankscope("import", str(log), "--run", run, "--store", store)
    (tmp_path / "out").mkdir()
    done = rankscope("export", run, "--format", form, "--store", store, cwd=tmp_path / "out")

    if form == "sqlite":  # this format contains only tensors
        assert "nothing was written" in done.stderr
    else:
        assert 0 == done.returncode, done.stderr
        assert [True] == [path.name.startswith("学" * 40) for path in (tmp_path / "out").iterdir()]


def test_help_and_an_unknown_format_name_every_format(rankscope):
    shown, refused = rankscope("export", "--help"), rankscope("export", "my-run", "--format", "tensorbord")
    words = [*export_formats(), "Examples", "promtool tsdb create-blocks-from openmetrics"]

    assert [] == [word for word in words if word not in " ".join(shown.stdout.split())]
    assert (2, "") == (refused.returncode, refused.stdout)
    assert refused.stderr.startswith("rankscope: unknown format 'tensorbord'. Did you mean 'tensorboard'? Formats:\n")
    assert len(export_formats()) == len(refused.stderr.splitlines()) - 1
