"""Variables, steps, units and tables of a preview, compared with those of Grafana."""

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rankscope_dashboards.boards.elements.pages import all_panels
from rankscope_dashboards.generate import PROVISIONING
from rankscope_dashboards.preview.board import board_names, read_board
from rankscope_dashboards.preview.intervals import step_seconds
from rankscope_dashboards.preview.panels import Context, Curves, Latest, States, read_panel
from rankscope_dashboards.preview.prometheus import PreviewError, Prometheus, Series, Window
from rankscope_dashboards.preview.tables import table
from rankscope_dashboards.preview.units import formatted
from rankscope_dashboards.preview.variables import chosen_values, interpolated

HOUR = Window(start=0.0, end=3600.0)
TENSORS = read_board(PROVISIONING, "tensors")


class Recorded:
    """A Prometheus with the given results of queries and label values, which keeps the requests."""

    def __init__(self, results: Any = (), labels: Mapping[str, list[str]] | None = None) -> None:
        self.results, self.labels = results, labels or {}
        self.requests: list[dict[str, list[str]]] = []

    def fetch(self, path: str) -> Any:
        asked = parse_qs(urlsplit(path).query)
        self.requests.append(asked)
        if "match[]" in asked:
            found = [{name: one} for name, listed in self.labels.items() for one in listed]
            return {"status": "success", "data": found}
        if not self.results and (list_ := LISTS_OF.get(asked["query"][0].partition("(")[0])):
            found = [{"metric": {list_: name}, "value": [3600, "1"]} for name in self.labels.get(list_, ())]
            return {"status": "success", "data": {"resultType": "vector", "result": found}}
        if isinstance(self.results, str):
            return {"status": "error", "error": self.results}
        return {"status": "success", "data": {"resultType": "matrix", "result": list(self.results)}}

    def read(self, panel: Mapping[str, Any], **variables: str) -> Any:
        context = Context(Prometheus(self.fetch), HOUR, {"run": "r", "rank": ".+", **variables}, 5.0)
        return read_panel(panel, context)


def panel(kind: str, expr: str = "up", *, unit: str = "none", **settings: Any) -> dict[str, Any]:
    target = {"refId": "A", "expr": expr, "legendFormat": "rank {{rank}}"}
    defaults = {"unit": unit, "noValue": "No rank is up", **settings}
    own = {"type": kind, "title": "Up", "gridPos": {"w": 12}}
    return own | {"targets": [target], "fieldConfig": {"defaults": defaults}}


def series(rank: str, *samples: tuple[float, str]) -> dict[str, Any]:
    return {"metric": {"__name__": "up", "rank": rank}, "values": [list(one) for one in samples]}


LISTS_OF = {"sort_desc": "run", "topk": "tensor"}
LISTS = {"run": ["r"], "rank": ["0", "10", "2"], "kind": ["param", "act_out"], "tensor": ["a.b", "c"]}


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({}, {"kind": "act_out", "tensor": ".+"}),
        ({"tensor": ["a.b"], "kind": ["param"]}, {"kind": "param", "tensor": r"a\\.b"}),
        ({"rank": ["0", "10"]}, {"rank": "(0|10)", "kind": "act_out", "tensor": ".+"}),
    ],
)
def test_variables_have_the_values_that_grafana_sends(given, values):
    found = chosen_values(TENSORS, Prometheus(Recorded(labels=LISTS).fetch), HOUR, given)

    assert {"run": "r", "rank": ".+", "lines": r"(a\\.b|c)", "rows": r"(a\\.b|c)"} | values == found


def test_list_in_the_board_has_the_value_that_grafana_sends():
    """The choice of the board if it is in the list. Without a choice, Grafana 9.4 sends []."""
    for current, value in (({"current": {"value": "5m"}}, "5m"), ({"current": {"value": "9m"}}, ""), ({}, "")):
        menu = {"name": "smooth", "type": "custom", "query": "1m,5m"} | current
        board = {"templating": {"list": [menu]}}

        assert {"smooth": value} == chosen_values(board, Prometheus(Recorded().fetch), HOUR, {})


def test_lists_of_variables_depend_on_the_variables_before():
    recorded = Recorded(labels=LISTS)
    chosen_values(TENSORS, Prometheus(recorded.fetch), HOUR, {"rank": ["2"]})

    tensors, lines = recorded.requests[-3]["match[]"][0], recorded.requests[-2]["query"][0]
    assert 'rankscope_tensor_value{job="rankscope", run="r", rank=~"2", kind="act_out", op="norm"}' == tensors
    assert 'rank=~"2", kind="act_out", tensor=~".+", op="norm"}[3600s]' in lines


def test_wrong_value_of_a_variable_names_the_right_ones():
    for given, message in (
        ({"run": ["gone"]}, "unknown run 'gone' in the time range: choose one of r"),
        ({"size": ["1"]}, "no variable 'size': its variables are run, rank, kind, tensor"),
        ({"run": ["r", "r"]}, "has one value"),
    ):
        with pytest.raises(PreviewError, match=message):
            chosen_values(TENSORS, Prometheus(Recorded(labels=LISTS).fetch), HOUR, given)


def test_quotes_and_backslashes_of_a_name_do_not_end_the_selector():
    lists = LISTS | {"run": ['a"b\\c']}
    values = chosen_values(TENSORS, Prometheus(Recorded(labels=lists).fetch), HOUR, {})

    assert r'{run="a\"b\\c"}' == interpolated('{run="${run:raw}"}', values)


@pytest.mark.parametrize(
    ("seconds", "points", "step"),
    [(60, 1000, 5), (3600, 240, 15), (3600, 100, 30), (86_400, 1000, 60), (1e7, 10, 604_800)],
)
def test_step_of_a_query_is_a_round_interval_above_the_scrape_interval(seconds, points, step):
    assert step == step_seconds(Window(start=0.0, end=seconds), points, 5.0)
    assert 400 * 86_400 / step_seconds(Window(start=0.0, end=400 * 86_400.0), 100_000, 5.0) < 11_000, "of Prometheus"


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        *((0.1234, "percentunit", 1, "12.3%"), (3 * 2.0**30, "bytes", None, "3 GiB")),
        *((2_500_000.0, "Bps", None, "2.50 MB/s"), (0.0042, "s", None, "4.20 ms"), (90.0, "s", None, "1.50 min")),
        *((93_784.0, "dtdurations", 0, "1 d 02:03:04"), (6e-5, "sci", 2, "6.00e-5")),
        (1234.5, "suffix: tok/s", 0, "1,234 tok/s"),
        *((1_700_000_000_000.0, "dateTimeAsIso", None, "2023-11-14 22:13:20"), (61.0, "celsius", None, "61 °C")),
        *((math.nan, "none", None, "NaN"), (0.5, "furlongs", None, "0.500 furlongs")),
    ],
)
def test_values_have_their_units(value, unit, decimals, text):
    assert text == formatted(value, unit, decimals)


def test_every_unit_of_the_boards_is_known():
    panels = [one for name in board_names(PROVISIONING) for one in all_panels(read_board(PROVISIONING, name))]
    settings = [one.get("fieldConfig", {"defaults": {}}) for one in panels]
    columns = [each for one in settings for column in one.get("overrides") or () for each in column["properties"]]
    units = {one["defaults"].get("unit", "none") for one in settings}
    units |= {one["value"] for one in columns if one["id"] == "unit"}

    assert [] == [unit for unit in sorted(units) if formatted(0.012, unit).endswith(f" {unit}")]


def test_panels_of_each_type_have_their_data():
    recorded = Recorded([series("0", (0, "1"), (15, "2")), series("1", (0, "NaN"))])
    steps = {"steps": [{"value": None, "color": "green"}, {"value": 2, "color": "red"}]}
    stat, gauge, chart, states = (
        recorded.read(panel(kind, min=0, max=4, thresholds=steps)).body
        for kind in ("stat", "gauge", "timeseries", "status-history")
    )

    assert (Latest(name="rank 0", cell=("2", "red")), Latest(name="rank 1", cell=("NaN", "green"))) == stat
    assert [0.5, None] == [one.share for one in gauge]
    assert isinstance(chart, Curves)
    assert (["rank 0", "rank 1"], True) == ([name for name, _ in chart.lines], chart.has_zero)
    assert isinstance(states, States)
    assert [("1", "green"), ("2", "red")] == [one for _, _, one in states.rows[0][1]]
    assert [("lower", "green"), ("from 2", "red")] == list(states.key)


def test_other_panel_is_a_table_and_one_without_data_has_its_reason():
    found = Recorded([series("0", (0, "1"))]).read(panel("heatmap"))
    empty, rejected = Recorded().read(panel("stat")), Recorded("parse error").read(panel("stat"))

    assert ("Time", "rank", "Value") == found.body.headings
    assert ("Panels of the type heatmap are shown as a table of latest values in a preview.",) == found.notes
    assert ("No rank is up", None, ()) == (empty.empty, empty.body, empty.notes)
    assert ("Query A: Prometheus rejected the query: parse error",) == rejected.notes


def test_first_cause_is_the_incident_of_the_lowest_step():
    """Steps are labels, that is texts, in which 9 is after 10."""
    (first,) = [one for one in all_panels(read_board(PROVISIONING, "incidents")) if one["title"] == "First cause"]
    labels = [{"rule": "AnomalyNan", "step": step, "tensor": f"layer.{step}"} for step in ("10", "9")]
    found = table(first, {"A": [Series(one, (0.0,), (1.7e12,)) for one in labels]})
    (row,) = [dict(zip(found.headings, row, strict=True)) for row in found.rows]

    assert ("layer.9", "9", "2023-11-14 22:13:20") == tuple(
        row[name].text for name in ("Tensor", "Step", "Latest firing")
    )


def test_table_of_several_queries_has_one_row_for_each_run():
    (runs, *_) = [one for one in all_panels(read_board(PROVISIONING, "runs")) if one["type"] == "table"]
    found = table(runs, {"A": [Series({"run": "r"}, (0.0,), (3.0,))], "C": [Series({"run": "r"}, (0.0,), (0.5,))]})

    assert ("Run", "State", "Progress") == found.headings
    assert ((("r", ""), ("completed", "blue"), ("50.0%", "")),) == found.rows
