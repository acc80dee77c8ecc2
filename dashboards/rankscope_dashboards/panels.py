"""The few panel shapes our boards are made of: each has a title, a description, a unit and its queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import gauge, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common, dashboard

DATASOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

PanelBuilder = stat.Panel | timeseries.Panel | gauge.Panel
P = TypeVar("P", stat.Panel, timeseries.Panel, gauge.Panel)


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and what its lines are called."""

    expression: str
    legend: str = ""
    instant: bool = False

    def build(self, position: int) -> prometheus.Dataquery:
        """Return the query as target A, B, … of a panel."""
        query = prometheus.Dataquery().expr(self.expression).ref_id(chr(ord("A") + position)).datasource(DATASOURCE)
        query = query.legend_format(self.legend) if self.legend else query
        return query.instant() if self.instant else query.range()


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What stands around the numbers. `description` says what it is, what is good, and what to do."""

    title: str
    description: str
    unit: str
    mappings: Sequence[dashboard.ValueMapping] = field(default_factory=tuple)
    minimum: float | None = None
    maximum: float | None = None
    decimals: float | None = None


def lines(words: Words, *queries: Query, logarithmic: bool = False) -> timeseries.Panel:
    """Return curves over time, raw: no smoothing between points, gaps stay gaps."""
    panel = _worded(timeseries.Panel(), words, queries)
    panel = panel.line_width(1).fill_opacity(0).show_points(common.VisibilityMode.NEVER).span_nulls(False)
    panel = panel.tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    panel = panel.legend(
        common_builders.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST)
    )
    if logarithmic:
        scale = common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    return panel


def number(words: Words, *queries: Query, sparkline: bool = False) -> stat.Panel:
    """Return the latest value, large."""
    mode = common.BigValueGraphMode.AREA if sparkline else common.BigValueGraphMode.NONE
    latest = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    return _worded(stat.Panel(), words, queries).graph_mode(mode).reduce_options(latest)


def share(words: Words, *queries: Query) -> gauge.Panel:
    """Return a share of a whole as a gauge."""
    latest = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    return _worded(gauge.Panel(), words, queries).reduce_options(latest)


def value_texts(texts: dict[str, tuple[str, str]]) -> list[dashboard.ValueMapping]:
    """Return the mapping of values to (text, colour), in the order given."""
    options = {
        value: dashboard.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(texts.items())
    }
    return [dashboard.ValueMap(options=options)]


def plain_thresholds() -> dashboard_builders.ThresholdsConfig:
    """Return one colour for all values: the SDK's default of red at 80 means nothing here."""
    steps = [dashboard.Threshold(value=None, color="green")]
    return dashboard_builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _worded(panel: P, words: Words, queries: Sequence[Query]) -> P:
    panel.title(words.title).description(words.description).unit(words.unit).datasource(DATASOURCE)
    panel.thresholds(plain_thresholds()).mappings(list(words.mappings)).no_value("-")
    panel.targets([query.build(position) for position, query in enumerate(queries)])
    if words.minimum is not None:
        panel.min(words.minimum)
    if words.maximum is not None:
        panel.max(words.maximum)
    if words.decimals is not None:
        panel.decimals(words.decimals)
    return panel
