"""`rankscope runs tag|untag|note|show`, and the list filtered by tags, in this process: each start takes a second."""

import datetime as dt
import json
import os
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from rankscope.commands import build
from rankscope.output.run_texts import run_lines, shortened
from rankscope.shell.errors import CommandError
from rankscope_storage.base.errors import StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.maintenance.upgrade import upgrade

OLD_STORE = Path(__file__).parents[1] / "storage" / "data" / "store_without_labels"
GOLDEN = Path(__file__).parents[1] / "golden" / "cli" / "runs_show.txt"


@pytest.fixture
def runs(tmp_path):
    """Return a function that runs `rankscope runs …` on a store with the run `before` and returns the printed text."""
    store, application = tmp_path / "store", build()
    shutil.copytree(OLD_STORE, store)
    upgrade(store, sync_to_disk)

    def run(*arguments):
        done = CliRunner().invoke(application, ["runs", *arguments, "--store", str(store)])
        if isinstance(done.exception, CommandError):
            return str(done.exception)
        assert 0 == done.exit_code, done.output
        return done.output

    return run


def listed(text):
    return [row["run"] for row in json.loads(text)]


def test_tags_and_notes_can_be_set_shown_queried_and_removed(runs):
    tagged = runs("tag", "before", "team=ours", "url=http://x/?a=b", "empty=")
    noted = runs("note", "before", "warm-up too short\nsee r2")
    (row,) = json.loads(runs("--format", "json"))
    facts = json.loads(runs("show", "before", "--format", "json"))
    screen = runs("show", "before")
    if os.environ.get("RANKSCOPE_UPDATE_GOLDEN"):
        GOLDEN.write_text(screen, encoding="utf-8")
    untagged = runs("untag", "before", "url", "empty")
    silent = runs("note", "before", "")

    assert "tags  team=ours  url=http://x/?a=b  empty=\nnote  none\n" == tagged
    assert noted.endswith("note  warm-up too short\nsee r2\n")
    assert {"team": "ours", "url": "http://x/?a=b", "empty": ""} == json.loads(row["tags"]) == facts["tags"]
    assert "warm-up too short\nsee r2" == row["note"] == facts["note"]
    assert ["train.py"] == facts["argv"]
    assert [("0123456789abcdef0123456789abcdef01234567", 0)] == [
        (launch["git_commit"], launch["attempt"]) for launch in facts["attempts"]
    ]
    assert GOLDEN.read_text(encoding="utf-8") == screen
    assert "tags  team=ours\nnote  warm-up too short\nsee r2\n" == untagged
    assert "tags  team=ours\nnote  none\n" == silent


def test_list_is_filtered_by_tags(runs):
    runs("tag", "before", "team=ours", "size=7b")

    def chosen(*tags):
        return listed(runs("--format", "json", *(part for tag in tags for part in ("--tag", tag))))

    assert ["before"] == chosen("team=ours", "size")
    assert [] == chosen("team=ours", "size=8b") == chosen("team=")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tag", "before"], "write: rankscope runs tag RUN KEY=VALUE…"),
        (["tag", "before", "team"], "'team' is not a tag: write KEY=VALUE"),
        (["tag", "before", "=x"], "'' is not a valid tag key"),
        (["untag", "before", "team"], "the run has no tag team: it has no tags"),
        (["note", "before"], "write: rankscope runs note RUN TEXT"),
        (["show"], "write: rankscope runs show RUN"),
        (["show", "befor"], "run 'befor' not found."),
        (["show", "before", "--format", "csv"], "runs show prints text, or JSON with --format json"),
        (["rm", "before", "--tag", "a=b"], "--tag filters the list of runs: write rankscope runs rm RUN"),
    ],
)
def test_wrong_arguments_print_the_correct_usage(runs, arguments, message):
    assert runs(*arguments).startswith(message)


def test_rename_and_rm_print_the_number_of_rows(runs):
    """A renamed run keeps its rows and tags."""
    runs("tag", "before", "team=ours")
    renamed = runs("rename", "before", "after")
    facts = json.loads(runs("show", "after", "--format", "json"))
    left = listed(runs("--format", "json"))
    removed = runs("rm", "after", "--yes")

    assert re.fullmatch(r"\d+ rows in \d+ files\n", renamed)
    assert {"team": "ours"} == facts["tags"]
    assert "after" in left
    assert "before" not in left
    assert re.fullmatch(r"\d+ rows in \d+ files; [\d,]+ bytes will be freed by maintenance\n", removed)
    assert "after" not in listed(runs("--format", "json"))


@pytest.mark.parametrize("reason", ["No space left on device (os error 28)", "Disk quota exceeded"])
def test_removal_on_a_full_disk_names_how_to_make_room(runs, monkeypatch, reason):
    def full(*_):
        raise StoreError(f"the log of history cannot be read or written: {reason}")

    monkeypatch.setattr("rankscope_storage.runs.edit.remove", full)
    text = runs("rm", "before", "--yes")

    assert reason in text
    assert "The disk is full: delete files outside of the store, or move the store to a larger disk. Then run" in text


def test_rename_to_an_existing_run_fails(runs):
    assert runs("rename", "before", "before").startswith(
        "a run named 'before' already exists: `rankscope runs merge` joins"
    )
    assert runs("merge", "before", "nobody").startswith("there is no run named 'nobody'")


# The list of runs is one line per run at the usual widths of a terminal.


STARTED = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.UTC)


def row(**values):
    found = {"run": "gpt-7b-lr3e-4-seed1-2026-03-01T12-00-00", "state": "completed", "attempts": 3, "ranks": 1024}
    found |= {"last_step": 1_200_000, "planned_steps": 1_500_000, "started_at": STARTED, "seconds": 273_600.0}
    found |= {"source_kind": "live", "reason": "rank 1 of host-17 vanished: no heartbeat for 30 s"}
    return found | {"tags": '{"team": "ours"}', "note": "warm-up too short\nsee r2"} | values


@pytest.mark.parametrize("width", [80, 120, 160, 200])
def test_every_run_is_one_line_that_fits(width):
    lines = list(run_lines(pa.Table.from_pylist([row(), row(run="b", state="running")]), width))

    assert 3 == len(lines)
    assert max(map(len, lines)) <= width
    assert "1,200,000/1,500,000" in lines[1]
    assert "3 d 4 h" in lines[1]


def test_a_wider_terminal_shows_more_columns():
    table = pa.Table.from_pylist([row()])
    shown = [next(run_lines(table, width)).split() for width in (80, 130, None)]

    assert ["run", "state", "steps", "ranks", "started", "duration"] == shown[0]
    assert [*shown[0], "attempts"] == shown[1]
    assert [*shown[1], "reason", "tags", "note"] == shown[2]


def test_unknown_values_are_empty():
    unknown = dict.fromkeys(row()) | {"run": "r", "attempts": 0, "ranks": 0}
    lines = list(run_lines(pa.Table.from_pylist([unknown, row()])))

    assert ["r", "unknown"] == lines[1].split()


@pytest.mark.parametrize(("text", "most", "short"), [("abcdefgh", 8, "abcdefgh"), ("abcdefghi", 8, "abc…fghi")])
def test_a_long_name_keeps_both_ends(text, most, short):
    assert short == shortened(text, most)
