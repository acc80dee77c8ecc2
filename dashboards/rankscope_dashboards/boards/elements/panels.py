"""The four panel types that the boards use: time series, stat, table and gauge."""

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

ONE_COLOUR: Final = ((None, "green"),)
"""Thresholds of a panel with one colour for all values.

By default, the Grafana SDK colours values from 80 on red, which has no meaning for these quantities."""

ZERO_IS_GOOD: Final = ((None, "green"), (1, "red"))
"""Thresholds of a panel for counts that need attention from 1 on: green for 0, red from 1 on."""


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression of a panel. `legend` is the name of its lines and may contain labels such as `{{run}}`."""

    expression: str
    legend: str = ""
    instant: bool = False
    as_table: bool = False

    def build(self, position: int) -> prometheus.Dataquery:
        """Return the query as a target of a panel.

        The target at position 0 has the name A, at position 1 the name B, and so on.
        """
        query = prometheus.Dataquery().expr(self.expression).ref_id(chr(ord("A") + position)).datasource(DATASOURCE)
        query = query.legend_format(self.legend) if self.legend else query
        query = query.format(prometheus_models.PromQueryFormat.TABLE) if self.as_table else query
        return query.instant() if self.instant else query.range()


def over_ranks(expression: str, *aggregations: str, by: str = "run", legend: str = "{{run}}") -> list[Query]:
    """Return one query for each aggregation (`avg`, `max`, `min`) of `expression` over the ranks.

    `expression` must be enclosed in parentheses. `by` are the labels to keep. A panel with these queries replaces a
    panel with one line per rank, which would be unreadable.
    """
    names = {"avg": "mean", "max": "highest", "min": "lowest"}
    return [Query(f"{name} by ({by}) {expression}", f"{legend} {names[name]}") for name in aggregations]


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelText:
    """Title, description, unit, range and thresholds of a panel.

    `description` defines the quantity, states which values are good, and recommends an action for bad values.
    `thresholds` are pairs of (lowest value, colour). The first pair has None as its lowest value.
    """

    title: str
    description: str
    unit: str
    mappings: Sequence[dashboard.ValueMapping] = field(default_factory=tuple)
    minimum: float | None = None
    maximum: float | None = None
    decimals: float | None = None
    thresholds: Sequence[tuple[float | None, str]] = ONE_COLOUR


def fraction_text(title: str, description: str, *, maximum: float | None = 1) -> PanelText:
    """Return the settings of a panel for fractions, which are shown in percent from 0 up to `maximum`."""
    return PanelText(title=title, description=description, unit="percentunit", minimum=0, maximum=maximum)


def count_text(
    title: str,
    description: str,
    *,
    minimum: float | None = None,
    thresholds: Sequence[tuple[float | None, str]] = ONE_COLOUR,
) -> PanelText:
    """Return the settings of a panel for counts, which are shown without decimals."""
    return PanelText(
        title=title, description=description, unit="none", minimum=minimum, decimals=0, thresholds=thresholds
    )


def time_series_panel(text: PanelText, *queries: Query, logarithmic: bool = False) -> timeseries.Panel:
    """Return a panel with one curve over time for each series. Values are not smoothed, and gaps are not connected."""
    panel = _configured(timeseries.Panel(), text, queries)
    panel = panel.line_width(1).fill_opacity(0).show_points(common.VisibilityMode.NEVER).span_nulls(False)
    panel = panel.tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    legend = common_builders.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
    panel = panel.legend(legend.display_mode(common.LegendDisplayMode.LIST).calcs(["lastNotNull"]))
    if logarithmic:
        scale = common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    return panel


def stat_panel(text: PanelText, *queries: Query) -> stat.Panel:
    """Return a panel with the latest value of each series, coloured by the thresholds or mappings of `text`."""
    latest = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    panel = _configured(stat.Panel(), text, queries).graph_mode(common.BigValueGraphMode.NONE).reduce_options(latest)
    # Show the name next to the value even for a single series: it is the name of the selected run.
    return panel.color_mode(common.BigValueColorMode.BACKGROUND).text_mode(common.BigValueTextMode.VALUE_AND_NAME)


def table_panel(text: PanelText, query: Query, columns: Mapping[str, str]) -> table.Panel:
    """Return a table with one row for each series. `columns` maps labels, and `Value`, to headings, in table order."""
    panel = _configured(table.Panel(), text, (replace(query, instant=True, as_table=True),))
    options = {
        "excludeByName": {"Time": True},
        "indexByName": {label: position for position, label in enumerate(columns)},
        "renameByName": dict(columns),
    }
    return panel.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=options))


def gauge_panel(text: PanelText, *queries: Query) -> gauge.Panel:
    """Return a gauge with the latest value of each series, for fractions of a whole."""
    latest = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    return _configured(gauge.Panel(), text, queries).reduce_options(latest)


def value_texts(texts: dict[str, tuple[str, str]]) -> list[dashboard.ValueMapping]:
    """Return a Grafana value mapping, which shows each value as a text with a colour."""
    options = {
        value: dashboard.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(texts.items())
    }
    return [dashboard.ValueMap(options=options)]


def with_run_link(panel: stat.Panel, uid: str) -> stat.Panel:
    """Add a link to each value of `panel`. The link opens the board `uid` with only the run of this value selected."""
    url = f"/d/{uid}?var-run=${{__field.labels.run}}&${{__url_time_range}}"
    return panel.data_links([dashboard_builders.DashboardLink("Only this run").url(url)])


def _thresholds(pairs: Sequence[tuple[float | None, str]]) -> dashboard_builders.ThresholdsConfig:
    made = [dashboard.Threshold(value=value, color=colour) for value, colour in pairs]
    return dashboard_builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(made)


def _configured(panel: P, text: PanelText, queries: Sequence[Query]) -> P:
    panel.title(text.title).description(text.description).unit(text.unit).datasource(DATASOURCE)
    panel.thresholds(_thresholds(text.thresholds)).mappings(list(text.mappings)).no_value("-")
    panel.targets([query.build(position) for position, query in enumerate(queries)])
    if text.minimum is not None:
        panel.min(text.minimum)
    if text.maximum is not None:
        panel.max(text.maximum)
    if text.decimals is not None:
        panel.decimals(text.decimals)
    return panel
