"""Text and colour of values, by the settings of a panel or of one column: unit, decimals, mappings and thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rankscope_dashboards.preview.units import formatted


class Cell(NamedTuple):
    """A value as text, and its colour by a name of Grafana; an empty name for no colour."""

    text: str
    colour: str = ""


def mapped(value: float, settings: Mapping[str, Any]) -> Cell | None:
    """Return the text and the colour that a value mapping gives to `value`; None without a mapping."""
    for one in settings.get("mappings") or ():
        options = one["options"]
        found = options.get(f"{value:g}") if one["type"] == "value" and math.isfinite(value) else None
        if one["type"] == "special" and options["match"] == "nan" and math.isnan(value):
            found = options["result"]
        if found:
            return Cell(found["text"], found.get("color", ""))
    return None


def threshold_colour(value: float, settings: Mapping[str, Any]) -> str:
    """Return the colour of the last threshold that `value` reaches. NaN has the colour of the first one."""
    colour = ""
    for step in settings.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    return colour


def cell(value: float, settings: Mapping[str, Any], *, has_thresholds: bool) -> Cell:
    """Return `value` with its unit and colour. Without `has_thresholds`, only a mapping gives a colour."""
    if (found := mapped(value, settings)) is not None:
        return found
    text = formatted(value, settings.get("unit", ""), settings.get("decimals"))
    return Cell(text, threshold_colour(value, settings) if has_thresholds else "")


def colour_key(settings: Mapping[str, Any]) -> list[Cell]:
    """Return the meanings of the colours of a panel: the texts of its mappings, or else its thresholds."""
    mappings = (one["options"] for one in settings.get("mappings") or () if one["type"] == "value")
    texts = [text for options in mappings for text in options.values()]
    if texts:
        return [Cell(one["text"], one.get("color", "")) for one in texts]
    steps = settings.get("thresholds", {}).get("steps", ())
    unit, decimals = settings.get("unit", ""), settings.get("decimals")
    return [
        Cell("lower" if one["value"] is None else f"from {formatted(one['value'], unit, decimals)}", one["color"])
        for one in steps
        if len(steps) > 1
    ]


def column_settings(panel: Mapping[str, Any], heading: str) -> dict[str, Any]:
    """Return the settings of one column of a table: those of the panel, with the overrides for this heading."""
    settings = panel.get("fieldConfig", {})
    found = dict(settings.get("defaults", {}))
    overrides: Sequence[Mapping[str, Any]] = settings.get("overrides") or ()
    for override in overrides:
        if override["matcher"] == {"id": "byName", "options": heading}:
            found.update({one["id"]: one["value"] for one in override["properties"]})
    return found
