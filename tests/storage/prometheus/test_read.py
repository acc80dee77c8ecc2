"""History as Prometheus asks for it: the names and labels of live data, and exactly the series that match."""

import math
import re
import shutil
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.prometheus.conftest import JULY, MARCH, History, row, stored
from tests.storage.rows import table

from rankscope_storage.base.errors import LimitError, QueryError
from rankscope_storage.connection import connect
from rankscope_storage.prometheus.query import Matcher, MatchType

SPRING = (("instance", "spring/0"), ("job", "rankscope"), ("rank", "0"), ("run", "spring"))


def named(metric, *more, identity=SPRING):
    return tuple(sorted((("__name__", metric), *identity, *more)))


def test_features_have_the_lowest_and_the_highest_value_of_each_module(history):
    name = ("__name__", "=", "rankscope_feature_value")
    found = history.ask(("job", "=", "rankscope"), ("run", "=", "spring"), name)
    highest = history.ask(("run", "=", "spring"), name, ("op", "=", "max"), ("module", "=", "core"))

    values = {dict(labels)["op"]: [value for _, value in samples] for labels, samples in found.items()}
    assert {"min": [0.5], "max": [2.0]} == values
    assert [[(MARCH + 120_000, 2.0)]] == list(highest.values())


def test_scalars_and_steps_have_the_labels_of_the_metrics_page(history):
    """Imported samples with equal labels belong to the same series."""
    found = history.ask(("run", "=", "spring"), ("rank", "=", "0"), ("__name__", "!~", "rankscope_(tensor|feature).*"))

    minute = 60_000
    later = [(MARCH + 2 * minute, 0.5), (MARCH + 3 * minute, 1 / 3)]
    assert {
        named("rankscope_loss"): [(MARCH + 1_000, 9.0), (MARCH + minute, 9.0), *later],
        named("rankscope_step"): [(MARCH + step * minute, float(step)) for step in (1, 2, 3)],
        named("rankscope_kind_step", ("kind", "grad_reduced")): [(MARCH + n * minute, float(n)) for n in (1, 2, 3)],
        named("rankscope_kind_step", ("kind", "param_after")): [(MARCH + n * minute, float(n)) for n in (1, 2, 3)],
        named("rankscope_learning_rate", ("group", "a|b")): [(MARCH + 2 * minute, 0.1)],
        named("rankscope_tokens_total"): [(MARCH + minute, 8.0)],
        named("rankscope_scalar", ("name", "tokens_total")): [(MARCH + 2 * minute, -1.0)],
    } == found


def test_tensors_have_one_series_per_statistic(history):
    found = history.ask(("__name__", "=", "rankscope_tensor_value"), ("run", "=", "spring"), ("tensor", "=", "head"))

    by_key = {
        tuple(dict(labels)[name] for name in ("kind", "op", "rank")): samples for labels, samples in found.items()
    }
    kinds, ops = ("grad_reduced", "param_after"), ("norm", "nans")
    assert {(kind, op, rank) for kind in kinds for op in ops for rank in "01"} == by_key.keys()
    assert [1.25, 2.25, 3.25] == [value for _, value in by_key["param_after", "norm", "1"]]


def test_unusual_columns_become_labels_and_nan_is_a_value(history):
    found = history.ask(("kind", "=", "act_out"), ("run", "=", "spring"), ("__name__", "=", "rankscope_tensor_value"))

    (labels, samples), *_ = found.items()
    assert {("tensor", "attn[3]"), ("vpp_stage", "1"), ("op", "norm")} <= set(labels)
    assert math.isnan(samples[0][1])
    assert "placement" not in dict(labels)


def test_series_query_returns_the_last_sample_of_each_series(history):
    """Lists of runs and ranks over months therefore remain within the limits."""
    asked = (("job", "=", "rankscope"), ("run", "=", "summer/1"))
    all_samples = history.ask(*asked)
    steps = ("__name__", "=", "rankscope_step")

    last = {labels: samples[-1:] for labels, samples in all_samples.items()}
    assert str(last) == str(history.ask(*asked, alone=True))  # NaN is none of itself
    assert 3 == len(history.ask(*asked, steps, alone=True, samples=3)), "two ranks, and rows without a rank"


def test_query_for_last_samples_returns_all_series(history):
    """Also series of other exporters, and series of which one half was imported and the other half logged."""
    last = {labels: samples[-1:] for labels, samples in history.ask().items()}

    assert repr(last) == repr(history.ask(last=True)) == repr(history.ask(alone=True))


def test_other_exporters_keep_their_metric_names(history):
    found = history.ask(("__name__", "=~", "DCGM_.*|up"), ("gpu", "!=", "1"))

    temperature = [(MARCH + 15_000 * n, 40.0 + n) for n in range(3)]
    assert {
        (("__name__", "DCGM_TEMP"), ("gpu", "0"), ("instance", "node-1")): temperature,
        (("__name__", "up"), ("instance", "node-1")): [(MARCH, 1.0)],
    } == found


def test_series_get_the_external_labels_of_the_client(history):
    """Prometheus expects them on remote series and removes them; pushed series have their own labels."""
    asked = (("__name__", "=~", "rankscope_loss|DCGM_TEMP|pushed"), ("run", "!=", "summer/1"), ("rank", "!=", "1"))
    outside = {"external_labels": {"cluster": "a", "zone": "east"}}

    plain = history.ask(*asked)
    same = history.ask(*asked, ("cluster", "=", "a"), ("zone", "=~", "e.*"), **outside)
    other = history.ask(*asked, ("cluster", "=", "b"), **outside)

    def inside(labels):
        return tuple((name, text) for name, text in labels if name not in {"cluster", "zone"})

    without = {labels: samples for labels, samples in plain.items() if ("cluster", "b") not in labels}
    assert without == {inside(labels): samples for labels, samples in same.items()}
    assert all({("cluster", "a"), ("zone", "east")} <= set(labels) for labels in same)
    assert {"rankscope_loss", "DCGM_TEMP"} == {dict(labels)["__name__"] for labels in same}
    assert [(("__name__", "pushed"), ("cluster", "b"), ("job", 'j"ä'), ("zone", "east"))] == [*other]


def test_staleness_markers_are_returned(history):
    ((labels, samples),) = history.ask(("job", "=", 'j"ä')).items()

    assert ("__name__", "pushed") in labels
    assert [7.0, 0x7FF0_0000_0000_0002] == [samples[0][1], struct.unpack("<Q", struct.pack("<d", samples[1][1]))[0]]


def test_time_range_is_closed_to_the_millisecond(history):
    loss = (("__name__", "=", "rankscope_loss"), ("run", "=", "spring"), ("rank", "=", "0"))
    first, last = MARCH + 60_000, MARCH + 120_000

    assert [[first, last], [last], [first]] == [
        [ms for samples in history.ask(*loss, start=start, end=end).values() for ms, _ in samples]
        for start, end in ((first, last), (first + 1, last), (first, last - 1))
    ]
    assert {} == history.ask(*loss, start=-(1 << 63), end=-1)
    assert 4 == len(history.ask(*loss, start=-(1 << 62), end=1 << 62)[named("rankscope_loss")])


NAMES = ["__name__", "run", "rank", "instance", "job", "kind", "tensor", "op", "vpp_stage", "unit", "name", "gpu", "x"]
VALUES = [
    "",
    "spring",
    "summer/1",
    "0",
    "1",
    "01",
    "spring/0",
    "/",
    "rankscope",
    "grad_reduced",
    "head",
    "norm",
    "nans",
]
VALUES += ["attn[3]", "1", "accuracy", "node-1", "up", "rankscope_loss", "rankscope_tensor_value", "DCGM_TEMP"]
PATTERNS = ["", ".*", ".+", "spring|summer/1", "s.*", "[01]", "0|1", "|0", "grad_.*", "norm|nans", "spring/.*", "1|"]
PATTERNS += ["(?i)SPRING", r"node-\d", "a|b", "rankscope_(loss|scalar)", "rankscope_.*", "spring/0|summer/1/1"]
PATTERNS += [r"attn\[3\]|head", r"head|layers\.0\.weight"]
MATCHERS = st.one_of(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["=", "!="]), st.sampled_from(VALUES)),
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["=~", "!~"]), st.sampled_from(PATTERNS)),
)


def fits(labels, matcher):
    name, operator, value = matcher
    text = dict(labels).get(name, "")
    found = text == value if operator in {"=", "!="} else re.fullmatch(value, text) is not None
    return found is (operator in {"=", "=~"})


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(MATCHERS, min_size=1, max_size=3))
def test_matchers_in_sql_select_the_same_series(history, matchers):
    """Files, columns and SQL may only save work: the answer is that of Python's own `re` over all series."""
    everything = history.ask()
    expected = {labels: samples for labels, samples in everything.items() if all(fits(labels, m) for m in matchers)}

    assert repr(expected) == repr(history.ask(*matchers))


def test_files_without_matching_rows_are_not_opened(folder, tmp_path):
    """By run and by time: here the files of the other run are gone."""
    store = shutil.copytree(folder, tmp_path / "store")
    with connect(store) as connection:
        History(connection).ask()  # views are made with the first question, and look at a file each
        for dataset in ("scalars", "tensor_stats"):
            for path in connection.files(dataset, run="summer/1"):
                store.joinpath(path).unlink()
        history = History(connection)
        by_run = history.ask(("run", "=", "spring"))
        by_instance = history.ask(("instance", "=~", "spring/0"))
        by_time = history.ask(start=MARCH, end=JULY - 1)

    assert by_run
    assert by_instance.keys() < by_run.keys() < by_time.keys()


def test_query_beyond_a_limit_names_the_remedy(history):
    assert len(history.ask(samples=10_000)) <= 1000
    for limits, text in (({"samples": 10}, "more than 10 samples"), ({"series": 5}, "more than 5 series")):
        with pytest.raises(LimitError, match=text):
            history.ask(**limits)


def test_invalid_expression_is_rejected():
    with pytest.raises(QueryError, match="not a valid regular expression"):
        Matcher(MatchType.REGEX, "run", "(")


def test_last_sample_of_a_millisecond_wins(tmp_path):
    """Prometheus keeps no finer time; a log with whole seconds has several steps in one."""
    rows = [row("r", 0, step, MARCH, name="loss", value=float(step)) for step in (2, 1, 3)]
    with stored(tmp_path / "s", {"scalars": table("scalars", rows)}) as connection:
        found = History(connection).ask(("__name__", "=", "rankscope_loss"))

    assert [[(MARCH, 3.0)]] == list(found.values())


def test_missing_label_is_not_zero(history):
    """rank="" asks for series without a rank, rank="0" for rank 0 alone, and rank="00" for nothing."""
    ranks = [{dict(labels).get("rank") for labels in history.ask(("rank", "=", text))} for text in ("0", "00")]
    without = {dict(labels)["__name__"] for labels in history.ask(("rank", "=", ""), ("run", "=", "spring"))}

    assert [{"0"}, set()] == ranks
    assert {"rankscope_run_loss", "rankscope_scalar", "rankscope_step"} == without
