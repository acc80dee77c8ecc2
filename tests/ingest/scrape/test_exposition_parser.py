"""The parser of plain pages returns the samples of prometheus_client, or None for other pages."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.properties import examples

from rankscope_ingest.base.errors import DecodeError
from rankscope_ingest.scrape.exposition_parser import parse_exactly, parse_plain


def braced(labels: dict[str, str]) -> str:
    pairs = [f'{name}="{value}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


VALUE = st.one_of(st.text(max_size=6), st.sampled_from(["a b", "x,y", "}", "{", "#", " # {", "=", "a\\n", "é学", " "]))
LABELS = st.dictionaries(st.sampled_from(["a", "b_1", "le", "__name__"]), VALUE, max_size=3)
NUMBER = st.one_of(
    st.floats(width=64).map(repr),
    st.sampled_from(["1", "+Inf", "-Inf", "NaN", "1e3", ".5", "5.", "1_0", "0x1", "inf", "nan", "1 5", "٣", "-0"]),
)
LINE = st.one_of(
    st.sampled_from(["", "# HELP m text", "# TYPE m counter", "  ", "m", "m{} 1", 'm{a="1",} 2', 'm{a="1",a="2"} 3']),
    st.builds(
        lambda name, labels, number: f"{name}{braced(labels)} {number}",
        st.sampled_from(["m", "m_total", "a:b", "up"]),
        LABELS,
        NUMBER,
    ),
)


def by_library(text: str) -> list[tuple[str, dict[str, str], str]]:
    plain = "\n".join(line for line in text.split("\n") if not line.strip().startswith("#"))
    families = text_string_to_metric_families(plain)
    return [(one.name, dict(one.labels), shown(one.value)) for family in families for one in family.samples]


def shown(value: float) -> str:
    """Return the value as text; -0 becomes 0, because prometheus_client parses it as the integer 0."""
    return repr(float(value) + 0.0)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(LINE, max_size=4))
@example(['m{a="x y",b="z"} 1.5', "# TYPE m gauge", "m 2"])
@example(["m -0"])
def test_plain_samples_equal_those_of_prometheus_client(lines):
    text = "".join(f"{line}\n" for line in lines)
    found = parse_plain(text)

    if found is not None:
        assert by_library(text) == [(one.metric, one.labels, shown(one.value)) for one in found]


@pytest.mark.parametrize(
    "line",
    [
        'm{a="\\n"} 1',
        "m 1 1700000000",
        'm 1 # {id="x"} 2',
        "m{} 1",
        'm{a="1",a="2"} 1',
        "m  1",
        " m 1",
        "m 1_0",
        "m\t1",
    ],
)
def test_line_with_more_than_series_and_number_is_not_plain(line):
    assert None is parse_plain(f"up 1\n{line}\n")


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
