"""Choosing parameters and modules by name."""

from __future__ import annotations

import pytest

from rankscope_exporter.model.name_patterns import Targets

NAMES = ("embedding", "layers.0.attention.query", "layers.0.mlp", "layers.1.mlp", "layers.10.mlp", "head[0]")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", set(NAMES)),
        ("layers.1.mlp", {"layers.1.mlp"}),
        ("layers.1", set()),  # no prefix: the existing tool takes layers.1 and layers.10 for it
        ("layers.*.mlp", {"layers.0.mlp", "layers.1.mlp", "layers.10.mlp"}),
        ("layers.[01].mlp", {"layers.0.mlp", "layers.1.mlp"}),
        (r"re:layers\.\d\.mlp", {"layers.0.mlp", "layers.1.mlp"}),
        ("re:.*query", {"layers.0.attention.query"}),
        ("head[0]", {"head[0]"}),  # a name of its own before it is a glob
    ],
)
def test_exact_names_globs_and_regular_expressions(pattern, expected):
    assert expected == {name for name in NAMES if Targets([pattern]).selects(name)}


def test_an_alias_selects_the_tensor():
    assert Targets(["head.*"]).selects("embedding.weight", "head.weight")


def test_what_selects_nothing_is_told_with_the_nearest_names():
    unmatched = Targets(["*", "layers.0.mpl", "layers.*"]).unmatched(NAMES)

    assert {"layers.0.mpl"} == set(unmatched)
    assert "layers.0.mlp" == unmatched["layers.0.mpl"][0]


@pytest.mark.parametrize("bad", ["layers.*", [1], ["re:("]])
def test_what_is_no_list_of_patterns_is_refused(bad):
    with pytest.raises(ValueError, match="target"):
        Targets(bad)
