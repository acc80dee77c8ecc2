"""`rankscope runs tag|untag|note|show`, and the list by tags; in this process, since each start costs a second."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankscope.base.errors import CommandError
from rankscope.commands import build

OLD_STORE = Path(__file__).parents[1] / "storage" / "data" / "store_without_labels"
GOLDEN = Path(__file__).parents[1] / "golden" / "cli" / "runs_show.txt"


@pytest.fixture
def runs(tmp_path):
    """Return what runs `rankscope runs …` over a store with the run `before`, and gives what it printed."""
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


def test_labels_are_given_shown_asked_for_and_taken_away(runs):
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


def test_the_list_is_chosen_by_tags(runs):
    runs("tag", "before", "team=ours", "size=7b")

    def chosen(*tags):
        return listed(runs("--format", "json", *(part for tag in tags for part in ("--tag", tag))))

    assert ["before"] == chosen("team=ours", "size")
    assert [] == chosen("team=ours", "size=8b") == chosen("team=")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tag", "before"], "write: rankscope runs tag RUN KEY=VALUE…"),
        (["tag", "before", "team"], "'team' is no tag: write KEY=VALUE"),
        (["tag", "before", "=x"], "'' is no key of a tag"),
        (["untag", "before", "team"], "the run has no tag team: it has none"),
        (["note", "before"], "write: rankscope runs note RUN TEXT"),
        (["show"], "write: rankscope runs show RUN"),
        (["show", "befor"], "no run is called 'befor'."),
        (["show", "before", "--format", "csv"], "runs show prints lines, or --format json"),
        (["rm", "before", "--tag", "a=b"], "--tag chooses runs of the list: write rankscope runs rm RUN"),
    ],
)
def test_what_cannot_be_is_said_with_the_form_that_is_wanted(runs, arguments, complaint):
    assert runs(*arguments).startswith(complaint)


def test_rename_merge_and_rm_say_what_became_of_how_many_rows(runs):
    """A run is followed by its rows and its labels wherever it goes."""
    runs("tag", "before", "team=ours")
    renamed = runs("rename", "before", "after")
    facts = json.loads(runs("show", "after", "--format", "json"))
    left = listed(runs("--format", "json"))
    removed = runs("rm", "after", "--yes")

    assert re.fullmatch(r"\d+ rows in \d+ files\n", renamed)
    assert {"team": "ours"} == facts["tags"]
    assert "after" in left
    assert "before" not in left
    assert re.fullmatch(r"\d+ rows in \d+ files; [\d,]+ bytes will be free after maintenance\n", removed)
    assert "after" not in listed(runs("--format", "json"))


def test_a_run_is_not_renamed_to_one_that_there_is(runs):
    assert runs("rename", "before", "before").startswith(
        "a run is called 'before' already: `rankscope runs merge` joins"
    )
    assert runs("merge", "before", "nobody").startswith("no run is called 'nobody'")
