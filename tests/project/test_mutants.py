"""The changes of `make test-mutants`: each is one valid change of the code, and is found again in an edited file."""

import ast

import pytest
from tests.mutants import run
from tests.mutants.changes import changes

SOURCE = '''
"""A text with 1 and a < b."""
LIMIT: int = 5


def judged(values, *, low=0.5):
    """Return 1 < 2."""
    if not values and low > 0:
        return None
    found = [value for value in values if value >= low]
    found.append(1)
    return min(found) + LIMIT


QUERY = f"SELECT max(x) FROM {LIMIT} WHERE x > 1 AND y IS NULL"
'''


def changed(source):
    data = source.encode()
    return {
        (change.before, change.after): (data[: place.begin] + place.text.encode() + data[place.end :]).decode()
        for _, place, change in changes(source)
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("5", "6"),
        ("0.5", "1.5"),
        ("not values", "(values)"),
        ("not values and low > 0", "(not values) or (low > 0)"),
        ("value >= low", "(value) > (low)"),
        ("found.append(1)", "pass"),
        ("min", "max"),
        ("min(found) + LIMIT", "(min(found)) - (LIMIT)"),
        ("max(", "min("),
        ("AND", "OR"),
        ("IS NULL", "IS NOT NULL"),
    ],
)
def test_each_kind_of_change_is_made_alone(before, after):
    found = changed(SOURCE)[before, after]

    assert found.replace(after, before, 1) == SOURCE or SOURCE.replace(before, after, 1) == found
    assert ast.dump(ast.parse(found)) != ast.dump(ast.parse(SOURCE))


def test_documentation_and_variables_of_a_query_are_not_changed():
    assert "1 < 2" not in {before for before, _ in changed(SOURCE)}
    assert "a < b" not in {before for before, _ in changed(SOURCE)}
    assert all("{LIMIT}" in text for text in changed(SOURCE).values())


def test_change_is_found_again_after_its_line_has_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    for moved in (SOURCE, SOURCE.replace("LIMIT: int = 5", "OTHER = 1\nLIMIT: int = 5")):
        path.write_text(moved, encoding="utf-8")
        (first,) = [change for _, _, change in changes(SOURCE) if change.before == "value >= low"]
        mutant = run.Mutant(1, "area", "a.py", first.function, first.line, first.place, first.before, first.after)

        _, data = run.located(mutant)

        assert moved.replace("value >= low", "(value) > (low)") == data.decode()

    path.write_text(SOURCE.replace("value >= low", "value > low"), encoding="utf-8")
    assert run.located(mutant) is None


def test_results_are_read_as_written(tmp_path):
    rows = [run.Result(1, "rules", "a.py", 'f: x = "a\tb"', "1", "2", "killed", "tests/a.py::test[x y]", 3, 1.5)]
    run.write(tmp_path / "a.tsv", rows)
    run.write(tmp_path / "a.tsv", rows, append=True)

    assert [*rows, *rows] == run.read(tmp_path / "a.tsv", run.Result)
