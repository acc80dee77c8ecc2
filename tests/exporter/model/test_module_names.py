"""Tests of module names, also behind wrappers, and of the identification of recomputed module calls."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rankscope_exporter.model.parameter_names import Targets, defines_forward, named_modules, selected, unmatched
from rankscope_exporter.quantities.activations.quantity import Calls, ModuleCall


def test_wrapper_levels_are_not_in_module_names():
    inner = nn.Linear(2, 2)
    model = nn.Sequential(checkpoint_wrapper(inner), nn.ModuleList([nn.Tanh()]))
    modules = {item.name: item for item in named_modules(model)}

    assert ["", "0", "1.0"] == list(modules)
    assert inner is modules["0"].module


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_module_defines_forward_and_module_list_does_not():
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    script = torch.jit.script(nn.Linear(2, 2))

    assert [True, True, False] == [defines_forward(kind) for kind in (type(script), Own, nn.ModuleList)]
    assert ["", "0"] == [item.name for item in named_modules(nn.Sequential(script))]


def test_shared_module_has_one_name_and_is_selected_by_any_alias():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    modules = named_modules(model)

    assert [("a", ("b.0",)), ("b", ())] == [(item.name, item.aliases) for item in modules]
    assert ["a"] == [item.name for item in selected(modules, Targets(["b.?"]))]
    assert ["target 'c' matches no module"] == unmatched(modules, Targets(["c", "b.0"]))


@pytest.mark.parametrize(
    ("way", "compiled"), [("wrapped", {"0.0"}), ("in place", {"0", "0.0"}), ("all", {"0", "0.0", "1"})]
)
def test_modules_inside_of_compiled_code_are_marked(way, compiled):
    part = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(part, nn.Tanh())
    if way == "wrapped":
        model[0] = torch.compile(part, backend="eager")
    elif way == "in place":
        part.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")

    assert {name: name in compiled for name in ("", "0", "0.0", "1")} == {
        item.name: item.compiled for item in named_modules(model)
    }


def test_recomputed_calls_are_identified_in_any_order():
    """Random calls of shared modules in several micro-batches. Each part keeps the address of its first argument."""
    for seed in range(40):
        choice = random.Random(seed)
        calls, parts, pointer = Calls(), [], 1000
        for _ in range(choice.randint(1, 6)):
            part: list[ModuleCall] = []
            micro_step = choice.randint(0, 2)
            pointer += 1
            for number in range(choice.randint(1, 4)):
                # Tensors inside of a part reuse the same few addresses.
                where = pointer if number == 0 else choice.randint(1, 3)
                part.append(calls.begins(choice.choice("abc"), micro_step, with_gradients=False, pointer=where))
            parts.append(part)
        choice.shuffle(parts)
        for part in parts:
            assert part == [calls.again(call.module, call.pointer if not n else 2) for n, call in enumerate(part)]
            calls.gradient_arrived()

        assert calls.again("a", 0) is None


def test_recomputed_call_without_argument_is_the_latest_one():
    calls = Calls()
    parts = [[calls.begins(name, 0, with_gradients=False) for name in "ab"] for _ in range(3)]

    assert [None, 1, 2] == [part[0].seq for part in parts]
    for part in reversed(parts):
        assert part == [calls.again(call.module, 0) for call in part]
        calls.gradient_arrived()
