"""The panel types that the boards use: time series, stat, table and status history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import prometheus, stat, statushistory, table, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import prometheus as prometheus_models

DATASOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

PanelBuilder = stat.Panel | timeseries.Panel | table.Panel | statushistory.Panel
P = TypeVar("P", stat.Panel, timeseries.Panel, table.Panel, statushistory.Panel)

ONE_COLOUR: Final = ((None, "text"),)
"""Thresholds of a panel with one colour for all values.

By default, the Grafana SDK colours values from 80 on red, which has no meaning for these quantities."""

ZERO_IS_GOOD: Final = ((None, "green"), (1, "red"))
"""Thresholds of a panel for counts that need attention from 1 on: green for 0, red from 1 on."""

NEUTRAL: Final = "#6e7079"
"""Colour of a panel without data: grey that is readable in light and dark."""

NO_DATA_IN_TILE: Final = "No data, see (i)"
"""Text of a tile without data, in which a longer one would be tiny. The description at (i) has the reason."""

NOT_MEASURED: Final = "No data of this run in the time range"
NO_GPU: Final = "No GPU on this machine, or no rankscope[nvidia]"
NO_TORCH_DEVICE: Final = "No GPU memory: PyTorch runs on the CPU"
NO_SERVICE: Final = "The service does not export this run"
NO_FIRINGS: Final = "No counter of firings here: none fired, or the run has ended"
"""Texts of panels without data, which name the most probable reason."""

_LEAST_TOP: Final = {"suffix": 0.1, "percentunit": 0.001, "s": 0.001, "Bps": 1, "bytes": 1}
"""Lowest top of an axis by unit. Otherwise an axis of zeros ends at 100."""

_STYLES: Final[Mapping[str, Mapping[str, object]]] = {
    "(highest|lowest)$": {"color": {"mode": "fixed", "fixedColor": "rgba(128, 160, 200, 0.5)"}},
    "smoothed$": {"custom.lineWidth": 3},
}
"""Settings of lines by the end of their names, in a panel with a smoothed line: pale values and a strong mean."""


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression of a panel. `legend` is the name of its lines and may contain labels such as `{{rank}}`."""

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


def over_ranks(expression: str, *aggregations: str, by: str = "run", legend: str = "") -> list[Query]:
    """Return one query for each aggregation (`avg`, `max`, `min`) of `expression` over the ranks.

    `expression` must be enclosed in parentheses. `by` are the labels to keep, and `legend` the part of the names of the
    lines before the aggregation. A panel with these queries replaces a panel with one line per rank, which would be
    unreadable.
    """
    names = {"avg": "mean", "max": "highest", "min": "lowest"}
    return [Query(f"{name} by ({by}) {expression}", f"{legend} {names[name]}".strip()) for name in aggregations]


@dataclass(frozen=True, slots=True)
class PanelText:
    """Title, description, unit, range and thresholds of a panel.

    `description` defines the quantity, states which values are good, and recommends an action for bad values.
    `empty` is the text of the panel without data: the reason. `thresholds` are pairs of (lowest value, colour). The
    first pair has None as its lowest value. Without a `minimum`, an axis begins near the lowest value.
    """

    title: str
    description: str
    _: KW_ONLY
    unit: str = "none"
    empty: str = NOT_MEASURED
    mappings: Sequence[dashboard.ValueMapping] = field(default_factory=tuple)
    minimum: float | None = 0
    maximum: float | None = None
    decimals: float | None = None
    thresholds: Sequence[tuple[float | None, str]] = ONE_COLOUR


fraction_text = partial(PanelText, unit="percentunit", maximum=1, decimals=1)
"""Settings of a panel for fractions, which are shown in percent from 0 up to `maximum`."""

count_text = partial(PanelText, decimals=0)
"""Settings of a panel for counts, which are shown without decimals."""


def time_series_panel(
    text: PanelText, *queries: Query, logarithmic: bool = False, many: bool = False
) -> timeseries.Panel:
    """Return a panel with one curve over time for each series. Values are not smoothed, and gaps are not connected.

    With `many` curves, the legend is a table at the right, which a reader can scroll. Such a panel must be wide.
    """
    panel = _configured(timeseries.Panel(), replace(text, minimum=None) if logarithmic else text, queries)
    panel = panel.line_width(1).fill_opacity(0).show_points(common.VisibilityMode.NEVER).span_nulls(False)
    panel = panel.tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    mode, place = (
        (common.LegendDisplayMode.TABLE, common.LegendPlacement.RIGHT)
        if many
        else (common.LegendDisplayMode.LIST, common.LegendPlacement.BOTTOM)
    )
    least = _LEAST_TOP.get(text.unit.partition(":")[0], 1 if text.decimals == 0 else None)
    if least and text.minimum == 0 and text.maximum is None and not logarithmic:
        panel = panel.axis_soft_max(least)
    legend = common_builders.VizLegendOptions().show_legend(True).placement(place).display_mode(mode)
    panel = panel.legend(legend.calcs(["lastNotNull"])).mappings([*text.mappings, null_text(" ")])
    for names, settings in _STYLES.items() if queries[-1].legend.endswith("smoothed") else ():
        panel = panel.override_by_regexp(f"/{names}/", _properties(settings))
    if logarithmic:
        scale = common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    return panel


def stacked(panel: timeseries.Panel, *, bars: bool = False) -> timeseries.Panel:
    """Return `panel` with its series on top of each other, as areas or as one bar for each point in time."""
    stack = common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
    panel = panel.stacking(stack).fill_opacity(60 if bars else 20)
    return panel.draw_style(common.GraphDrawStyle.BARS) if bars else panel


def stat_panel(text: PanelText, *queries: Query, with_names: bool = False, bad_name: str = "") -> stat.Panel:
    """Return a panel with the latest value of each series, coloured by the thresholds or mappings of `text`.

    Only states, and counts that should be 0, have a coloured background. The values of a query over time are a small
    curve below the number. A series with the name `bad_name` is red from 1 on.
    """
    latest = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    curve = common.BigValueGraphMode.NONE if queries[0].instant else common.BigValueGraphMode.AREA
    panel = _configured(stat.Panel(), text, queries).graph_mode(curve).reduce_options(latest)
    # Otherwise coloured, as if they were judged values.
    absent, bad = null_text(NO_DATA_IN_TILE, NEUTRAL), _special(dashboard.SpecialValueMatch.NA_N, "NaN", "red")
    panel = panel.mappings([*text.mappings, absent, bad]).no_value(NO_DATA_IN_TILE)
    if bad_name:
        red = _thresholds(((None, "text"), (1, "red"))).build()
        panel = panel.override_by_name(bad_name, _properties({"thresholds": red}))
    names = common.BigValueTextMode.VALUE_AND_NAME if with_names else common.BigValueTextMode.VALUE
    judges = text.mappings or text.thresholds == ZERO_IS_GOOD
    colours = common.BigValueColorMode.BACKGROUND if judges else common.BigValueColorMode.VALUE
    return panel.color_mode(colours).text_mode(names)


def history_panel(text: PanelText, query: Query, label: str, *series: str) -> statushistory.Panel:
    """Return a grid with one row for each series and one coloured cell for each interval.

    Grafana ignores the no-value text of this type of panel. If none of the `series` that the query reads has a sample
    in the time range, the panel has one grey row instead. The legend of the query must contain `label`: the name of
    this row is the reason.
    """
    absent = " and on () ".join(f"absent_over_time({one}[$__range] @ end() offset -$__interval)" for one in series)
    reason = f'max by ({label}) (label_replace({absent}, "{label}", "{text.empty}", "", "")) - 2'
    query = replace(query, expression=f"{query.expression} or {reason}")
    no_data = [*value_texts({"-1": ("no data", NEUTRAL)}), null_text("no data", NEUTRAL)]
    panel = _configured(statushistory.Panel(), replace(text, mappings=[*text.mappings, *no_data]), (query,))
    legend = common_builders.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
    panel = panel.max_data_points(60).show_value(common.VisibilityMode.NEVER).row_height(0.9).col_width(0.95)
    if text.mappings:  # otherwise the legend of Grafana 9.4 has thresholds instead of states
        panel = panel.color_scheme(dashboard_builders.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC))
    return panel.legend(legend.display_mode(common.LegendDisplayMode.LIST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: heading, width in pixels (None: the remaining width), unit, value mappings and links.

    A cell without a value, or with an empty label, shows the text `absent`, or nothing if the column has links. Grafana
    aligns labels to the left, also numbers: `is_number` aligns them to the right, as values.
    """

    heading: str
    is_number: bool = False
    width: int | None = None
    unit: str = ""
    decimals: int | None = None
    mappings: Sequence[dashboard.ValueMapping] = ()
    absent: str = "–"
    links: Mapping[str, str] = field(default_factory=dict)

    def properties(self) -> list[dashboard.DynamicConfigValue]:
        """Return the settings of the column as overrides of the settings of the panel."""
        made: dict[str, object] = {}
        if self.width is not None:
            made["custom.width"] = self.width
        if self.is_number:
            made["custom.align"] = "right"
        if self.unit:
            made["unit"] = self.unit
        if self.decimals is not None:
            made["decimals"] = self.decimals
        shown = " " if self.links else self.absent  # otherwise the text is a link to nothing
        absent = (null_text(shown), _special(dashboard.SpecialValueMatch.EMPTY, shown))
        made["mappings"] = list(self.mappings or absent)
        if self.mappings:  # their colours fill the cells
            made["custom.cellOptions"] = {"type": "color-background", "mode": "basic"}
            made["custom.displayMode"] = "color-background-solid"  # name of the setting before Grafana 9.5
        if self.links:
            made["links"] = [{"title": title, "url": url} for title, url in self.links.items()]
        return _properties(made)


TENSOR_COLUMN: Final = Column(
    heading="Tensor",
    links={
        "The tensor in this time range": "/d/rankscope-tensors?var-datasource=${datasource}"
        "&var-run=${run:percentencode}&var-kind=${__data.fields.Kind:percentencode}"
        "&var-tensor=${__data.fields.Tensor:percentencode}&${__url_time_range}"
    },
)
"""Column of tensors in a table that also has the column Kind."""


def table_panel(text: PanelText, queries: Sequence[Query], columns: Mapping[str, Column]) -> table.Panel:
    """Return a table with one row for each combination of labels.

    `columns` maps labels, and the values of the queries, to columns in the order of the table. The value of a single
    query is `Value`; several queries have `Value #A`, `Value #B` and so on.
    """
    panel = _configured(table.Panel(), text, [replace(query, instant=True, as_table=True) for query in queries])
    for column in columns.values():
        panel = panel.override_by_name(column.heading, column.properties())
    if len(queries) > 1:
        panel = panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    options = {
        "excludeByName": {"Time": True},
        "indexByName": {label: position for position, label in enumerate(columns)},
        "renameByName": {label: column.heading for label, column in columns.items()},
    }
    panel = panel.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=options))
    return panel.filterable(True).cell_options(common.TableAutoCellOptions())


def value_texts(texts: Mapping[str, tuple[str, str]]) -> list[dashboard.ValueMapping]:
    """Return a Grafana value mapping, which shows each value as a text with a colour."""
    options = {
        value: dashboard.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(texts.items())
    }
    return [dashboard.ValueMap(options=options)]


def _properties(settings: Mapping[str, object]) -> list[dashboard.DynamicConfigValue]:
    return [dashboard.DynamicConfigValue(id_val=name, value=value) for name, value in settings.items()]


def null_text(text: str, colour: str | None = None) -> dashboard.ValueMapping:
    """Return a Grafana value mapping, which shows `text` for a missing value, in `colour` if it is given.

    Without it, Grafana writes the no-value text of the panel next to each tick of an axis that has no label, and into
    each empty cell of a table.
    """
    return _special(dashboard.SpecialValueMatch.NULL, text, colour)


def _special(match: dashboard.SpecialValueMatch, text: str, colour: str | None = None) -> dashboard.ValueMapping:
    result = dashboard.ValueMappingResult(text=text, color=colour)
    return dashboard.SpecialValueMap(options=dashboard.DashboardSpecialValueMapOptions(match=match, result=result))


def _thresholds(pairs: Sequence[tuple[float | None, str]]) -> dashboard_builders.ThresholdsConfig:
    made = [dashboard.Threshold(value=value, color=colour) for value, colour in pairs]
    return dashboard_builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(made)


def _configured(panel: P, text: PanelText, queries: Sequence[Query]) -> P:
    described = f"{text.description} Without data: {text.empty}."
    absent = text.empty if text.empty.startswith("No data") else f"No data. Probable reason: {text.empty}"
    panel.title(text.title).description(described).unit(text.unit).datasource(DATASOURCE)
    panel.thresholds(_thresholds(text.thresholds)).mappings(list(text.mappings)).no_value(absent)
    panel.targets([query.build(position) for position, query in enumerate(queries)])
    if text.minimum is not None:
        panel.min(text.minimum)
    if text.maximum is not None:
        panel.max(text.maximum)
    if text.decimals is not None:
        panel.decimals(text.decimals)
    return panel
