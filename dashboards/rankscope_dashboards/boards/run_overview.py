"""Run overview: is it alive, how far is it, is it learning, how fast, did something break, is the telemetry whole."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract import metrics
from rankscope_contract.events import RunState
from rankscope_dashboards.layout import Place, Section, make_board
from rankscope_dashboards.panels import (
    NONE_IS_GOOD,
    PanelBuilder,
    Query,
    Words,
    lines,
    number,
    only_this_run,
    rows,
    share,
    value_texts,
)
from rankscope_dashboards.selectors import ALL_RANKS, RANKS, RUN, SERVICE_RANKS, rate

UID: Final = "rankscope-run-overview"

ONCE: Final = "attach|warm_up"
"""Threads of the monitor that work at the beginning alone."""

STATES: Final = {
    RunState.PENDING: "yellow",
    RunState.RUNNING: "green",
    RunState.STALLED: "orange",
    RunState.COMPLETED: "blue",
    RunState.STOPPED: "text",
    RunState.FAILED: "red",
}


def board() -> builders.Dashboard:
    """Return the board."""
    description = "State, progress and health of training runs."
    sections = (
        Section(
            "How it stands",
            (
                Place(_state(), 6, 5),
                Place(_progress(), 5, 5),
                Place(_time_left(), 4, 5),
                Place(_ranks_up(), 3, 5),
                Place(_anomaly_count(), 3, 5),
                Place(_lost_records(), 3, 5),
            ),
        ),
        Section("Is it learning", (Place(_loss(), 12, 9), Place(_grad_norm(), 12, 9), Place(_learning_rate(), 24, 7))),
        Section("Is it fast", (Place(_tokens_per_second(), 12, 8), Place(_step_time(), 12, 8))),
        Section(
            "Did something break",
            (Place(_anomalies(), 12, 9), Place(_broken_tensors(), 12, 9), Place(_replicas_apart(), 24, 6)),
        ),
        Section(
            "Is the telemetry whole",
            (Place(_lag(), 12, 8), Place(_since_commit(), 12, 8), Place(_cost(), 12, 8), Place(_stretch(), 12, 8)),
        ),
    )
    return make_board("Run overview", description, sections)


def _state() -> PanelBuilder:
    # The state is a label; its place in the list is the number that a value mapping can turn back into a word.
    numbered = " or ".join(
        f'max by (run) ({metrics.RUN_STATE.name}{{run=~"$run", state="{state}"}} == 1) * {position}'
        for position, state in enumerate(STATES)
    )
    texts = {str(position): (state.value, colour) for position, (state, colour) in enumerate(STATES.items())}
    words = Words(
        title="State",
        description="What the service makes of registrations, records, last words and silence. Green runs, blue is "
        "done. Stalled: ranks live and make no step. Failed: `rankscope summary RUN` says which rank and why. "
        "A click on a run shows it alone.",
        unit="none",
        mappings=value_texts(texts),
    )
    return only_this_run(number(words, Query(numbered, "{{run}}", instant=True)), UID)


def _progress() -> PanelBuilder:
    words = Words(
        title="Progress",
        description="Steps made, of the steps that training said it plans (`total_steps`). Empty when it did not say.",
        unit="percentunit",
        minimum=0,
        maximum=1,
    )
    return share(words, Query(f"max by (run) ({metrics.RUN_PROGRESS.name}{RUN})", "{{run}}", instant=True))


def _time_left() -> PanelBuilder:
    words = Words(
        title="Time left",
        description="What the remaining steps take at the speed of the last half minute. It jumps after a checkpoint "
        "or an evaluation; empty when the steps are not planned, nothing moves, or the run ended.",
        unit="dtdurations",
        decimals=0,
    )
    return number(words, Query(f"max by (run) ({metrics.RUN_ETA.name}{RUN})", "{{run}}", instant=True))


def _ranks_up() -> PanelBuilder:
    words = Words(
        title="Ranks up",
        description="Ranks that live, above the ranks the launches are made of; runs that are done count for neither. "
        "Fewer than expected: some never registered, ended early, or vanished; `/api/v1/targets` of the service names "
        "them.",
        unit="none",
        decimals=0,
    )
    done = f'{metrics.RUN_STATE.name}{{run=~"$run", state=~"{RunState.COMPLETED}|{RunState.STOPPED}"}} == 1'
    up, expected = (
        Query(f"sum(max by (run) ({metric.name}{RUN}) unless on (run) ({done}))", legend, instant=True)
        for metric, legend in ((metrics.RANKS_UP, "up"), (metrics.RANKS_EXPECTED, "expected"))
    )
    return number(words, up, expected)


def _anomaly_count() -> PanelBuilder:
    words = Words(
        title="Anomaly count",
        description="Firings of rules, also of ranks that are gone by now. None is normal. Above: see below which rule "
        "and rank, and `rankscope anomalies RUN` for the first cause.",
        unit="none",
        decimals=0,
        steps=NONE_IS_GOOD,
    )
    return number(words, Query(f"sum by (run) ({_firings()})", "{{run}}", instant=True))


def _lost_records() -> PanelBuilder:
    words = Words(
        title="Lost records",
        description="Steps of ranks that were overwritten or died before the service had them: holes in history. None "
        "is normal. Otherwise look whether the service was away or is too slow; a spool keeps what a killed rank had.",
        unit="none",
        decimals=0,
        steps=NONE_IS_GOOD,
    )
    return number(words, Query(f"sum by (run) ({metrics.LOST_RECORDS.name}{RUN})", "{{run}}", instant=True))


def _loss() -> PanelBuilder:
    words = Words(
        title="Loss",
        description="As logged, not smoothed, of the highest and the lowest rank; choose one rank to see it alone. A "
        "gap is a loss that no rank logged; NaN is a gap here too, and counts among the anomalies. Ranks that drift "
        "apart see different data, or are no replicas any more.",
        unit="none",
    )
    return lines(words, *_extremes(metrics.LOSS, "run, loss", "{{run}} {{loss}}"))


def _grad_norm() -> PanelBuilder:
    words = Words(
        title="Gradient norm",
        description="Highest and lowest within each interval, so that a spike between two points is not lost. It often "
        "rises some steps before the loss does. Logarithmic: ten times higher is one decade, whatever the model.",
        unit="none",
    )
    series = f"{metrics.GRAD_NORM.name}{RANKS}"
    high = Query(f"max by (run) (max_over_time({series}[$__interval]))", "{{run}} highest")
    low = Query(f"min by (run) (min_over_time({series}[$__interval]))", "{{run}} lowest")
    return lines(words, high, low, logarithmic=True)


def _learning_rate() -> PanelBuilder:
    words = Words(
        title="Learning rate",
        description="Per parameter group. A jump that no schedule planned, or a warm-up that begins again after a "
        "restart, is worth a look.",
        unit="sci",
    )
    return lines(words, Query(f"max by (run, group) ({metrics.LEARNING_RATE.name}{RANKS})", "{{run}} {{group}}"))


def _tokens_per_second() -> PanelBuilder:
    words = Words(
        title="Tokens per second",
        description="The ranks chosen together, and the slowest of them. Ranks in lockstep fall together: the slow one "
        "sets the pace, so look for it in phase times, not here. Dips at a regular distance are checkpoints or "
        "evaluations.",
        unit="suffix: tok/s",
        minimum=0,
    )
    slowest = f"min by (run) ({_speed('run, rank')})"
    return lines(words, Query(_speed("run"), "{{run}} all"), Query(slowest, "{{run}} slowest rank"))


def _step_time() -> PanelBuilder:
    words = Words(
        title="Step time",
        description="Duration of the step that a scrape saw last, of the slowest and the fastest rank. A single high "
        "point is one slow step; a level that rises and stays is a neighbour, a throttled device or a loader that "
        "falls behind.",
        unit="s",
        minimum=0,
    )
    return lines(words, *_extremes(metrics.STEP_SECONDS, "run", "{{run}}"))


def _anomalies() -> PanelBuilder:
    words = Words(
        title="Anomalies",
        description="Firings of each rule on the 20 ranks where it fired most, counted at every step; ranks without "
        "any have no line. A step in the line is an incident; one rank alone points at its data or hardware, all at "
        "once at the model or its schedule.",
        unit="none",
        minimum=0,
        decimals=0,
    )
    query = f"topk by (run, rule) (20, sum by (run, rank, rule) ({_firings()}) > 0)"
    return lines(words, Query(query, "{{run}} {{rule}} rank {{rank}}"))


def _broken_tensors() -> PanelBuilder:
    words = Words(
        title="Tensors that fired",
        description="The statistics of tensors on which rules fired most often, by rank. What fires first is the "
        "cause: `rankscope anomalies RUN` puts them in causal order.",
        unit="none",
        decimals=0,
    )
    labels = {"run": "Run", "rank": "Rank", "rule": "Rule", "kind": "Kind", "tensor": "Tensor", "op": "Statistic"}
    by = ", ".join(labels)
    query = Query(f"topk(20, sum by ({by}) ({metrics.TENSOR_ANOMALY_EVENTS.name}{RANKS}))")
    return rows(words, query, {**labels, "Value": "Firings"})


def _replicas_apart() -> PanelBuilder:
    words = Words(
        title="Replicas apart",
        description="Groups of ranks that do not hold the same parameters bit for bit although they should. Zero is "
        "normal; nothing at all means that `hashes` is not among the quantities. Above: `rankscope anomalies RUN` "
        "names step, tensor and ranks; from there on they train models that are no longer one.",
        unit="none",
        decimals=0,
    )
    value, step = (
        f"by (run, replicas) ({metric.name}{ALL_RANKS})" for metric in (metrics.REPLICA_HASH, metrics.REPLICA_HASH_STEP)
    )
    differs, comparable = f"max {value} != bool min {value}", f"max {step} == bool min {step}"
    return lines(words, Query(f"sum by (run) (({differs}) * ({comparable}))", "{{run}}"))


def _lag() -> PanelBuilder:
    words = Words(
        title="Ingest lag",
        description="Records that a rank has published and the store does not have yet, for the rank that is furthest "
        "behind. It saws between two commits; a line that only rises is a service that is too slow, and ends in lost "
        "records; a line that ends is one that is away.",
        unit="none",
        minimum=0,
        decimals=0,
    )
    return lines(words, Query(f"max by (run) ({metrics.LAG_RECORDS.name}{SERVICE_RANKS})", "{{run}} furthest behind"))


def _since_commit() -> PanelBuilder:
    words = Words(
        title="Since last commit",
        description="Age of the newest rows in the store, for all runs of the service. Seconds while something trains; "
        "it grows when nothing does, when the disk is full, or when the service is away.",
        unit="s",
        minimum=0,
    )
    # Of the last hour, since a service that is away shows nothing: that is when this line must go on.
    last = f"last_over_time({metrics.LAST_COMMIT.name}[1h])"
    return lines(words, Query(f"time() - max({last} > 0)", "since last commit"))


def _cost() -> PanelBuilder:
    words = Words(
        title="Cost of monitoring",
        description="CPU time of Rankscope for each second of the rank on which it costs most, what is made once at "
        "the beginning left out. `max_overhead` keeps it below a share, by measuring fewer steps.",
        unit="percentunit",
        minimum=0,
    )
    own = rate(metrics.OVERHEAD_SECONDS, f'thread!~"{ONCE}"')
    share = Query(f"max by (run) (sum by (run, rank) {own})", "{{run}}")
    return lines(words, share)


def _stretch() -> PanelBuilder:
    words = Words(
        title="Chosen steps for each that is measured",
        description="1 is as was asked for. More: the monitor came to cost more than `max_overhead` allows, and one in "
        "so many of the chosen steps is measured, on all ranks; events of type `budget` say since when and why.",
        unit="none",
        minimum=0,
        decimals=0,
    )
    return lines(words, Query(f"max by (run) ({metrics.SAMPLING_STRETCH.name}{RANKS})", "{{run}}"))


def _firings() -> str:
    """Return the firings of each rank: its own page is the newest while it lives, the service's count outlives it."""
    both = f"{metrics.ANOMALY_EVENTS.name}{RANKS} or {metrics.ANOMALIES_INGESTED.name}{SERVICE_RANKS}"
    return f"max by (run, rank, rule, kind) ({both})"


def _extremes(metric: metrics.MetricSpec, by: str, legend: str) -> tuple[Query, Query]:
    """Return the highest and the lowest rank: a thousand lines are none. One rank that is chosen is both."""
    series = f"by ({by}) ({metric.name}{RANKS})"
    return Query(f"max {series}", f"{legend} highest"), Query(f"min {series}", f"{legend} lowest")


def _speed(by: str) -> str:
    return f"sum by ({by}) {rate(metrics.TOKENS)}"
