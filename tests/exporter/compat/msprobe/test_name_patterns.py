"""Names of the tool's targets, as patterns that find what is meant here."""

from __future__ import annotations

import pytest

from rankscope_exporter.compat.msprobe.config_translation import module_pattern, parameter_pattern
from rankscope_exporter.model.name_patterns import Targets, target_notices

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
def test_a_module_is_named_exactly_without_what_wrappers_add(target, squashed, found):
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
def test_a_parameter_is_named_by_itself_or_by_a_module_that_holds_it_and_never_by_half_a_name(target, squashed, found):
    targets = Targets((parameter_pattern(target, squashed=squashed),))

    assert found == {name for name in PARAMETERS if targets.selects(name)}


def test_a_target_that_matches_nothing_is_told_as_a_name_with_the_nearest():
    parameters = Targets(tuple(map(parameter_pattern, ["0:layer.1.weight", "hed.weight"])))
    modules = Targets((module_pattern("0:module.layer.1"),))
    told = [*target_notices(parameters, PARAMETERS, "parameter"), *target_notices(modules, NAMES, "module")]

    assert [
        "target 'layer.1.weight' matches no parameter; nearest: layers.1.weight",
        "target 'hed.weight' matches no parameter; nearest: head.weight",
        "target 'layer.1' matches no module; nearest: layers.1",
    ] == [sentence.partition(",")[0] for sentence in told]


def test_a_name_may_have_signs_of_regular_expressions():
    for name in ("head[0].weight", "a(b).weight", "a).weight", "(?#x).weight"):
        assert Targets((parameter_pattern(name),)).selects(name)
