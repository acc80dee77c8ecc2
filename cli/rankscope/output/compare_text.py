"""Format the comparison of several runs as text, JSON or Markdown: numbers and settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rankscope.output.diff_text import diff_document, first_line
from rankscope.output.rows import as_json, columns, printable
from rankscope.output.summary_text import TextFormat, markdown_table

if TYPE_CHECKING:
    from rankscope_storage.diff.diff import Divergence
    from rankscope_view.data.comparison import ComparedValue, Setting
    from rankscope_view.data.summary import Summary


def compare_text(runs: Sequence[Summary], difference: Divergence | None, form: TextFormat) -> str:
    """Return the comparison of `runs`. `difference` is the first one of two runs, if they were compared.

    Text and Markdown have the states of the runs, and only values that differ; JSON has all values.
    """
    from rankscope_view.data.comparison import STATES, compared_values, differing_settings

    values = compared_values(runs)
    settings, equal = differing_settings([one.detail for one in runs])
    if form == "json":
        return as_json(
            {
                "runs": [one.run for one in runs],
                "values": [asdict(value) | {"differs": value.differs} for value in values],
                "settings": [asdict(setting) for setting in settings],
                "equal_settings": equal,
                "difference": None if difference is None else diff_document(difference),
            }
        )
    is_markdown = form == "markdown"
    names = [printable(one.run) for one in runs]
    rows = [(value.name, *_texts(value)) for at, value in enumerate(values) if at < STATES or value.differs]
    lines = list(_table("States, and values that differ", ("", *names), rows, is_markdown=is_markdown))
    rows = [(printable(setting.key), *_settings(setting)) for setting in settings]
    title = f"Settings that differ ({len(settings)}; {equal} are equal)"
    lines += _table(title, ("", *names), rows, is_markdown=is_markdown)
    if difference is not None:
        lines += ["", f"{difference.steps_compared:,} common steps: {first_line(difference)}"]
    return "\n".join(lines) + "\n"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_markdown: bool) -> Iterator[str]:
    if is_markdown:
        yield f"## {title}"
        yield ""
        yield from markdown_table(head, rows) if rows else ("none",)
        yield ""
    elif rows:
        yield title
        yield from (f"  {line}" for line in columns(head, rows))
    else:
        yield f"{title}: none"


def _texts(value: ComparedValue) -> list[str]:
    from rankscope_view.pages.format import NOTHING, count, measure

    shown = []
    for one in value.values:
        if one is None:
            shown.append(NOTHING)
        elif isinstance(one, float):
            shown.append(measure(one))
        else:
            shown.append(count(one) if isinstance(one, int) else printable(one))
    return shown


def _settings(setting: Setting) -> list[str]:
    from rankscope_view.pages.format import NOTHING

    return [NOTHING if value is None else printable(value) for value in setting.values]
