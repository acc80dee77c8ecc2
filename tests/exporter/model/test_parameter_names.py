"""Tests of parameter names: the names of the user's model, one for each storage, and the selection by them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from rankscope_exporter.model.parameter_names import Targets, found_in_place, named_parameters, plain_name
from rankscope_exporter.quantities.module_quantity import weight_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


class Gathering(OrderedDict[str, Any]):
    """A table like that of DeepSpeed: reading an entry starts a collective."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} was gathered")


def test_tables_of_modules_are_read_without_a_collective() -> None:
    net = nn.Linear(2, 2)
    listed = named_parameters(net)
    expected = list(net.parameters())
    net._parameters = Gathering(net._parameters)

    assert expected == found_in_place(listed)
    assert expected == [named.parameter for named in listed]
    assert expected == [named.parameter for named in named_parameters(net)]
    assert expected[0] is weight_of(net)


def test_wrapper_levels_are_not_in_parameter_names() -> None:
    assert "layers.0.up.weight" == plain_name("_orig_mod.layers.0._fsdp_wrapped_module.up.weight")


def test_lone_surrogates_in_a_name_are_escaped() -> None:
    model = nn.ModuleDict({"caf\udce9": nn.Linear(1, 1, bias=False)})

    assert ["caf\\udce9.weight"] == [named.name for named in named_parameters(model)]


def test_tied_weights_are_one_tensor_with_an_alias() -> None:
    (only,) = named_parameters(Tied())

    assert "embedding.weight" == only.name
    assert ("head.weight",) == only.aliases
    assert "embedding" == only.module


def test_user_name_that_contains_a_wrapper_name_is_unchanged() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.my_orig_mod = nn.Linear(1, 1, bias=False)
            self.scale = nn.Parameter(torch.ones(1))

    assert ["scale", "my_orig_mod.weight"] == [named.name for named in named_parameters(Odd())]


# Selection by name.

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
