"""A run as a part of an HTML document without scripts, for the output of a notebook."""

from __future__ import annotations

from typing import Final

from rankscope_view.data.history import LOSS
from rankscope_view.pages import svg
from rankscope_view.pages.format import text
from rankscope_view.pages.parts import state_word
from rankscope_view.pages.report import ReportContent, sentences
from rankscope_view.pages.sections import sections

_SECTIONS: Final = ("progress", "loss", "parameters", "time", "speed", "metrics")
_STYLE: Final = """\
.rankscope { max-width: 820px; font-size: 13px; } .rankscope .chart { width: 100%; height: auto; }
.rankscope .tensor { font-family: monospace; } .rankscope .raw { stroke-width: 1.4; } .rankscope .smooth { opacity: .5; }
.rankscope .grid { stroke: currentColor; opacity: .12; } .rankscope .restart { stroke: #8f6fe0; stroke-dasharray: 4 3; }
.rankscope .chart text { fill: currentColor; opacity: .7; } .rankscope .nan { fill: #e5308a; opacity: .35; stroke: none; }
.rankscope td { text-align: left; vertical-align: top; } .rankscope summary { cursor: pointer; }"""
"""Style of the fragment. Where a viewer removes it, the attributes of the drawing remain."""


def fragment(content: ReportContent) -> str:
    """Return state, sentences, loss curve and summary of a run as HTML."""
    row = content.detail.row
    drawn = ""
    if LOSS in content.curves:
        chart = svg.line_chart(content.curves[LOSS], label="Loss", height=220)
        chart = chart.replace("<svg ", '<svg fill="none" stroke="#3d8fc4" font-size="11" ', 1)
        drawn = chart.replace("<text ", '<text fill="#808080" stroke="none" ')
    listed = [one for one in sections(content.summary) if one.title in _SECTIONS]
    rows = "".join(
        f"<tr><td>{text(one.title) if not at else ''}</td><td>{text(label)}</td><td>{text(value)}</td></tr>"
        for one in listed
        for at, (label, value) in enumerate(one.rows)
        if label != "advice"
    )
    return (
        f'<div class="rankscope"><style>{_STYLE}</style><p><b>{text(row.run)}</b>, {text(state_word(row.state).lower())}. '
        f"{' '.join(sentences(content))}</p>{drawn}<details><summary>Summary</summary><table>{rows}</table></details></div>"
    )
