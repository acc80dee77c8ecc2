"""Step time: what it is spent on, how much of it counts, and which rank the others wait for."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.models import common

from rankscope_contract.phase_metrics import (
    PHASE_SECONDS,
    PRE_COLLECTIVE_SECONDS,
    PRE_COLLECTIVE_TOTAL,
    RUN_GOODPUT,
    STEP_PHASE_SECONDS,
)
from rankscope_contract.phases import LABEL, Phase
from rankscope_dashboards.layout import Place, Section, make_board
from rankscope_dashboards.panels import PanelBuilder, Query, Words, lines, share
from rankscope_dashboards.selectors import RANKS, RUN, rate

MOST: Final = 10
"""The most lines of a panel that shows single ranks."""


def board() -> builders.Dashboard:
    """Return the board."""
    sections = (
        Section("How much of the time counts", (Place(_goodput(), 6, 8), Place(_phases(), 18, 8))),
        Section("What a step is made of", (Place(_step(), 12, 9), Place(_data_wait(), 12, 9))),
        Section("Which rank the others wait for", (Place(_computing(), 12, 9), Place(_slowest(), 12, 9))),
    )
    return make_board("Step time", "What the time of training runs is spent on.", sections)


def _goodput() -> PanelBuilder:
    words = Words(
        title="Goodput",
        description="Time in steps that count over all time since the run first began. Not in it: steps that were "
        "made again, first steps, checkpoints, evaluations, hangs, the time between launches; `FROM goodput` says "
        "where that went. As old as the last commit.",
        unit="percentunit",
        minimum=0,
        maximum=1,
    )
    return share(words, Query(f"max by (run) ({RUN_GOODPUT.name}{RUN})", "{{run}}"))


def _phases() -> PanelBuilder:
    words = Words(
        title="Where the time goes",
        description="Share of each phase, mean of the ranks; together they are all the time. A wait for data that "
        "grows is a loader; collectives that grow are a slow rank or link, and the board's last row says which.",
        unit="percentunit",
        minimum=0,
    )
    query = f"avg by (run, {LABEL}) {rate(PHASE_SECONDS)}"
    return _stacked(lines(words, Query(query, f"{{{{run}}}} {{{{{LABEL}}}}}")))


def _step() -> PanelBuilder:
    words = Words(
        title="Seconds of the latest step",
        description="What the step that a scrape saw last was made of, mean of the ranks, as the ranks' own clocks or "
        "their devices have it. What is not there cannot be told with the framework in use.",
        unit="s",
        minimum=0,
    )
    query = f"avg by (run, {LABEL}) ({STEP_PHASE_SECONDS.name}{RANKS})"
    return _stacked(lines(words, Query(query, f"{{{{run}}}} {{{{{LABEL}}}}}")))


def _data_wait() -> PanelBuilder:
    words = Words(
        title="Wait for data",
        description="Share of the time in which a rank waits for its next batch, highest and lowest rank. One rank "
        "alone is its disk or its workers; all together is the source. What a script does between an update and the "
        "next forward and does not announce is in it.",
        unit="percentunit",
        minimum=0,
    )
    waits = rate(PHASE_SECONDS, f'{LABEL}="{Phase.DATA_WAIT}"')
    queries = [Query(f"{how} by (run) {waits}", f"{{{{run}}}} {how}") for how in ("max", "min")]
    return lines(words, *queries)


def _computing() -> PanelBuilder:
    words = Words(
        title="Computing before ranks meet",
        description="Seconds of the latest step that a rank computed until it met the others, highest and lowest. "
        "Whole steps are as long on all ranks, since they wait for each other; this is not. Empty where none can tell.",
        unit="s",
        minimum=0,
    )
    series = f"({PRE_COLLECTIVE_SECONDS.name}{RANKS})"
    return lines(words, *(Query(f"{how} by (run) {series}", f"{{{{run}}}} {how}") for how in ("max", "min")))


def _slowest() -> PanelBuilder:
    words = Words(
        title="Slow ranks",
        description=f"Computing of the {MOST} slowest ranks over that of the one in the middle. 1.1 is worth a look, "
        "1.25 costs the whole job a quarter of its speed: see its clocks, its neighbours on the host, its data.",
        unit="none",
        minimum=0,
    )
    computing = rate(PRE_COLLECTIVE_TOTAL)
    middle = f"quantile by (run) (0.5, {computing})"
    return lines(
        words,
        Query(f"topk by (run) ({MOST}, {computing} / on (run) group_left () ({middle} > 0))", "{{run}} rank {{rank}}"),
    )


def _stacked(panel: timeseries.Panel) -> PanelBuilder:
    stack = common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
    return panel.stacking(stack).fill_opacity(20)
