"""History as Prometheus asks for it: names and labels of live data, exactly the series that match, and limits."""

import math
import re
import shutil
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties import examples
from tests.storage.prometheus.conftest import ALWAYS, JULY, MARCH, History, row, stored
from tests.storage.rows import table

from rankscope_contract.model.events import RunState
from rankscope_storage.base.errors import LimitError, QueryError
from rankscope_storage.connection import Connection, connect
from rankscope_storage.prometheus.query import Matcher, MatchType, SeriesQuery
from rankscope_storage.prometheus.read import MATCH_BATCH_ROWS, CancelToken, read

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
VALUES = ["", "spring", "summer/1", "0", "1", "01", "spring/0", "/", "rankscope", "grad_reduced", "head", "norm"]
VALUES += ["nans", "attn[3]", "1", "accuracy", "node-1", "up", "rankscope_loss", "rankscope_tensor_value", "DCGM_TEMP"]
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


def test_scores_of_a_rule_are_one_series_as_on_the_page_of_the_rank(tmp_path):
    """The tensor with the largest score changes from step to step. A rule of the whole rank has no tensor."""
    labels = ['{"rule":"R","tensor":"a"}', '{"rule":"R","tensor":"b"}', '{"rule":"R","tensor":"a"}', '{"rule":"S"}']
    rows = [
        row("r", 0, step, MARCH + step, name="rule_score", value=float(step), labels=text)
        for step, text in enumerate(labels)
    ]
    with stored(tmp_path / "s", {"scalars": table("scalars", rows)}) as connection:
        found, of_scalars = (
            History(connection).ask(("__name__", "=", f"rankscope_{name}")) for name in ("rule_score", "scalar")
        )

    identity = (("instance", "r/0"), ("job", "rankscope"), ("rank", "0"), ("run", "r"))
    first = named("rankscope_rule_score", ("rule", "R"), identity=identity)
    other = named("rankscope_rule_score", ("rule", "S"), identity=identity)
    assert {first: [(MARCH + step, float(step)) for step in range(3)], other: [(MARCH + 3, 3.0)]} == found
    assert {} == of_scalars


def test_missing_label_is_not_zero(history):
    """rank="" asks for series without a rank, rank="0" for rank 0 alone, and rank="00" for nothing."""
    ranks = [{dict(labels).get("rank") for labels in history.ask(("rank", "=", text))} for text in ("0", "00")]
    without = {dict(labels)["__name__"] for labels in history.ask(("rank", "=", ""), ("run", "=", "spring"))}

    assert [{"0"}, set()] == ranks
    assert {"rankscope_run_loss", "rankscope_scalar", "rankscope_step"} == without


# A query ends when it is cancelled or exceeds the memory limit, and the next query runs.

SETTINGS = "SELECT current_setting('memory_limit') AS memory, current_setting('temp_directory') AS folder"
LIMITS = {"max_series": 1000, "max_samples": 10_000}


class Endless(SeriesQuery):
    """A question that no time is enough for."""

    def within(self):
        return "(SELECT sum(hash(many.range)) FROM range(1_000_000_000_000) AS many) > 0"


@pytest.mark.timeout(60)
def test_query_is_cancelled_by_another_thread_and_the_next_one_runs(history):
    patience, refused = CancelToken(), threading.Event()

    def impatient():
        while not refused.wait(0.02):
            patience.end("it took longer than 1 s")

    threading.Thread(target=impatient, daemon=True).start()
    with pytest.raises(LimitError, match="because it took longer than 1 s: ask for fewer series or a shorter time"):
        read(history.connection, [Endless((), *ALWAYS)], **LIMITS, patience=patience)
    refused.set()

    assert history.ask(("run", "=", "spring"))


def test_cancelled_query_does_not_start(history):
    patience = CancelToken()
    patience.end("the client has disconnected")

    with pytest.raises(LimitError, match="has disconnected"):
        read(history.connection, [Endless((), *ALWAYS)], **LIMITS, patience=patience)


def test_cancel_after_the_result_affects_no_other_query(history):
    patience = CancelToken()
    read(history.connection, [SeriesQuery((), 0, 1)], **LIMITS, patience=patience)
    rows = history.connection.stream("SELECT range FROM range(1_000_000)", batch_rows=1000)
    next(rows)
    patience.end("it took too long")

    assert 999_000 <= sum(batch.num_rows for batch in rows)


def test_query_beyond_the_memory_limit_names_the_remedy(history, monkeypatch):
    monkeypatch.setattr("rankscope_storage.prometheus.read.MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr("rankscope_storage.prometheus.read.SAMPLE_BYTES", 0)

    with pytest.raises(LimitError, match="more than 1 MiB of memory: ask for fewer series or a shorter time"):
        history.ask()


def test_memory_limit_applies_only_during_a_query(history):
    """Other connections use the same DuckDB instance without this limit."""
    before = history.connection.query(SETTINGS).to_pylist()
    seen = []

    class Asking(SeriesQuery):
        def within(self):
            seen.extend(history.connection.query(SETTINGS).to_pylist())
            return super().within()

    for max_samples in (10_000, 1 << 24):
        History(history.connection).ask(samples=max_samples)
        read(history.connection, [Asking((), 0, 1)], max_series=1, max_samples=max_samples)

    assert {("1.0 GiB", ""), ("4.0 GiB", "")} == {(row["memory"], row["folder"]) for row in seen}
    assert before == history.connection.query(SETTINGS).to_pylist()


# State, progress, end and incidents of runs.

MINUTE = 60_000
SECOND_ATTEMPT = MARCH + 5 * MINUTE


def version(run, attempt, ms, state, step, ended_ms=None):
    numbers = {"planned_steps": 10, "last_step": step, "world_size": 2, "source_kind": "live"}
    started = {0: MARCH, 1: SECOND_ATTEMPT}[attempt]
    times = {"started_at": started * 1000, "ended_at": None if ended_ms is None else ended_ms * 1000}
    return {**row(run, None, None, ms), "attempt": attempt, "state": state, **numbers, **times}


def incident(run, ms, state):
    labels = {"rule": "AnomalyNan", "severity": "critical", "kind": "grad_reduced", "tensor": "head", "op": "norm"}
    return row(run, 1, 7, ms, type="incident", message="", details=f'{{"state":"{state}"}}', **labels)


@pytest.fixture(scope="module")
def run_history(tmp_path_factory):
    versions = [
        version("spring", 0, MARCH, "running", 1),
        version("spring", 0, MARCH + MINUTE, "failed", 4, MARCH + MINUTE),
        version("spring", 1, SECOND_ATTEMPT, "running", 5),
        version("spring", 0, SECOND_ATTEMPT + 1, "failed", 4, MARCH + MINUTE),
        version("spring", 1, SECOND_ATTEMPT + MINUTE, "completed", 10, SECOND_ATTEMPT + MINUTE),
        version("other", 0, MARCH, "running", 2),
    ]
    events = [incident("spring", MARCH + MINUTE, "opened"), incident("spring", MARCH + 2 * MINUTE, "resolved")]
    events.append(incident("spring", MARCH + 2 * MINUTE + 500, "resolved"))
    events.append(row("spring", 0, 1, MARCH, type="note", severity="info", message="", details="{}"))
    losses = [
        row("spring", rank, step, MARCH + 9 * step + 10 * rank, name="loss", value=value, unit=None, labels=None)
        for rank, step, value in ((0, 1, 3.0), (1, 1, 4.0), (0, 2, 2.0), (1, 2, 5.0), (0, 3, 1.0))
    ]
    losses += [
        {**row("spring", rank, step, ms, name="grad_norm", value=float(step)), "attempt": attempt}
        for rank in (0, 1)
        for attempt, step, ms in ((0, 4, MARCH + 1), (1, 10, SECOND_ATTEMPT + MINUTE))
    ]
    rows = {"attempts": versions, "events": events, "scalars": losses}
    tables = {name: table(name, listed) for name, listed in rows.items()}
    with stored(tmp_path_factory.mktemp("runs") / "store", tables) as connection:
        yield History(connection)


SPRING_RUN = (("job", "=", "rankscope"), ("run", "=", "spring"))


def of_spring(metric, *labels):
    return tuple(sorted((("__name__", metric), ("job", "rankscope"), ("run", "spring"), *labels)))


def test_run_has_the_values_of_its_latest_attempt_at_each_time(run_history):
    times = [MARCH, MARCH + MINUTE, SECOND_ATTEMPT, SECOND_ATTEMPT + MINUTE]
    expected = {
        "rankscope_run_step": [1.0, 4.0, 5.0, 10.0],
        "rankscope_run_progress_ratio": [0.1, 0.4, 0.5, 1.0],
        "rankscope_run_attempt": [0.0, 0.0, 1.0, 1.0],
        "rankscope_run_steps_planned": [10.0] * 4,
        "rankscope_run_ranks_expected": [2.0] * 4,
        "rankscope_run_start_timestamp_seconds": [MARCH / 1000] * 2 + [SECOND_ATTEMPT / 1000] * 2,
    }

    for metric, values in expected.items():
        found = run_history.ask(*SPRING_RUN, ("__name__", "=", metric))
        assert {of_spring(metric): list(zip(times, values, strict=True))} == found
    metric, ends = "rankscope_run_end_timestamp_seconds", (MARCH + MINUTE, SECOND_ATTEMPT + MINUTE)
    assert {of_spring(metric): [(ms, ms / 1000) for ms in ends]} == run_history.ask(
        *SPRING_RUN, ("__name__", "=", metric)
    )


def test_loss_of_a_run_is_the_mean_of_the_ranks_that_logged_it_at_each_step(run_history):
    """As a curve, the loss ends with each attempt."""
    means = [(MARCH + 9, 3.5), (MARCH + 18, 3.5), (MARCH + 27, 1.0)]  # rank 1 logs step 2 after rank 0 logs step 3
    ends = [(MARCH + MINUTE + 1, "stale"), (SECOND_ATTEMPT + MINUTE + 1, "stale")]

    found = run_history.ask(*SPRING_RUN, ("__name__", "=", "rankscope_run_loss"))[of_spring("rankscope_run_loss")]

    assert [*means, *ends] == [(ms, "stale" if math.isnan(value) else value) for ms, value in found]


def test_each_state_is_one_series_that_is_1_while_it_lasts(run_history):
    found = run_history.ask(*SPRING_RUN, ("__name__", "=", "rankscope_run_state"))
    values = {dict(labels)["state"]: [value for _, value in samples] for labels, samples in found.items()}

    assert set(RunState) == values.keys()
    assert {"running": [1.0, 0.0, 1.0, 0.0], "failed": [0.0, 1.0, 0.0, 0.0], "completed": [0.0, 0.0, 0.0, 1.0]} == {
        state: numbers for state, numbers in values.items() if 1.0 in numbers
    }
    one = run_history.ask(*SPRING_RUN, ("__name__", "=", "rankscope_run_state"), ("state", "=", "failed"), alone=True)
    assert [[(SECOND_ATTEMPT + MINUTE, 0.0)]] == list(one.values())


def test_incident_has_the_labels_of_the_service_and_the_age_0(run_history):
    found = run_history.ask(*SPRING_RUN, ("__name__", "=", "rankscope_ingest_incident_age_seconds"))
    labels = {"rank": "1", "rule": "AnomalyNan", "severity": "critical", "kind": "grad_reduced", "tensor": "head"}

    key = of_spring("rankscope_ingest_incident_age_seconds", *labels.items(), ("op", "norm"), ("step", "7"))
    assert {key: [(MARCH + MINUTE, 0.0)]} == found


def test_latest_events_have_a_sample_for_each_minute_with_the_time_as_value(run_history):
    found = run_history.ask(*SPRING_RUN, ("__name__", "=", "rankscope_event_last_timestamp_seconds"))
    times = [MARCH + MINUTE, MARCH + 2 * MINUTE + 500]

    name = "rankscope_event_last_timestamp_seconds"
    expected = {"incident": times, "note": [MARCH]}
    assert {
        of_spring(name, ("type", kind)): [(ms, ms / 1000) for ms in moments] for kind, moments in expected.items()
    } == found


def test_runs_are_selected_by_job_run_time_and_labels(run_history):
    step = ("__name__", "=", "rankscope_run_step")

    assert {} == run_history.ask(step, ("job", "=", "rankscope-service"))
    assert {} == run_history.ask(step, ("job", "=", "rankscope"), ("rank", "=", "0"))
    assert {} == run_history.ask(*SPRING_RUN, step, start=JULY)
    assert {"spring", "other"} == {
        dict(labels)["run"] for labels in run_history.ask(step, ("run", "=~", "spring|other"))
    }


def test_curve_ends_with_each_attempt(run_history):
    """Prometheus does not repeat the last value after a staleness marker."""
    (found,) = run_history.ask(("__name__", "=", "rankscope_grad_norm"), ("rank", "=", "1"), *SPRING_RUN).values()
    before_end, end = SECOND_ATTEMPT + MINUTE, SECOND_ATTEMPT + MINUTE + 1

    assert [(MARCH + 1, 4), (MARCH + MINUTE + 1, "stale"), (before_end, 10), (end, "stale")] == [
        (ms, "stale" if math.isnan(value) else value) for ms, value in found
    ]
    (live,) = run_history.ask(
        ("__name__", "=", "rankscope_grad_norm"), ("rank", "=", "1"), *SPRING_RUN, end=MARCH + 2
    ).values()
    assert [(MARCH + 1, 4)] == live


# Other exporters with many series: a too large query is rejected early, and each matching series is returned.

MANY = 3 * MATCH_BATCH_ROWS


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Yield a store with an exporter that distinguishes its series by one label."""
    ids = ({"labels": f'{{"id":"{place}","mode":"idle"}}'} for place in range(MANY))
    common = {"run": "", "ts": MARCH * 1000, "ts_origin": "ingest", "target": "node-1", "metric": "many", "value": 1.0}
    samples = table("samples", ids, **common)
    with stored(tmp_path_factory.mktemp("many") / "store", {"samples": samples}) as connection:
        yield connection


@pytest.mark.parametrize("matcher", [("mode", "=~", "i.*"), ("mode", "=", "idle"), ("id", "!=", ""), ("x", "=", "")])
def test_too_large_query_is_rejected_before_reading_most_series(many, monkeypatch, matcher):
    read_rows, stream = [], Connection.stream

    def counted(*args, **more):
        for batch in stream(*args, **more):
            read_rows.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(Connection, "stream", counted)
    with pytest.raises(LimitError, match="more than 5 series"):
        History(many).ask(("__name__", "=~", "man."), matcher, series=5)

    assert 5 < sum(read_rows) <= MATCH_BATCH_ROWS


def test_only_matching_series_count_for_the_limit(many):
    few = ("id", "=~", f"7|{MANY // 2}|{MANY - 1}")

    assert {"7", str(MANY // 2), str(MANY - 1)} == {dict(labels)["id"] for labels in History(many).ask(few, series=3)}
    with pytest.raises(LimitError, match="more than 2 series"):
        History(many).ask(few, series=2)


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
        *((("a", "=", ""), {"none", "empty", "void"}), (("a", "!~", ".+"), {"none", "empty", "void", "lines"})),
        *((("a", "!=", ""), {"own", "last", "lines"}), (("a", "=", "x"), {"own", "last"})),
        *((("a", "=~", "x|"), {"none", "empty", "void", "own", "last"}), (("instance", "=~", "i"), {"own"})),
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
