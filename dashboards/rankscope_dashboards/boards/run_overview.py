"""The Grafana board "Run overview": state, progress, convergence, speed, anomalies, completeness of telemetry."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.events import RunState
from rankscope_dashboards.boards.elements.board import Section, SizedPanel, make_board
from rankscope_dashboards.boards.elements.panels import (
    ZERO_IS_GOOD,
    PanelBuilder,
    PanelText,
    Query,
    count_text,
    fraction_text,
    gauge_panel,
    over_ranks,
    stat_panel,
    table_panel,
    time_series_panel,
    value_texts,
    with_run_link,
)
from rankscope_dashboards.boards.elements.selectors import ALL_RANKS, RANKS, SERVICE_RANKS, SERVICE_RUNS, rate

UID: Final = "rankscope-run-overview"

ONCE: Final = "attach|warm_up"
"""Regular expression for values of the label `thread` in the metric of the CPU time of Rankscope.

It matches work that the monitor does only once, at its start."""

STATES: Final = {
    RunState.PENDING: "yellow",
    RunState.RUNNING: "green",
    RunState.STALLED: "orange",
    RunState.COMPLETED: "blue",
    RunState.STOPPED: "text",
    RunState.FAILED: "red",
}


def board() -> builders.Dashboard:
    """Return the board "Run overview" without its uid, which `boards()` sets."""
    description = "State, progress and health of training runs."
    sections = (
        Section(
            "Status",
            (
                SizedPanel(_state(), 6, 5),
                SizedPanel(_progress(), 5, 5),
                SizedPanel(_time_left(), 4, 5),
                SizedPanel(_ranks_up(), 3, 5),
                SizedPanel(_anomaly_count(), 3, 5),
                SizedPanel(_lost_records(), 3, 5),
            ),
        ),
        Section(
            "Convergence",
            (SizedPanel(_loss(), 12, 9), SizedPanel(_grad_norm(), 12, 9), SizedPanel(_learning_rate(), 24, 7)),
        ),
        Section("Speed", (SizedPanel(_tokens_per_second(), 12, 8), SizedPanel(_step_time(), 12, 8))),
        Section(
            "Anomalies and replicas",
            (
                SizedPanel(_anomalies(), 12, 9),
                SizedPanel(_firing_tensors(), 12, 9),
                SizedPanel(_replica_divergence(), 24, 6),
            ),
        ),
        Section(
            "Telemetry",
            (
                SizedPanel(_lag(), 12, 8),
                SizedPanel(_since_commit(), 12, 8),
                SizedPanel(_overhead(), 12, 8),
                SizedPanel(_sampling_interval(), 12, 8),
            ),
        ),
    )
    return make_board("Run overview", description, sections)


def _state() -> PanelBuilder:
    # The state is a label, but a stat panel shows numbers. The query returns the position of the state in STATES; the
    # value mapping replaces the position by the name of the state.
    numbered = " or ".join(
        f'max by (run) ({catalogue.RUN_STATE.name}{{run=~"$run", state="{state}"}} == 1) * {position}'
        for position, state in enumerate(STATES)
    )
    texts = {str(position): (state.value, colour) for position, (state, colour) in enumerate(STATES.items())}
    text = PanelText(
        title="State",
        description="State of the run as the service determines it from registrations, records, exit events and "
        "missing responses. Green: running. Blue: completed. Stalled: ranks respond but complete no step. Failed: "
        "`rankscope summary RUN` shows the rank and the reason. Click a run to show only this run.",
        unit="none",
        mappings=value_texts(texts),
    )
    return with_run_link(stat_panel(text, Query(numbered, "{{run}}", instant=True)), UID)


def _progress() -> PanelBuilder:
    text = fraction_text(
        "Progress",
        "Completed steps as a fraction of the planned steps (`total_steps`). Empty if training reports no number of "
        "planned steps.",
    )
    return gauge_panel(
        text, Query(f"max by (run) ({catalogue.RUN_PROGRESS.name}{SERVICE_RUNS})", "{{run}}", instant=True)
    )


def _time_left() -> PanelBuilder:
    text = PanelText(
        title="Time left",
        description="Time for the remaining steps at the speed of the last 30 s. It jumps after a checkpoint or an "
        "evaluation. Empty if the number of planned steps is unknown, no step completes, or the run has ended.",
        unit="dtdurations",
        decimals=0,
    )
    return stat_panel(text, Query(f"max by (run) ({catalogue.RUN_ETA.name}{SERVICE_RUNS})", "{{run}}", instant=True))


def _ranks_up() -> PanelBuilder:
    text = count_text(
        "Ranks up",
        "Ranks that are alive, and below them the ranks that the launches should have. Completed and stopped runs "
        "count in neither. Fewer than expected: some ranks never registered, ended early, or stopped responding. "
        "`/api/v1/targets` of the service lists them.",
    )
    done = f'{catalogue.RUN_STATE.name}{{run=~"$run", state=~"{RunState.COMPLETED}|{RunState.STOPPED}"}} == 1'
    up, expected = (
        Query(f"sum(max by (run) ({metric.name}{SERVICE_RUNS}) unless on (run) ({done}))", legend, instant=True)
        for metric, legend in ((catalogue.RANKS_UP, "up"), (catalogue.RANKS_EXPECTED, "expected"))
    )
    return stat_panel(text, up, expected)


def _anomaly_count() -> PanelBuilder:
    text = count_text(
        "Anomaly count",
        "Number of rule firings, including those of ranks that have ended. 0 is normal. Above 0: the panels below "
        "show the rule and the rank, and `rankscope anomalies RUN` shows the first cause.",
        thresholds=ZERO_IS_GOOD,
    )
    return stat_panel(text, Query(f"sum by (run) ({_firings()})", "{{run}}", instant=True))


def _lost_records() -> PanelBuilder:
    text = count_text(
        "Lost records",
        "Records that were overwritten, or lost with their rank, before the service read them. Each one is a gap in "
        "the history. 0 is normal. Above 0: check whether the service was down or is too slow. A spool preserves the "
        "records of a killed rank.",
        thresholds=ZERO_IS_GOOD,
    )
    return stat_panel(
        text, Query(f"sum by (run) ({catalogue.LOST_RECORDS.name}{SERVICE_RUNS})", "{{run}}", instant=True)
    )


def _loss() -> PanelBuilder:
    text = PanelText(
        title="Loss",
        description="Loss as logged, without smoothing, of the rank with the highest and the rank with the lowest "
        "value. Select one rank to see it alone. A gap means that no rank logged a loss. NaN is also a gap here and "
        "counts as an anomaly. If the two curves diverge, the ranks see different data or are no longer replicas.",
        unit="none",
    )
    return time_series_panel(
        text, *over_ranks(f"({catalogue.LOSS.name}{RANKS})", "max", "min", by="run, loss", legend="{{run}} {{loss}}")
    )


def _grad_norm() -> PanelBuilder:
    text = PanelText(
        title="Gradient norm",
        description="Highest and lowest gradient norm within each interval, so that a spike between two points is "
        "visible. The norm often rises some steps before the loss. The scale is logarithmic: a tenfold increase is one "
        "decade for every model.",
        unit="none",
    )
    series = f"{catalogue.GRAD_NORM.name}{RANKS}"
    high = Query(f"max by (run) (max_over_time({series}[$__interval]))", "{{run}} highest")
    low = Query(f"min by (run) (min_over_time({series}[$__interval]))", "{{run}} lowest")
    return time_series_panel(text, high, low, logarithmic=True)


def _learning_rate() -> PanelBuilder:
    text = PanelText(
        title="Learning rate",
        description="Learning rate of each parameter group. Check a jump that is not in the schedule, and a warm-up "
        "that starts again after a restart.",
        unit="sci",
    )
    return time_series_panel(
        text, Query(f"max by (run, group) ({catalogue.LEARNING_RATE.name}{RANKS})", "{{run}} {{group}}")
    )


def _tokens_per_second() -> PanelBuilder:
    text = PanelText(
        title="Tokens per second",
        description="Tokens per second, as the sum of the selected ranks, and of the slowest rank. Ranks wait for each "
        "other, so all ranks slow down together. The phase times show the slow rank, this panel does not. Dips at "
        "regular intervals are checkpoints or evaluations.",
        unit="suffix: tok/s",
        minimum=0,
    )
    slowest = f"min by (run) ({_speed('run, rank')})"
    return time_series_panel(text, Query(_speed("run"), "{{run}} all"), Query(slowest, "{{run}} slowest rank"))


def _step_time() -> PanelBuilder:
    text = PanelText(
        title="Step time",
        description="Duration of the step at the latest scrape, of the slowest and the fastest rank. A single peak "
        "is one slow step. A level that rises and does not fall has another cause: another job on the host, a "
        "throttled GPU, or a slow data loader.",
        unit="s",
        minimum=0,
    )
    return time_series_panel(text, *over_ranks(f"({catalogue.STEP_SECONDS.name}{RANKS})", "max", "min"))


def _anomalies() -> PanelBuilder:
    text = count_text(
        "Anomalies",
        "Number of firings of each rule on the 20 ranks with the most firings, counted at every step. Ranks without "
        "firings have no line. An increase is an incident. If one rank is affected, check its data and hardware. If "
        "all ranks are affected at the same time, check the model and the learning rate schedule.",
        minimum=0,
    )
    query = f"topk by (run, rule) (20, sum by (run, rank, rule) ({_firings()}) > 0)"
    return time_series_panel(text, Query(query, "{{run}} {{rule}} rank {{rank}}"))


def _firing_tensors() -> PanelBuilder:
    text = count_text(
        "Tensors with firings",
        "Tensor statistics with the most rule firings, by rank. The first tensor that fires is the cause: `rankscope "
        "anomalies RUN` lists the tensors in causal order.",
    )
    labels = {"run": "Run", "rank": "Rank", "rule": "Rule", "kind": "Kind", "tensor": "Tensor", "op": "Statistic"}
    by = ", ".join(labels)
    query = Query(f"topk(20, sum by ({by}) ({catalogue.TENSOR_ANOMALY_EVENTS.name}{RANKS}))")
    return table_panel(text, query, {**labels, "Value": "Firings"})


def _replica_divergence() -> PanelBuilder:
    text = count_text(
        "Replica divergence",
        "Number of replica groups whose ranks hold different parameters although these should be bit-identical. 0 is "
        "normal. Empty: the quantity `hashes` is not measured. Above 0: `rankscope anomalies RUN` shows step, tensor "
        "and ranks. From this step on, the ranks train different models.",
    )
    value, step = (
        f"by (run, replicas) ({metric.name}{ALL_RANKS})"
        for metric in (catalogue.REPLICA_HASH, catalogue.REPLICA_HASH_STEP)
    )
    differs, comparable = f"max {value} != bool min {value}", f"max {step} == bool min {step}"
    return time_series_panel(text, Query(f"sum by (run) (({differs}) * ({comparable}))", "{{run}}"))


def _lag() -> PanelBuilder:
    text = count_text(
        "Ingest lag",
        "Records that a rank has published and the service has not committed yet, for the rank with the most. A "
        "sawtooth between two commits is normal. A line that only rises means that the service is too slow and will "
        "lose records. A line that ends means that the service is down.",
        minimum=0,
    )
    return time_series_panel(
        text, Query(f"max by (run) ({catalogue.LAG_RECORDS.name}{SERVICE_RANKS})", "{{run}} furthest behind")
    )


def _since_commit() -> PanelBuilder:
    text = PanelText(
        title="Since last commit",
        description="Time since the last commit to the store, over all runs of the service. A few seconds are normal "
        "during training. The time grows if nothing trains, the disk is full, or the service is down.",
        unit="s",
        minimum=0,
    )
    # Use the last value of the past hour: a service that is down exports nothing, and the line must continue to rise.
    last = f"last_over_time({catalogue.LAST_COMMIT.name}[1h])"
    return time_series_panel(text, Query(f"time() - max({last} > 0)", "since last commit"))


def _overhead() -> PanelBuilder:
    text = fraction_text(
        "Monitoring overhead",
        "CPU time of Rankscope per second, on the rank with the highest value, without one-time work at the start. "
        "`max_overhead` limits this value by sampling fewer steps.",
        maximum=None,
    )
    own = rate(catalogue.OVERHEAD_SECONDS, f'thread!~"{ONCE}"')
    share = Query(f"max by (run) (sum by (run, rank) {own})", "{{run}}")
    return time_series_panel(text, share)


def _sampling_interval() -> PanelBuilder:
    text = count_text(
        "Sampling interval factor",
        "1: the sampling interval is as configured. Above 1: monitoring exceeded `max_overhead`, and all ranks "
        "multiply the interval by this factor. Events of type `budget` contain the time and the reason.",
        minimum=0,
    )
    return time_series_panel(text, Query(f"max by (run) ({catalogue.SAMPLING_STRETCH.name}{RANKS})", "{{run}}"))


def _firings() -> str:
    """Return PromQL for the number of firings of each rank, rule and kind.

    A rank and the service each have such a counter. While the rank is alive, its counter is the more recent one; after
    its end, only the counter of the service remains. The maximum of both counters counts each firing once.
    """
    both = f"{catalogue.ANOMALY_EVENTS.name}{RANKS} or {catalogue.ANOMALIES_INGESTED.name}{SERVICE_RANKS}"
    return f"max by (run, rank, rule, kind) ({both})"


def _speed(by: str) -> str:
    return f"sum by ({by}) {rate(catalogue.TOKENS)}"
