"""The Grafana board "Step time": goodput, time by phase, and the ranks that delay other ranks."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.models import common

from rankscope_contract.metrics.catalogue import (
    PHASE_SECONDS,
    PRE_COLLECTIVE_SECONDS,
    PRE_COLLECTIVE_TOTAL,
    RUN_GOODPUT,
    STEP_PHASE_SECONDS,
)
from rankscope_contract.model.phases import LABEL, Phase
from rankscope_dashboards.boards.elements.board import Section, SizedPanel, make_board
from rankscope_dashboards.boards.elements.panels import (
    PanelBuilder,
    PanelText,
    Query,
    fraction_text,
    gauge_panel,
    over_ranks,
    time_series_panel,
)
from rankscope_dashboards.boards.elements.selectors import RANKS, SERVICE_RUNS, rate

MAX_LINES: Final = 10
"""Largest number of lines in a panel that has one line per rank."""


def board() -> builders.Dashboard:
    """Return the board "Step time" without its uid, which `boards()` sets."""
    sections = (
        Section("Goodput and phases", (SizedPanel(_goodput(), 6, 8), SizedPanel(_time_by_phase(), 18, 8))),
        Section("Within a step", (SizedPanel(_latest_step(), 12, 9), SizedPanel(_data_wait(), 12, 9))),
        Section("Slow ranks", (SizedPanel(_compute_time(), 12, 9), SizedPanel(_slowest(), 12, 9))),
    )
    return make_board("Step time", "Goodput, phases and slow ranks of training runs.", sections)


def _goodput() -> PanelBuilder:
    text = fraction_text(
        "Goodput",
        "Time in steps that count, as a fraction of the time since the first start of the run. Repeated steps, first "
        "steps, checkpoints, evaluations, hangs and the time between launches do not count; `FROM goodput` shows the "
        "time in each. Updated at each commit.",
    )
    return gauge_panel(text, Query(f"max by (run) ({RUN_GOODPUT.name}{SERVICE_RUNS})", "{{run}}"))


def _time_by_phase() -> PanelBuilder:
    text = fraction_text(
        "Time by phase",
        "Fraction of the time in each phase, mean of the ranks; the sum is 1. If `data_wait` grows, check the data "
        "loader. If `collective` grows, a rank or a link is slow: see the last row of this board.",
        maximum=None,
    )
    query = f"avg by (run, {LABEL}) {rate(PHASE_SECONDS)}"
    return _stacked(time_series_panel(text, Query(query, f"{{{{run}}}} {{{{{LABEL}}}}}")))


def _latest_step() -> PanelBuilder:
    text = PanelText(
        title="Phases of the latest step",
        description="Seconds in each phase of the step at the latest scrape, mean of the ranks, measured by the "
        "clocks of the ranks or their devices. Phases that cannot be distinguished with the framework in use are "
        "missing.",
        unit="s",
        minimum=0,
    )
    query = f"avg by (run, {LABEL}) ({STEP_PHASE_SECONDS.name}{RANKS})"
    return _stacked(time_series_panel(text, Query(query, f"{{{{run}}}} {{{{{LABEL}}}}}")))


def _data_wait() -> PanelBuilder:
    text = fraction_text(
        "Wait for data",
        "Fraction of the time in which a rank waits for its next batch, of the rank with the highest and the rank "
        "with the lowest value. One high rank: check its disk and its loader workers. All ranks high: check the data "
        "source. Unannounced work of the script between an update and the next forward pass counts as waiting.",
        maximum=None,
    )
    waits = rate(PHASE_SECONDS, f'{LABEL}="{Phase.DATA_WAIT}"')
    return time_series_panel(text, *over_ranks(waits, "max", "min"))


def _compute_time() -> PanelBuilder:
    text = PanelText(
        title="Compute time before the collective",
        description="Seconds of the latest step in which a rank computed before it waited for other ranks, of the rank "
        "with the highest and the rank with the lowest value. Step times are equal on all ranks because ranks wait for "
        "each other; the compute time is not. Empty if the framework does not allow this measurement.",
        unit="s",
        minimum=0,
    )
    return time_series_panel(text, *over_ranks(f"({PRE_COLLECTIVE_SECONDS.name}{RANKS})", "max", "min"))


def _slowest() -> PanelBuilder:
    text = PanelText(
        title="Slow ranks",
        description=f"Compute time of the {MAX_LINES} slowest ranks, relative to the median rank. Check ranks above "
        "1.1. A rank at 1.25 can make each step of the whole job a quarter longer: check its clocks, other jobs on "
        "its host, and its data.",
        unit="none",
        minimum=0,
    )
    computing = rate(PRE_COLLECTIVE_TOTAL)
    middle = f"quantile by (run) (0.5, {computing})"
    return time_series_panel(
        text,
        Query(
            f"topk by (run) ({MAX_LINES}, {computing} / on (run) group_left () ({middle} > 0))", "{{run}} rank {{rank}}"
        ),
    )


def _stacked(panel: timeseries.Panel) -> PanelBuilder:
    stack = common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
    return panel.stacking(stack).fill_opacity(20)
