"""Tests that the page about sinks names every sink and every setting."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from rankscope_exporter.sinks import sink_classes

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sinks.md"


def test_page_documents_every_sink_and_setting():
    text = PAGE.read_text(encoding="utf-8")
    ours = [cls for cls in sink_classes().values() if cls.__module__.startswith("rankscope_exporter.")]  # not of a test
    said = [f"`{cls.name}`" for cls in ours]
    said += [f"`{item.name}`" for cls in ours for item in fields(cls.options_class)]

    assert [] == [name for name in said if name not in text]
