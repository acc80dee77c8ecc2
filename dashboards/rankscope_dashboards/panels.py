"""The few panel shapes our boards are made of: each has a title, a description, a unit and its queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import gauge, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import prometheus as prometheus_models

DATASOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

PanelBuilder = stat.Panel | timeseries.Panel | gauge.Panel | table.Panel
P = TypeVar("P", stat.Panel, timeseries.Panel, gauge.Panel, table.Panel)

PLAIN: Final = ((None, "green"),)
"""One colour for all values: the SDK's default of red at 80 means nothing here."""

NONE_IS_GOOD: Final = ((None, "green"), (1, "red"))
"""For counts of which a single one deserves a look."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and what its lines are called."""

    expression: str
    legend: str = ""
    instant: bool = False
    as_table: bool = False

    def build(self, position: int) -> prometheus.Dataquery:
        """Return the query as target A, B, … of a panel."""
        query = prometheus.Dataquery().expr(self.expression).ref_id(chr(ord("A") + position)).datasource(DATASOURCE)
        query = query.legend_format(self.legend) if self.legend else query
        query = query.format(prometheus_models.PromQueryFormat.TABLE) if self.as_table else query
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
    steps: Sequence[tuple[float | None, str]] = PLAIN


def lines(words: Words, *queries: Query, logarithmic: bool = False) -> timeseries.Panel:
    """Return curves over time, raw: no smoothing between points, gaps stay gaps."""
    panel = _worded(timeseries.Panel(), words, queries)
    panel = panel.line_width(1).fill_opacity(0).show_points(common.VisibilityMode.NEVER).span_nulls(False)
    panel = panel.tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    legend = common_builders.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
    panel = panel.legend(legend.display_mode(common.LegendDisplayMode.LIST).calcs(["lastNotNull"]))
    if logarithmic:
        scale = common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    return panel


def number(words: Words, *queries: Query) -> stat.Panel:
    """Return the latest value of each line, large and coloured by its thresholds or mappings."""
    latest = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    panel = _worded(stat.Panel(), words, queries).graph_mode(common.BigValueGraphMode.NONE).reduce_options(latest)
    # The name stands beside the value even for a single line: with one run on the board it says which.
    return panel.color_mode(common.BigValueColorMode.BACKGROUND).text_mode(common.BigValueTextMode.VALUE_AND_NAME)


def rows(words: Words, query: Query, columns: Mapping[str, str]) -> table.Panel:
    """Return a table of the query's labels and its `Value`, in the order of `columns` and with its headings."""
    panel = _worded(table.Panel(), words, (replace(query, instant=True, as_table=True),))
    options = {
        "excludeByName": {"Time": True},
        "indexByName": {label: place for place, label in enumerate(columns)},
        "renameByName": dict(columns),
    }
    return panel.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=options))


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


def only_this_run(panel: stat.Panel, uid: str) -> stat.Panel:
    """Return the panel with a link on each value that narrows the board `uid` to its run."""
    url = f"/d/{uid}?var-run=${{__field.labels.run}}&${{__url_time_range}}"
    return panel.data_links([dashboard_builders.DashboardLink("Only this run").url(url)])


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> dashboard_builders.ThresholdsConfig:
    made = [dashboard.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard_builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(made)


def _worded(panel: P, words: Words, queries: Sequence[Query]) -> P:
    panel.title(words.title).description(words.description).unit(words.unit).datasource(DATASOURCE)
    panel.thresholds(_thresholds(words.steps)).mappings(list(words.mappings)).no_value("-")
    panel.targets([query.build(position) for position, query in enumerate(queries)])
    if words.minimum is not None:
        panel.min(words.minimum)
    if words.maximum is not None:
        panel.max(words.maximum)
    if words.decimals is not None:
        panel.decimals(words.decimals)
    return panel
