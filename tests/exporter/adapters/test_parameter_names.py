"""Names of parameters and modules, as in the model of the user, and the search for tensors inside of objects."""

import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from rankscope_exporter.adapters import framework_of
from rankscope_exporter.adapters.parameter_names import (
    Targets,
    found_in_place,
    named_modules,
    named_parameters,
    target_notices,
)
from rankscope_exporter.adapters.pytree import MAX_DEPTH, MAX_TENSORS, ObjectSpec, parse_specs, received, returned
from rankscope_exporter.measure.quantities.activations import Calls, ModuleCall
from rankscope_exporter.measure.quantities.module_quantity import weight_of


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


def test_lone_surrogates_in_a_name_are_escaped() -> None:
    model = nn.ModuleDict({"caf\udce9": nn.Linear(1, 1, bias=False)})

    assert ["caf\\udce9.weight"] == [named.name for named in named_parameters(model)]


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


@pytest.mark.parametrize("bad", ["layers.*", [1], ["re:("]])
def test_invalid_list_of_targets_is_rejected(bad):
    with pytest.raises(ValueError, match="target"):
        Targets(bad)


def test_wrapper_levels_are_not_in_module_names():
    inner = nn.Linear(2, 2)
    model = nn.Sequential(checkpoint_wrapper(inner), nn.ModuleList([nn.Tanh()]))
    modules = {item.name: item for item in named_modules(model)}

    assert ["", "0", "1.0"] == list(modules)
    assert inner is modules["0"].module


class Holder(nn.Module):
    """A wrapper like that of Lightning Fabric."""

    def __init__(self, inner: nn.Module, **others: nn.Module) -> None:
        super().__init__()
        self._forward_module = self._original_module = inner
        for name, module in others.items():
            self.add_module(name, module)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        *(
            (wrap, ["weight", "bias"])
            for wrap in (
                *(Holder, nn.DataParallel, lambda net: compiled(Holder(net)), lambda net: Holder(compiled(net))),
                *(lambda net: compiled(nn.DataParallel(net)), lambda net: nn.DataParallel(Holder(compiled(net)))),
            )
        ),
        (lambda net: nn.Sequential(OrderedDict(module=net)), ["module.weight", "module.bias"]),
        (lambda net: Holder(net, head=nn.Linear(1, 1, bias=False)), ["weight", "bias", "head.weight"]),
    ],
)
def test_names_are_those_of_the_model_inside_of_known_wrappers(wrap, expected):
    model = wrap(nn.Linear(2, 2))  # the adapter does not keep it alive

    assert expected == [named.name for named in named_parameters(framework_of(model).module)]


def test_shared_module_has_one_name_and_is_selected_by_any_alias():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    modules = named_modules(model)

    assert [("a", ("b.0",)), ("b", ())] == [(item.name, item.aliases) for item in modules]
    assert ["a"] == [item.name for item in filter(Targets(["b.?"]).chooses, modules)]
    assert ["target 'c' matches no module"] == target_notices(Targets(["c", "b.0"]), ["a", "b", "b.0"], "module")


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
                where = pointer if number == 0 else choice.randint(1, 3)
                part.append(calls.begins(choice.choice("abc"), micro_step, with_gradients=False, pointer=where))
            parts.append(part)
        choice.shuffle(parts)
        for part in parts:
            assert part == [calls.again(call.module, call.pointer if not n else 2) for n, call in enumerate(part)]
            calls.gradient_arrived()


A, B, C, D = (torch.tensor(float(number)) for number in range(4))


def test_depth_and_tensor_limits_and_unknown_types_are_reported():
    deep: Any = A
    for _ in range(MAX_DEPTH + 1):
        deep = [deep, 1]

    assert ("list",) == returned(deep).unknown
    many = returned([A] * (MAX_TENSORS + 3))
    assert (MAX_TENSORS, ("3 tensors beyond the first 128",)) == (len(many.slots), many.unknown)
    assert ("object", "set") == tuple(sorted(returned((A, {1}, object())).unknown))
    cyclic: list[Any] = [A]
    cyclic.append(cyclic)
    assert 0 < len(returned(cyclic).slots) <= MAX_TENSORS


def test_part_is_selected_by_position_number_or_name():
    outputs, inputs = returned((A, (B, C), D)), received((A, None, B), {"mask": C})
    select = lambda text, found: [float(slot.tensor) for slot in ObjectSpec.parse(text).select(found) or ()]  # noqa: E731

    assert {"tuple[3]:0": [0.0], "tuple[3]:1": [1.0, 2.0], "list[3]": [0.0, 1.0, 2.0, 3.0], "tuple[4]:0": []} == {
        text: select(text, outputs) for text in ("tuple[3]:0", "tuple[3]:1", "list[3]", "tuple[4]:0")
    }
    by_number, by_position = "list[3]:1", "tuple[4]:2"  # in module_struct.json, and in the call
    assert {by_number: [1.0], by_position: [1.0], "dict:mask": [2.0], "dict:mas": [], "tensor": []} == {
        text: select(text, inputs) for text in (by_number, by_position, "dict:mask", "dict:mas", "tensor")
    }
    single = [("tensor", A), ("tuple[1]:0", A), ("tensor", (A, 1))]
    assert [[0.0]] * 3 == [select(text, returned(output)) for text, output in single]


@pytest.mark.parametrize("text", ["", "tuple", "tuple[2]:", "tuple[2]:2", "tuple[-1]", "dict:", "Tensor", None, 3])
def test_invalid_part_is_rejected(text):
    with pytest.raises(ValueError, match=r"does not select an element|does not exist"):
        ObjectSpec.parse(text)
    with pytest.raises(ValueError, match=r"parts\['a'\]"):
        parse_specs("a", {"input": text})
