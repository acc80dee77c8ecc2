"""The page of the service's metrics, scalars of viewed runs, firings of ended ranks, and goodput."""

import asyncio
import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.ingest import builders

from rankscope_contract.model.events import RunState
from rankscope_ingest.base.tables import rows_table
from rankscope_ingest.live.progress import RunMeter, run_progress
from rankscope_ingest.live.service_metrics import FAILURE_REASONS, ServiceMetrics
from rankscope_ingest.live.tails import KEPT_STEPS, KEPT_VALUES, MOST_NAMES, LiveTails
from rankscope_ingest.runs.incident import run_incident
from rankscope_storage.base.rule_names import RUN_FAILED
from rankscope_storage.base.service_catalogue import BYTES_INGESTED, CATALOG, RECORDS_INGESTED
from rankscope_storage.maintenance.compaction import CompactionReport

GOLDEN = Path(__file__).parents[2] / "golden" / "service_page.txt"


def test_page_has_exactly_the_families_of_the_catalogue():
    """Failures are counted from zero."""
    metrics = ServiceMetrics()
    metrics.show([], [], [], 0)
    page = metrics.page().decode()
    families = {family.name for family in text_string_to_metric_families(page)}
    expected = {spec.name.removesuffix("_total") for spec in CATALOG.values() if spec.page == "service"}

    assert expected == families - {name for name in families if name.endswith("_created")}
    failures = [f'rankscope_ingest_scrape_failures_total{{reason="{reason}"}} 0.0' for reason in FAILURE_REASONS]
    assert [] == [line for line in failures if line not in page]


def losses(*rows):
    names = ("name", "value", "labels")
    return rows_table("scalars", [{"run": "r", **dict(zip(names, row, strict=True))} for row in rows])


def tokens(total):
    return losses(("tokens_total", total, None))


def test_loss_is_the_mean_over_the_ranks_that_logged_it_at_its_newest_step():
    meter = RunMeter()
    meter.observe(0, losses(("loss", 2.0, None)), 0, 1)
    meter.observe(1, losses(("loss", math.nan, None)), 0, 1)
    first = meter.loss
    meter.observe(0, losses(("loss", 1.9, None)), 1, 2)
    second = meter.loss
    meter.observe(1, losses(("loss", 1.8, None), ("loss", 1.7, None)), 1, 3, lambda position: position + 1)

    assert math.isnan(first[0])
    assert (1.9, 1, 1) == second
    assert (pytest.approx(1.8), 2, 0) == meter.loss


@pytest.mark.parametrize(
    ("rows", "loss", "part"),
    [
        ([("loss", 2.0, None), ("loss", math.inf, '{"loss":"lm"}'), ("loss", 0.1, '{"loss":"aux"}')], 2.0, "loss"),
        ([("train_loss", math.inf, None), ("loss", 2.0, None)], 2.0, "train_loss"),
        ([("train/loss", math.inf, None)], None, "train/loss"),
        ([("eval_loss", 3.0, None)], None, None),
        # the first labels, as on the pages
        ([("loss", 3.0, '{"loss":"b"}'), ("loss", 2.0, '{"loss":"a"}')], 2.0, None),
    ],
)
def test_part_of_a_loss_that_is_not_finite_is_named_with_the_loss(rows, loss, part):
    meter = RunMeter()
    meter.observe(0, losses(*rows), 0, 1)

    assert (loss, part) == (meter.loss and meter.loss[0], meter.nonfinite_loss)


def test_token_rates_of_ranks_are_summed_and_a_reset_restarts_one():
    meter = RunMeter()
    for second in range(5):
        for rank in (0, 1):
            meter.observe(rank, tokens(100.0 * second), second * 1_000_000, second)
    before = meter.tokens_per_second()
    meter.observe(0, tokens(0.0), 5_000_000, 5)
    meter.observe(0, tokens(50.0), 6_000_000, 6)

    assert (200.0, 150.0) == (before, meter.tokens_per_second())


def test_eta_follows_the_present_rate():
    meter = RunMeter()
    for second in range(0, 100, 2):
        meter.observe(0, None, second * 1_000_000, second // 2)

    assert pytest.approx(2 * 51) == meter.eta_seconds(100, 49)
    assert meter.eta_seconds(None, 49) is None
    assert 0 == meter.eta_seconds(40, 49)
    for step in range(50, 58):  # slower, of which one has a pause
        meter.observe(0, None, (98 + 10 * (step - 49) + 100 * (step > 54)) * 1_000_000, step)
    assert pytest.approx(10 * 43) == meter.eta_seconds(100, 57)


def an_attempt(run="r", **changes):
    fields = {"number": 1, "world_size": 4, "started_at": 5_000_000}
    return builders.attempt(map(builders.rank_of, range(2)), run=run, **fields | changes)


def shown(metrics, *attempts, meter=None):
    """Return the samples of the page by (name, labels)."""
    metrics.show([], attempts, [run_progress(attempt, meter or RunMeter(), ()) for attempt in attempts], 0)
    families = text_string_to_metric_families(metrics.page().decode())
    samples = (sample for family in families for sample in family.samples if not sample.name.endswith("_created"))
    return {(one.name, *sorted(one.labels.items())): one.value for one in samples if "run" in one.labels}


@pytest.mark.parametrize(
    ("rank", "message", "labels"),
    [
        (1, "rank 1: ValueError: disk: full", ("1", "ValueError")),
        (None, "ranks 0-1: RuntimeError; which rank failed first is unknown", ("unknown", "RuntimeError")),
        (0, "rank 0 on fe80::1 stopped responding without an exit report", ("0", "stopped responding")),
        (0, f"rank 0: {'X' * 300}: no", ("0", 100 * "X")),
        (None, None, ("unknown", "unknown")),
    ],
)
def test_failed_run_has_the_rank_and_the_exception_of_its_announced_failure(rank, message, labels):
    attempt, metrics = an_attempt(state=RunState.FAILED), ServiceMetrics()
    metrics.show_failures([run_incident(RUN_FAILED, attempt, rank=rank, reason=message, cause="c", opened_at=0.0)])

    found = [sample for sample in shown(metrics, attempt) if sample[0] == "rankscope_run_failure"]
    assert [("rankscope_run_failure", ("rank", labels[0]), ("reason", labels[1]), ("run", "r"))] == found


def test_exactly_one_state_of_a_run_is_1():
    for state in RunState:
        page = shown(ServiceMetrics(), an_attempt(state=state))
        states = {dict(labels)["state"]: value for (name, *labels), value in page.items() if name.endswith("run_state")}

        assert {other.value: float(other is state) for other in RunState} == states


def test_unknown_figure_is_absent():
    page = shown(ServiceMetrics(), an_attempt())

    for absent in ("run_step", "run_last_step_timestamp_seconds", "run_progress_ratio", "run_eta_seconds"):
        assert (f"rankscope_{absent}", ("run", "r")) not in page
    assert ("rankscope_run_progress_ratio", ("run", "r")) not in shown(
        ServiceMetrics(), an_attempt(last_step=3, planned_steps=0)
    )


def test_series_of_a_removed_run_leave_the_page():
    metrics = ServiceMetrics()
    metrics.lost("gone", 3)
    metrics.lost("never shown", 3)
    shown(metrics, an_attempt("gone", last_step=1, planned_steps=2), an_attempt("kept"))
    page = shown(metrics, an_attempt("kept"))

    assert {"kept"} == {dict(labels)["run"] for _, *labels in page}


def test_latest_events_never_go_back_and_leave_with_their_run():
    metrics = ServiceMetrics()
    metrics.happened("r", {"exit": 9.0, "hang": 3.0})
    metrics.happened("r", {"exit": 8.0})
    metrics.happened("gone", {"exit": 1.0})
    shown(metrics, an_attempt("r"))
    lines = [line for line in metrics.page().decode().splitlines() if line.startswith("rankscope_event_last")]

    name = "rankscope_event_last_timestamp_seconds"
    assert [f'{name}{{run="r",type="exit"}} 9.0', f'{name}{{run="r",type="hang"}} 3.0'] == sorted(lines)


def test_compacted_files_are_counted_by_change():
    metrics = ServiceMetrics()
    for removed in (50, 7):
        metrics.compacted(CompactionReport(files_removed=removed, files_added=1))
    page = metrics.page().decode()

    assert 'rankscope_ingest_compacted_files_total{change="removed"} 57.0' in page
    assert 'rankscope_ingest_compacted_files_total{change="added"} 2.0' in page


def test_ages_of_losses_and_firings_grow_and_leave_with_their_run():
    now = [100.0]
    metrics = ServiceMetrics(clock=lambda: now[0])
    for run in ("r", "gone"):
        metrics.lost(run, 3)
        metrics.fired(run, None, {("AnomalyNan", "grad_reduced"): 2})
    now[0] += 40
    metrics.fired("r", 3, {("AnomalyNan", ""): 1})
    page = shown(metrics, an_attempt(), an_attempt("gone"))
    loss, name = "rankscope_ingest_lost_records_age_seconds", "rankscope_ingest_anomaly_age_seconds"
    ages = {(key[0], *(value for _, value in key[1:])): value for key, value in page.items() if key[0] in {loss, name}}

    assert {40.0} == {ages.pop((loss, run)) for run in ("r", "gone")}
    assert {40.0, 0.0} == set(ages.values())
    assert 3 == len(ages)
    left = shown(metrics, an_attempt())
    assert {"r"} == {dict(labels)["run"] for family, *labels in left if family in {loss, name}}


def test_page_equals_the_golden_file():
    """`_created` samples contain the time of this test and are left out."""
    metrics, meter = ServiceMetrics(), RunMeter()
    metrics.count(RECORDS_INGESTED, 3)
    metrics.count(BYTES_INGESTED, 4096)
    metrics.committed({"scalars": 3}, 0.5, 1_700_000_000_500_000)
    for second in range(11):
        meter.observe(0, None, (7 + second) * 1_000_000, second * 2)
    attempt = an_attempt('h"os\\tile\n', planned_steps=80, last_step=20, state=RunState.RUNNING)
    attempt.ranks[1].is_vanished = True
    shown(metrics, attempt, meter=meter)
    lines = metrics.page().decode().splitlines(keepends=True)
    page = "".join(line for line in lines if "_created" not in line)

    assert GOLDEN.read_text(encoding="utf-8") == page, f"if this is intended, write to {GOLDEN}:\n{page}"


def test_promtool_accepts_the_page(require_server):
    promtool = require_server("promtool", "prometheus")
    metrics = ServiceMetrics()
    metrics.committed({"scalars": 3}, 0.5, 1_700_000_000_500_000)
    shown(metrics, an_attempt('h"os\\tile\n', last_step=1, planned_steps=2))
    checked = subprocess.run([promtool, "check", "metrics"], input=metrics.page(), capture_output=True, check=False)

    assert (0, b"") == (checked.returncode, checked.stdout + checked.stderr)


# Scalars of viewed runs: the mean over ranks of each step, only while a page of the run is open.


def body(rank: int, values: dict[int, float | None], *, name="loss", labels=None, attempt=0):
    """Return the parts of a poll response that the tails read: one scalar at each step."""
    count = len(values)
    columns = {"name": pa.array([name] * count), "labels": pa.array([labels] * count, pa.string())}
    columns["value"] = pa.array(list(values.values()), pa.float64())
    return SimpleNamespace(
        context=SimpleNamespace(run="r", rank=rank, attempt=attempt),
        nested={"scalars": SimpleNamespace(columns=columns, records=np.arange(count))},
        columns={"step": pa.array(list(values)), "ts": pa.array([step * 1_000_000 for step in values])},
    )


async def rows(tails: LiveTails, seen: int = 0):
    number, text = await asyncio.wait_for(tails.changed("r", seen), 5)
    return number, json.loads(text)


async def test_loss_of_a_step_is_the_mean_of_all_ranks_with_their_number():
    tails = LiveTails()
    with tails.viewing("r"):
        tails.add(body(0, {7: 2.0, 8: 3.0}))
        tails.add(body(1, {7: 4.0}))
        _, found = await rows(tails)

    assert [[0, 7, 7.0, {"loss": [3.0, 2.0, 4.0, 2]}], [0, 8, 8.0, {"loss": [3.0, 3.0, 3.0, 1]}]] == found


async def test_late_rank_changes_all_steps_from_its_own_on():
    """A response without a shown scalar changes nothing."""
    tails = LiveTails()
    with tails.viewing("r"):
        tails.add(body(0, {1: 1.0, 2: 1.0, 3: 1.0}))
        seen, _ = await rows(tails)
        waiting = asyncio.create_task(rows(tails, seen))
        await asyncio.sleep(0)
        tails.add(body(0, {1: 7.0}, name="host_cpu_utilization"))
        await asyncio.sleep(0)
        tails.add(body(1, {2: 5.0}))
        _, found = await waiting

    assert [(2, 3.0), (3, 1.0)] == [(step, values["loss"][0]) for _, step, _, values in found]


async def test_nan_is_null_and_throughput_has_its_sum():
    tails = LiveTails()
    with tails.viewing("r"):
        tails.add(body(0, {1: float("nan")}))
        tails.add(body(0, {1: 10.0}, name="tokens_per_second"))
        tails.add(body(1, {1: 30.0}, name="tokens_per_second"))
        tails.add(body(0, {1: 9.0}, name="learning_rate", labels='{"group":"1"}'))
        tails.add(body(0, {1: 8.0}, name="learning_rate", labels='{"group":"0"}'))
        tails.add(body(0, {1: 7.0}, name="process_threads"))
        _, found = await rows(tails)

    values = {"loss": [None] * 3, "tokens_per_second": [20.0, 10.0, 30.0, 40.0], "learning_rate": [8.0] * 3}
    groups = {'learning_rate{"group":"0"}': [8.0] * 3, 'learning_rate{"group":"1"}': [9.0] * 3}
    assert values | groups == found[0][3]


async def test_every_name_that_the_script_logs_is_kept_within_a_limit():
    tails = LiveTails()
    with tails.viewing("r"):
        for number in range(MOST_NAMES + 50):
            tails.add(body(0, dict.fromkeys(range(250), 1.0), name=f"val/m{number}"))
        tails.add(body(0, {250: 1.0}, name="loss"))
        _, found = await rows(tails)

    assert {f"val/m{number}" for number in range(MOST_NAMES)} == {name for row in found[:-1] for name in row[3]}
    assert ["loss"] == list(found[-1][3])
    assert KEPT_VALUES >= len(found) * MOST_NAMES


async def test_at_most_the_newest_steps_are_kept():
    viewed = []
    tails = LiveTails(viewed.append)
    with tails.viewing("r"), tails.viewing("r"):
        tails.add(body(0, dict.fromkeys(range(2 * KEPT_STEPS), 1.0)))
        _, found = await rows(tails)

    assert ["r"] == viewed
    assert KEPT_STEPS == len(found)
    assert not tails.is_viewed("r")


async def test_page_that_is_opened_gets_rows_that_are_not_stored_yet():
    """Steps that one rank sent before and another after the kept time have no mean."""
    tails = LiveTails()
    tails.add(body(1, {1: 5.0, 2: 5.0}))
    tails.add(body(0, {2: 1.0, 3: 1.0}))
    tails.add(body(0, {1: 0.5}, name="eval_loss"))
    with tails.viewing("r"):
        _, found = await rows(tails)

    assert [(1, {"eval_loss": [0.5] * 3}), (2, {"loss": [3.0, 1.0, 5.0, 2]}), (3, {"loss": [1.0, 1.0, 1.0, 1]})] == [
        (step, values) for _, step, _, values in found
    ]


async def test_old_responses_are_not_kept():
    tails = LiveTails(kept_seconds=0.0)
    tails.add(body(0, {1: 1.0}))
    tails.add(body(0, {2: 1.0}))
    with tails.viewing("r"):
        _, found = await rows(tails)

    assert [2] == [step for _, step, _, _ in found]


# Goodput.


def test_page_contains_the_goodput_of_known_runs():
    metrics = ServiceMetrics()
    metrics.show_goodput({"here": 0.75, "gone": 0.5}, {"here", "new"})
    shown = [line for line in metrics.page().decode().splitlines() if line.startswith("rankscope_run_goodput_ratio")]

    assert ['rankscope_run_goodput_ratio{run="here"} 0.75'] == shown
