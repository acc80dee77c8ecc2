"""Other exporters with many series: a too large query is rejected early, and each matching series is returned."""

import pytest
from tests.storage.prometheus.conftest import MARCH, History, stored
from tests.storage.rows import table

from rankscope_storage.base.errors import LimitError
from rankscope_storage.prometheus.read import MATCH_BATCH_ROWS

MANY = 3 * MATCH_BATCH_ROWS


class Counted:
    """A connection that knows how many rows it handed over."""

    def __init__(self, connection):
        self._connection = connection
        self.rows = 0

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def query(self, *args):
        found = self._connection.query(*args)
        self.rows += found.num_rows
        return found

    def stream(self, *args, **more):
        for batch in self._connection.stream(*args, **more):
            self.rows += batch.num_rows
            yield batch


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Yield a store with an exporter that distinguishes its series by one label."""
    ids = ({"labels": f'{{"id":"{place}","mode":"idle"}}'} for place in range(MANY))
    common = {"run": "", "ts": MARCH * 1000, "ts_origin": "ingest", "target": "node-1", "metric": "many", "value": 1.0}
    samples = table("samples", ids, **common)
    with stored(tmp_path_factory.mktemp("many") / "store", {"samples": samples}) as connection:
        yield connection


@pytest.mark.parametrize("matcher", [("mode", "=~", "i.*"), ("mode", "=", "idle"), ("id", "!=", ""), ("x", "=", "")])
def test_too_large_query_is_rejected_before_reading_most_series(many, matcher):
    counted = Counted(many)
    with pytest.raises(LimitError, match="more than 5 series"):
        History(counted).ask(("__name__", "=~", "man."), matcher, series=5)

    assert 5 < counted.rows <= MATCH_BATCH_ROWS


def test_only_matching_series_count_for_the_limit(many):
    few = ("id", "=~", f"7|{MANY // 2}|{MANY - 1}")

    assert {"7", str(MANY // 2), str(MANY - 1)} == {dict(labels)["id"] for labels in History(many).ask(few, series=3)}
    with pytest.raises(LimitError, match="more than 2 series"):
        History(many).ask(few, series=2)


@pytest.mark.thorough
def test_series_up_to_the_limit_are_returned_with_their_labels(many):
    found = History(many).ask(("mode", "=~", "idle|user"), series=MANY, samples=MANY)

    every = [(("__name__", "many"), ("id", str(n)), ("instance", "node-1"), ("mode", "idle")) for n in range(MANY)]
    assert set(every) == found.keys()


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Yield a store with one metric for each of several unusual labels."""
    texts = {"none": None, "empty": "{}", "void": '{"a":""}', "own": '{"a":"x","instance":"i","__name__":"n"}'}
    texts |= {"list": "[]", "number": '{"a":1}', "torn": '{"a":', "last": '{"a":"y","a":"x"}', "lines": '{"a":"x\\ny"}'}
    rows = [{"metric": name, "labels": text, "target": "" if name == "own" else "t"} for name, text in texts.items()]
    samples = table("samples", rows, run="", ts=MARCH * 1000, ts_origin="file", value=1.0)
    with stored(tmp_path_factory.mktemp("odd") / "store", {"samples": samples}) as connection:
        yield History(connection)


@pytest.mark.usual(4)
@pytest.mark.parametrize(
    ("matcher", "expected"),
    [
        (("a", "=~", ".*"), {"none", "empty", "void", "own", "last"}),  # a point is no end of a line
        (("a", "=~", "(?s).*"), {"none", "empty", "void", "own", "last", "lines"}),
        (("a", "=", ""), {"none", "empty", "void"}),
        (("a", "!~", ".+"), {"none", "empty", "void", "lines"}),
        (("a", "!=", ""), {"own", "last", "lines"}),
        (("a", "=", "x"), {"own", "last"}),
        (("a", "=~", "x|"), {"none", "empty", "void", "own", "last"}),
        (("instance", "=~", "i"), {"own"}),
        (("instance", "!=", "i"), {"none", "empty", "void", "last", "lines"}),
        (("__name__", "=~", "n|own|list|number|torn"), {"own"}),
    ],
)
def test_absent_labels_are_empty_and_invalid_labels_are_skipped(odd, matcher, expected):
    assert expected == {dict(labels)["__name__"] for labels in odd.ask(matcher)}


def test_external_label_replaces_only_an_absent_label(odd):
    def found(*matcher):
        return {dict(labels)["__name__"] for labels in odd.ask(matcher, external_labels={"a": "x"})}

    assert {"none", "empty", "own", "last"} == found("a", "=", "x")
    assert {"void", "lines"} == found("a", "!~", "x")
