"""Plain pages are recognised, and the error for an invalid page names its line.

`test_page_reader.py` compares the samples with those of prometheus_client.
"""

from __future__ import annotations

import math

import pytest

from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.scrape.exposition_parser import parse_exactly, parse_plain


def test_typical_exporter_page_is_plain():
    page = '# HELP a b\n# TYPE a gauge\na{gpu="0",model="NVIDIA H100 80GB HBM3"} 1.5e-3\n\nb NaN\nc -Inf\n'
    found = parse_plain(page)

    assert found is not None
    assert [("a", {"gpu": "0", "model": "NVIDIA H100 80GB HBM3"}, 0.0015), ("c", {}, -math.inf)] == [
        one[:3] for one in (found[0], found[2])
    ]
    assert math.isnan(found[1].value)


@pytest.mark.parametrize(
    ("text", "openmetrics", "place"),
    [
        ('a 1\n# a comment\n\nb{x="1"} 2 5\nc d e\nf 1\n', False, "line 5: "),
        ("# TYPE a gauge\na 1\nb b\n# EOF\n", True, "line 3: "),
        ("a 1\nb 1 1e17\nc 1\n", False, "sample b: "),
    ],
)
def test_invalid_page_is_reported_with_its_line(text, openmetrics, place):
    with pytest.raises(DecodeError, match=f"^the page is not a valid exposition: {place}"):
        parse_exactly(text, openmetrics=openmetrics)
