"""The Grafana board "Tensors": statistics of the tensors of one run, their baselines, and their spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract.metrics import catalogue
from rankscope_contract.model.kinds import Kind
from rankscope_contract.rules.anomaly import AnomalyTurbulence
from rankscope_dashboards.boards.elements.annotations import RUN_ANNOTATIONS
from rankscope_dashboards.boards.elements.board import Section, make_board, sized
from rankscope_dashboards.boards.elements.panels import (
    TENSOR_COLUMN,
    Column,
    PanelBuilder,
    PanelText,
    Query,
    count_text,
    fraction_text,
    history_panel,
    table_panel,
    time_series_panel,
)
from rankscope_dashboards.boards.elements.selectors import AHEAD, NORM, OF_KIND, OF_TENSORS, RANKS, at_end, ranks
from rankscope_dashboards.boards.elements.variables import KIND, RANK, RUN, TENSOR, largest_deviations

MAX_LINES: Final = 20
MAX_TENSORS: Final = 6
"""Largest number of tensors in a panel that has three lines per tensor."""

MAX_ROWS: Final = 40
OF_LINES: Final = 'tensor=~"$lines"'
OF_ROWS: Final = 'tensor=~"$rows"'
"""Label matchers for the tensors with the largest deviations: MAX_TENSORS and MAX_ROWS of the selected ones."""

INTERVAL: Final = "30s"
"""Shortest interval of panels that read all tensors."""

NOT_MEASURED: Final = "No tensor of this kind is measured, or the series limit leaves them out"
NO_BASELINE: Final = "No baseline, or no rule on this kind"
DEVIATION: Final = ((None, "blue"), (0.5, "green"), (1.5, "yellow"), (3, "red"))
"""Colours of a value divided by its baseline."""

_TENSOR_COLUMNS: Final = {
    "tensor": TENSOR_COLUMN,
    "kind": Column(heading="Kind", width=140),
    "op": Column(heading="Statistic", width=120),
    "rank": Column(heading="Rank", width=70, is_number=True),
}


def board() -> builders.Dashboard:
    """Return the board "Tensors" without its uid, which `boards()` sets."""
    norms = [_largest_norms(text, kinds) for kinds, text in _NORMS.items()]
    sections = (
        Section("Deviations", sized(24, 7, _top_deviations()) + sized(24, 12, _heat_map())),
        Section("Selected tensors", sized(24, 10, _value_and_baseline()) + sized(24, 7, _nonfinite())),
        Section("Ranks", sized(24, 9, _spread())),
        Section(
            "Kinds",
            sized(8, 8, *norms[:3]) + sized(6, 8, *norms[3:]) + sized(12, 8, _sampled_step()),
        ),
        Section("Features of modules", sized(24, 9, _features())),
        Section("All statistics", sized(24, 10, _statistics()), is_folded=True),
    )
    return make_board(
        "Tensors",
        "Statistics, baselines and deviations of the tensors of one run.",
        sections,
        variables=(
            *(RUN, RANK, KIND, TENSOR),
            largest_deviations("lines", MAX_TENSORS),
            largest_deviations("rows", MAX_ROWS),
        ),
        annotations=RUN_ANNOTATIONS,
        refresh="30s",
    )


def _value_and_baseline() -> PanelBuilder:
    text = PanelText(
        title="Norm, baseline and threshold",
        description="Norm of the selected tensors on the rank with the highest value, the baseline with which the "
        f"rules compare it, and the threshold above which AnomalyTurbulence fires, for the {MAX_TENSORS} tensors that "
        "rose most above their baseline in the time range. A norm near its baseline is normal. Above the threshold: "
        "look at the board Incidents for the first cause.",
        empty=NOT_MEASURED,
    )
    chosen = ranks(OF_KIND, OF_LINES, NORM)
    value = f"max by (run, tensor) ({catalogue.TENSOR_VALUE.name}{chosen})"
    baseline = f"max by (run, tensor) ({catalogue.TENSOR_BASELINE.name}{chosen})"
    rule = ranks(f'rule="{AnomalyTurbulence.__name__}"')
    factor = f"(1 + max by (run) ({catalogue.RULE_THRESHOLD.name}{rule}))"
    threshold = f"{baseline} * on (run) group_left () {factor}"
    lines = ((value, "{{tensor}}"), (baseline, "{{tensor}} baseline"), (threshold, "{{tensor}} threshold"))
    queries = [Query(expression, legend) for expression, legend in lines]
    return time_series_panel(text, *queries, logarithmic=True, many=True)


def _heat_map() -> PanelBuilder:
    text = PanelText(
        title="Norm relative to the baseline, by tensor",
        description="Norm of each selected tensor divided by its baseline, on the rank with the highest value, for "
        f"the {MAX_ROWS} tensors that rose most above it in the time range. Green: 0.5 to 1.5 times the baseline. "
        "Yellow or red in one row: this tensor deviates. In all rows at the same time: a bad batch or a too high "
        "learning rate. The first red row is the cause.",
        decimals=2,
        thresholds=DEVIATION,
        empty=NO_BASELINE,
    )
    chosen = ranks(OF_KIND, OF_ROWS, NORM)
    value, baseline = (at_end(metric, chosen, AHEAD) for metric in (catalogue.TENSOR_VALUE, catalogue.TENSOR_BASELINE))
    query = f"max by (run, tensor) ({value} / ({baseline} > 0))"
    return history_panel(text, Query(query, "{{tensor}}"), "tensor", catalogue.TENSOR_BASELINE.name + chosen)


def _top_deviations() -> PanelBuilder:
    text = PanelText(
        title="Largest deviations",
        description="The 20 tensors of all kinds with the largest norm relative to its baseline, at the end of the "
        "time range. Around 1 is normal. A value above 1 plus the threshold of the rule fires the rule: click the "
        "tensor to see when it left its baseline.",
        decimals=2,
        thresholds=DEVIATION,
        empty=NO_BASELINE,
    )
    value, baseline = (f"{metric.name}{ranks(NORM)}" for metric in (catalogue.TENSOR_VALUE, catalogue.TENSOR_BASELINE))
    query = f"topk(20, max by (rank, kind, tensor) ({value} / ({baseline} > 0)))"
    columns = {name: column for name, column in _TENSOR_COLUMNS.items() if name != "op"}
    columns["Value"] = Column(heading="Times baseline", width=140)
    return table_panel(text, (Query(query),), columns)


def _nonfinite() -> PanelBuilder:
    text = count_text(
        "Tensors with NaN or Inf",
        "Largest number of elements in the time range that were NaN or infinite at a scrape, of the 20 tensors with "
        "the most. There should be none. The kind that comes first in a step is the cause: activations before "
        "gradients before parameters. `rankscope anomalies RUN` lists them in causal order, for every step.",
        empty="No count of NaN or Inf above 0 in the data of the time range",
    )
    selector = ranks('op=~"nans|infs"')
    counts = f"max_over_time({catalogue.TENSOR_VALUE.name}{selector}[$__range])"
    columns = {**_TENSOR_COLUMNS, "Value": Column(heading="Elements", width=110)}
    return table_panel(text, (Query(f"topk(20, max by (rank, kind, tensor, op) ({counts} > 0))"),), columns)


def _spread() -> PanelBuilder:
    text = fraction_text(
        "Spread between ranks",
        "Difference between the highest and the lowest norm of a tensor over the selected ranks, relative to the "
        f"highest, for the {MAX_LINES} tensors with the largest spread. For reduced gradients and parameters of "
        "replicas it must be 0. For unreduced gradients and activations some spread is normal. If one tensor is "
        "above the others, compare its ranks. A gap means that the ranks were scraped at different steps.",
        empty=f"{NOT_MEASURED}, or the ranks were always scraped at different steps",
    )
    norm = f"by (run, kind, tensor) ({catalogue.TENSOR_VALUE.name}{ranks(OF_KIND, OF_TENSORS, NORM)})"
    step = f"by (run, kind) ({catalogue.KIND_STEP.name}{ranks(OF_KIND)})"
    spread = f"1 - min {norm} / (max {norm} > 0)"
    query = f"topk({MAX_LINES}, {spread} unless on (run, kind) (max {step} != min {step}))"
    return time_series_panel(text, Query(query, "{{tensor}}"), many=True).interval("60s").max_data_points(300)


_NORMS: Final = {
    (Kind.PARAM_BEFORE, Kind.PARAM_AFTER): PanelText(
        title="Parameters",
        description="Largest norm of a parameter before and after the update, over all tensors and selected ranks. "
        "It changes slowly. A jump after a restart means that another checkpoint was loaded.",
        empty="Parameters are not measured in this run",
    ),
    (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.GRAD_CLIPPED): PanelText(
        title="Gradients",
        description="Largest norm of a gradient, before and after the reduction over ranks and after clipping. A "
        "peak in all three is a bad batch. A peak only before the reduction is on one rank: see the spread between "
        "ranks.",
        empty="Gradients are not measured in this run",
    ),
    (Kind.ACT_IN, Kind.ACT_OUT, Kind.ACT_GRAD_IN, Kind.ACT_GRAD_OUT): PanelText(
        title="Activations",
        description="Largest norm of an input or output of a module, and of the gradients with respect to them. A "
        "level that grows over thousands of steps ends in overflow: check normalisation layers and the precision.",
        empty="Activations are not measured in this run",
    ),
    (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MOMENTUM): PanelText(
        title="Optimizer state",
        description="Largest norm of the moments of Adam, or of the momentum of SGD. It follows the gradients with a "
        "delay. A value of 0 after a restart means that the state of the optimizer was not loaded.",
        empty="The optimizer has no such state, or it is not measured",
    ),
    (Kind.COMM_IN, Kind.COMM_OUT): PanelText(
        title="Collectives",
        description="Largest norm of an input and of an output of a collective. They should move together. An output "
        "that is not finite with finite inputs indicates a fault in the network or in the reduction.",
        empty="Collectives are not measured in this run",
    ),
}
"""Panels of the largest norms of kinds, over all tensors and ranks."""


def _features() -> PanelBuilder:
    text = PanelText(
        title="Features",
        description="Lowest and highest value of each measured feature, over modules, heads, experts and selected "
        "ranks: entropy of attention and routers, stable rank, spectral norm. They change slowly. An entropy that "
        "falls to 0 means that attention or routing collapses. A spectral norm that only grows ends in overflow. "
        "`rankscope sql` with the dataset features shows the module.",
        empty="No feature is measured: add the quantity attention, linear or router",
    )
    of_op = {op: catalogue.FEATURE_VALUE.name + ranks(f'op="{op}"') for op in ("min", "max")}
    queries = [
        Query(f"min by (run, kind) ({of_op['min']})", "{{kind}} lowest"),
        Query(f"max by (run, kind) ({of_op['max']})", "{{kind}} highest"),
    ]
    return time_series_panel(text, *queries, logarithmic=True, many=True)


def _sampled_step() -> PanelBuilder:
    text = count_text(
        "Latest sampled step",
        "Latest step at which each kind was measured, on the rank furthest behind. It rises with the step in steps "
        "of the sampling interval. If one kind stops, its hooks were removed: the log of the rank contains a notice.",
        empty="No tensor is measured in this run",
    )
    query = f"min by (run, kind) ({catalogue.KIND_STEP.name}{RANKS})"
    return time_series_panel(text, Query(query, "{{kind}}"), many=True)


def _statistics() -> PanelBuilder:
    text = PanelText(
        title="Other statistics of the selected tensors",
        description="All exported statistics but the norm, of the selected tensors, on the rank with the highest "
        f"value, {MAX_LINES} lines at most. The scale is linear because minima and means are negative too. Select one "
        "tensor.",
        minimum=None,
        empty=NOT_MEASURED,
    )
    chosen = ranks(OF_KIND, OF_ROWS, 'op!="norm"')
    query = f"topk({MAX_LINES}, max by (run, tensor, op) ({catalogue.TENSOR_VALUE.name}{chosen}))"
    return time_series_panel(text, Query(query, "{{tensor}} {{op}}"), many=True)


def _largest_norms(text: PanelText, kinds: Sequence[Kind]) -> PanelBuilder:
    names = "|".join(kinds)
    chosen = ranks(f'kind=~"{names}"', NORM)
    query = f"max by (run, kind) ({catalogue.TENSOR_VALUE.name}{chosen})"
    return time_series_panel(text, Query(query, "{{kind}}"), logarithmic=True).interval(INTERVAL)
