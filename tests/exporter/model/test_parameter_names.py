"""Names of parameters: the user's own, one per storage."""

from __future__ import annotations

import torch
from torch import nn

from rankscope_exporter.model.parameter_names import named_parameters, plain_name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_levels_that_wrappers_insert_do_not_show() -> None:
    assert "layers.0.up.weight" == plain_name("_orig_mod.layers.0._fsdp_wrapped_module.up.weight")


def test_a_name_that_no_text_can_hold_is_written_out() -> None:
    model = nn.ModuleDict({"caf\udce9": nn.Linear(1, 1, bias=False)})

    assert ["caf\\udce9.weight"] == [named.name for named in named_parameters(model)]


def test_tied_weights_are_one_tensor_with_two_names() -> None:
    (only,) = named_parameters(Tied())

    assert "embedding.weight" == only.name
    assert ("head.weight",) == only.aliases
    assert "embedding" == only.module


def test_a_name_that_contains_a_wrapper_word_is_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.my_orig_mod = nn.Linear(1, 1, bias=False)
            self.scale = nn.Parameter(torch.ones(1))

    assert ["scale", "my_orig_mod.weight"] == [named.name for named in named_parameters(Odd())]
