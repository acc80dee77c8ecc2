"""Tests of msprobe's target names as patterns of modules and parameters."""

from __future__ import annotations

import pytest

from rankscope_exporter.compat.msprobe.config_translation import module_pattern, parameter_pattern
from rankscope_exporter.model.parameter_names import Targets, target_notices

NAMES = ("", "layers.1", "layers.10", "layers.1.mlp", "encoder.layers.1.mlp", "decoder.layers.1.mlp", "module.head")
PARAMETERS = (
    "layers.1.weight",
    "layers.10.weight",
    "layers.1.mlp.weight",
    "encoder.layers.1.mlp.weight",
    "head.weight",
)


@pytest.mark.parametrize(
    ("target", "squashed", "found"),
    [
        ("layers.1", False, {"layers.1"}),
        ("0:layers.1", False, {"layers.1"}),
        ("12:layers.1", False, {"layers.1"}),
        ("module.layers.1", False, {"layers.1"}),
        ("0:module.module.layers.1", False, {"layers.1"}),
        ("_fsdp_wrapped_module.layers.1._orig_mod", False, {"layers.1"}),
        ("module.head", False, {"module.head"}),
        ("module", False, {""}),
        ("", False, {""}),
        ("layers.1.mlp", False, {"layers.1.mlp"}),
        ("layers.1.mlp", True, {"layers.1.mlp", "encoder.layers.1.mlp", "decoder.layers.1.mlp"}),
        ("mlp", True, set()),
        ("layersX1", False, set()),
    ],
)
def test_module_target_matches_the_name_without_wrappers(target, squashed, found):
    targets = Targets((module_pattern(target, squashed=squashed),))

    assert found == {name for name in NAMES if targets.selects(name)}


@pytest.mark.parametrize(
    ("target", "squashed", "found"),
    [
        ("layers.1", False, {"layers.1.weight", "layers.1.mlp.weight"}),
        ("layers.1.weight", False, {"layers.1.weight"}),
        ("0:module.layers.1.mlp", False, {"layers.1.mlp.weight"}),
        ("layers.1.mlp", True, {"layers.1.mlp.weight", "encoder.layers.1.mlp.weight"}),
        ("", False, set(PARAMETERS)),
        ("module", False, set(PARAMETERS)),
        ("layers", False, {"layers.1.weight", "layers.10.weight", "layers.1.mlp.weight"}),
        ("layer", False, set()),
    ],
)
def test_parameter_target_matches_a_parameter_or_its_module(target, squashed, found):
    targets = Targets((parameter_pattern(target, squashed=squashed),))

    assert found == {name for name in PARAMETERS if targets.selects(name)}


def test_target_without_a_match_is_reported_with_the_nearest_name():
    parameters = Targets(tuple(map(parameter_pattern, ["0:layer.1.weight", "hed.weight"])))
    modules = Targets((module_pattern("0:module.layer.1"),))
    told = [*target_notices(parameters, PARAMETERS, "parameter"), *target_notices(modules, NAMES, "module")]

    assert [
        "target 'layer.1.weight' matches no parameter; nearest: layers.1.weight",
        "target 'hed.weight' matches no parameter; nearest: head.weight",
        "target 'layer.1' matches no module; nearest: layers.1",
    ] == [sentence.partition(",")[0] for sentence in told]


def test_name_may_contain_regex_characters():
    for name in ("head[0].weight", "a(b).weight", "a).weight", "(?#x).weight"):
        assert Targets((parameter_pattern(name),)).selects(name)
