"""`rankscope runs tag|untag|note|show`, and the list filtered by tags.

The commands run in this process, because each start of a process takes a second.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankscope.base.errors import CommandError
from rankscope.commands import build
from rankscope_storage.base.errors import StoreError

OLD_STORE = Path(__file__).parents[1] / "storage" / "data" / "store_without_labels"
GOLDEN = Path(__file__).parents[1] / "golden" / "cli" / "runs_show.txt"


@pytest.fixture
def runs(tmp_path):
    """Return a function that runs `rankscope runs …` on a store with the run `before` and returns the printed text."""
    store, application = tmp_path / "store", build()
    shutil.copytree(OLD_STORE, store)

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
