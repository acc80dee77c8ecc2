"""Tests of the selection of parameters and modules by name."""

from __future__ import annotations

import pytest

from rankscope_exporter.model.parameter_names import Targets

NAMES = ("embedding", "layers.0.attention.query", "layers.0.mlp", "layers.1.mlp", "layers.10.mlp", "head[0]")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", set(NAMES)),
        ("layers.1.mlp", {"layers.1.mlp"}),
        ("layers.1", set()),  # not a prefix: msprobe would select layers.1 and layers.10
        ("layers.*.mlp", {"layers.0.mlp", "layers.1.mlp", "layers.10.mlp"}),
        ("layers.[01].mlp", {"layers.0.mlp", "layers.1.mlp"}),
        (r"re:layers\.\d\.mlp", {"layers.0.mlp", "layers.1.mlp"}),
        ("re:.*query", {"layers.0.attention.query"}),
        ("head[0]", {"head[0]"}),  # an exact name has precedence over a glob
    ],
)
def test_targets_are_exact_names_globs_or_regular_expressions(pattern, expected):
    assert expected == {name for name in NAMES if Targets([pattern]).selects(name)}


def test_target_that_matches_an_alias_selects_the_tensor():
    assert Targets(["head.*"]).selects("embedding.weight", "head.weight")


def test_unmatched_target_is_reported_with_the_nearest_names():
    unmatched = Targets(["*", "layers.0.mpl", "layers.*"]).unmatched(NAMES)

    assert {"layers.0.mpl"} == set(unmatched)
    assert "layers.0.mlp" == unmatched["layers.0.mpl"][0]


@pytest.mark.parametrize("bad", ["layers.*", [1], ["re:("]])
def test_invalid_list_of_targets_is_rejected(bad):
    with pytest.raises(ValueError, match="target"):
        Targets(bad)
