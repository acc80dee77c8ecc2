"""Activations and their gradients, compared with tensors that the model records in a run without a monitor."""

from __future__ import annotations

import copy
import csv
import os
import re
import urllib.request
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from tests.exporter.quantities.activation_runs import Key, Notes, Run, equal_bits, nothing, same, train
from tests.exporter.quantities.test_structure import Transformer
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.statistics import MeasureGroup

STEPS = 3
EVERYTHING: dict[str, Any] = {}


def batch(step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator(torch.get_default_device()).manual_seed(10 * step + micro))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Answer:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None
    count: int = 3


class ModelOutput(OrderedDict):  # type: ignore[type-arg]  # as transformers has it
    """A dict whose items are attributes as well."""


class Shaped(nn.Module):
    """A linear layer whose arguments and results take the form that `form` gives them."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.eye(6) + 0.01)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs["x"]
        while not isinstance(first, torch.Tensor):
            first = next(iter(first.values())) if isinstance(first, dict) else first[0]
        others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.Tensor)]
        return self.form(first @ self.weight + sum(other.float().mean() for other in others if other is not first))


class Zoo(nn.Module):
    """All forms of arguments and results, one after the other."""

    FORMS: ClassVar[dict[str, Callable[[torch.Tensor], Any]]] = {
        "tensor": lambda y: y,
        "single": lambda y: (y,),
        "tuple": lambda y: (y * 2, None, y + 1),
        "list": lambda y: [y, y * 3],
        "mapping": lambda y: {"count": 3, "y": y, "other": y.detach()},
        "data": Answer,
        "named": lambda y: Pair(y, y * 2),
        "output": lambda y: ModelOutput(logits=y, states=(y * 2, y * 3)),
        "nested": lambda y: (y, (y * 2, [y * 3]), y * 4),
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.steps = nn.ModuleDict({name: Shaped(form) for name, form in self.FORMS.items()})

    def forward(self, x: torch.Tensor, note: Any = nothing) -> torch.Tensor:
        note("in", "", x)
        ids = note("in", "embed", (x.abs() * 2).long().clamp(max=8)[:, 0])
        table = note("out", "embed", self.embed(ids))

        at = "steps.tensor"  # two positional tensors, one keyword tensor, and arguments without tensors between them
        mask = torch.ones(3, dtype=torch.bool)
        note("in", at, x, 0), note("in", at, table, 1), note("in", at, mask, 2)
        y = note("out", at, self.steps["tensor"](x, None, table, scale=2.0, mask=mask))

        note("in", "steps.single", y)
        (y,) = self.steps["single"](x=y)
        note("out", "steps.single", y)

        note("in", "steps.tuple", y)
        left, _, right = self.steps["tuple"](y)
        note("out", "steps.tuple", left, 0), note("out", "steps.tuple", right, 2)

        note("in", "steps.list", left, 0), note("in", "steps.list", right, 1)  # nested tensors of an argument
        y, z = self.steps["list"]([left, right])
        note("out", "steps.list", y, 0), note("out", "steps.list", z, 1)

        (
            note("in", "steps.mapping", z, 0),
            note("in", "steps.mapping", y, 1),
        )  # direct arguments before nested ones
        found = self.steps["mapping"]({"y": y}, z)
        y = note("out", "steps.mapping", found["y"], 1)
        note("out", "steps.mapping", found["other"], 2)

        note("in", "steps.data", y)
        y = note("out", "steps.data", self.steps["data"](y).hidden, 0)

        note("in", "steps.named", y)
        pair = self.steps["named"](y)
        note("out", "steps.named", pair.left, 0), note("out", "steps.named", pair.right, 1)

        note("in", "steps.output", pair.left)
        out = self.steps["output"](pair.left)
        y = note("out", "steps.output", out["logits"], 0)
        first, second = out["states"]
        note("out", "steps.output", first, 2), note("out", "steps.output", second, 3)

        note("in", "steps.nested", y, 0), note("in", "steps.nested", first, 1)
        one, (two, (three,)), four = self.steps["nested"](y, first)
        note("out", "steps.nested", one, 0), note("out", "steps.nested", four, 2)
        note("out", "steps.nested", two, 3), note("out", "steps.nested", three, 4)
        return note("out", "", one + two + three + four + pair.right + second)


def zoo() -> Zoo:
    torch.manual_seed(0)
    return Zoo()


def test_every_form_of_argument_and_result_has_the_numbers_of_msprobe():
    """An additional, missing or different row fails the test."""
    references = []

    def alone(model: nn.Module, step: int) -> torch.Tensor:
        references.append(Notes())
        return model(batch(step), references[-1]).mean()

    bare = train(zoo(), alone, STEPS, None, lr=1e-5)
    run = train(zoo(), lambda model, step: model(batch(step)).mean(), STEPS, EVERYTHING, lr=1e-5)

    assert 0 == run.faults
    assert [1, 2, 3] == list(run.rows)
    for step, notes in enumerate(references, 1):
        same(notes.tensors(), run.rows[step])
    assert equal_bits(bare, run)
    assert [] == run.notices


RECORDED = Path(__file__).parents[2] / "data/msprobe/single_rank"


def recorded_names() -> set[Key]:
    """Return the rows that msprobe wrote for the transformer's first step, except token ids and rows with only NaN."""
    names = set()
    for family, kinds in {"actv": ("act_in", "act_out"), "actv_grad": ("act_grad_in", "act_grad_out")}.items():
        (path,) = RECORDED.rglob(f"{family}_0-1.csv")
        for row in csv.DictReader(path.open()):
            module, slot, number = re.fullmatch(r"(.*)\.(input|output)(?:_(\d+))?", row["name"]).groups()
            if row["step"] == "0" and row["shape"] != "nan":
                index = None if number is None else int(number)
                names.add(Key(kinds[slot == "output"], module, index, int(row["micro_step"])))
    return names


def test_rows_have_the_names_and_numbers_of_msprobe_for_the_same_model():
    def loss(model: nn.Module, _step: int) -> torch.Tensor:
        value: torch.Tensor = model(torch.arange(32).view(4, 8)).square().mean()
        return value

    run = train(Transformer(), [loss, loss], 1, EVERYTHING)

    token_ids = {Key("act_in", module, None, micro) for module in ("", "embedding") for micro in range(2)}
    assert recorded_names() - token_ids == set(run.rows[1])
    assert len(run.rows[1]) > 150


class Indexed(nn.Module):
    """A model with integer arguments and results, as language models and routers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.pick = Picking()

    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) * mask[..., None] + positions[..., None]
        values, _ = self.pick(hidden, ids.to(torch.uint8))
        return values


class Picking(nn.Module):
    def forward(self, hidden: torch.Tensor, _pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = hidden.topk(2)
        return values, places


def indexed_loss(model: nn.Module, _step: int) -> torch.Tensor:
    ids = torch.arange(8).view(2, 4)
    loss: torch.Tensor = model(ids, mask=ids > 2, positions=ids.to(torch.int32)).square().mean()
    return loss


def test_integers_and_truth_values_are_not_measured_as_activations():
    """Token ids, masks, positions, images in bytes and indices keep their numbers, but have no row."""
    run = train(Indexed(), indexed_loss, 1, EVERYTHING)

    assert {
        "": {OUT, GRAD_OUT},
        "embed": {OUT, GRAD_OUT},
        "pick": {("act_in", 0), ("act_grad_in", 0), ("act_out", 0), ("act_grad_out", 0)},
    } == kinds_by_module(run)
    assert (0, []) == (run.faults, run.notices)


def test_integer_tensor_that_a_target_names_is_measured():
    run = train(Indexed(), indexed_loss, 1, {"targets": {"embed": {"input": "tensor", "output": "tensor"}}})

    assert {"embed": {IN, OUT}} == kinds_by_module(run)
    assert (0, []) == (run.faults, run.notices)


class Blocks(nn.Module):
    """Residual blocks with dropout and an activation in place; one of them is called twice."""

    def __init__(self, mode: str = "plain", *, inplace: bool = True) -> None:
        super().__init__()
        self.mode = mode
        make = lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace), nn.Dropout(0.3), nn.Linear(6, 6))  # noqa: E731
        self.first = make()
        self.shared = make()
        self.last = nn.Linear(6, 2)

    def block(self, name: str, x: torch.Tensor, note: Any, call: int | None) -> torch.Tensor:
        y = note("in", name, x, call=call)
        for number, layer in enumerate(getattr(self, name)):
            note("in", f"{name}.{number}", y, call=call)
            y = note("out", f"{name}.{number}", layer(y), call=call)
        return x + note("out", name, y, call=call)

    def run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        whole = lambda x: x + getattr(self, name)(x)  # noqa: E731
        if self.mode == "plain":
            return whole(x)
        result: torch.Tensor = checkpoint(whole, x, use_reentrant=self.mode == "reentrant")
        return result

    def forward(self, x: torch.Tensor, note: Any = None) -> torch.Tensor:
        if note is None:
            return self.last(self.run("shared", self.run("shared", self.run("first", x))))
        note("in", "", x)
        y = self.block("first", x, note, None)
        y = self.block("shared", self.block("shared", y, note, None), note, 1)
        note("in", "last", y)
        return note("out", "", note("out", "last", self.last(y)))


def blocks(mode: str = "plain", *, inplace: bool = True) -> Blocks:
    torch.manual_seed(0)
    return Blocks(mode, inplace=inplace)


def block_loss(micro: int, note: Any = None) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(100 * step + micro)  # of dropout
        x = batch(step, micro).requires_grad_()
        if note is None:
            return model(x).square().mean()
        note.micro_step = micro
        return model(x, note).square().mean()

    return loss


@pytest.fixture(scope="module")
def block_references() -> list[dict[Key, torch.Tensor]]:
    """The tensors of the blocks by step in two micro-batches, without checkpointing and in-place operations."""
    model, found = blocks(inplace=False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        notes = Notes()
        for micro in range(2):
            block_loss(micro, notes)(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(notes.tensors())
    return found


@pytest.mark.usual(1)
@pytest.mark.parametrize("mode", ["plain", "reentrant", "without reentrance"])
def test_recomputed_calls_are_measured_once_with_their_gradients(mode, block_references):
    """Micro-batches and calls of one module are separate; an overwritten input has its earlier statistics."""
    losses = [block_loss(0), block_loss(1)]
    bare = train(blocks(mode), losses, STEPS, None)
    run = train(blocks(mode), losses, STEPS, EVERYTHING)

    assert 0 == run.faults
    for step, expected in enumerate(block_references, 1):
        same(expected, run.rows[step])
    assert equal_bits(bare, run)
    assert [] == run.notices


def kinds_by_module(run: Run) -> dict[str, set[tuple[str, int | None]]]:
    found: dict[str, set[tuple[str, int | None]]] = {}
    for key in (key for rows in run.rows.values() for key in rows):
        found.setdefault(key.module, set()).add((key.kind, key.number))
    return found


def stack(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return nn.Sequential(*layers)


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step).requires_grad_()).square().mean()
    return loss


IN, OUT, GRAD_IN, GRAD_OUT = (("act_in", None), ("act_out", None), ("act_grad_in", None), ("act_grad_out", None))


@pytest.mark.usual(5)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"targets": ["0"]}, {"0": {IN, OUT, GRAD_IN, GRAD_OUT}}),
        ({"targets": ["[12]"], "outputs": False}, {"1": {IN, GRAD_IN, GRAD_OUT}, "2": {IN, GRAD_IN, GRAD_OUT}}),
        ({"targets": ["re:2|0"], "forward_only": True}, {"0": {IN, OUT}, "2": {IN, OUT}}),
        ({"targets": ["1"], "backward_only": True}, {"1": {GRAD_IN, GRAD_OUT}}),
        ({"targets": ["1"], "inputs": False, "input_grads": False}, {"1": {OUT, GRAD_OUT}}),
        ({"targets": {"1": {}}}, {"1": {IN, OUT, GRAD_IN, GRAD_OUT}}),
        ({"targets": {"1": {"output": "tensor", "output_grad": "tuple[1]:0"}}}, {"1": {OUT, GRAD_OUT}}),
        (
            {"targets": ["0", "1"], "parts": {"1": {"input": "list[1]:0"}}},
            {"0": {IN, OUT, GRAD_IN, GRAD_OUT}, "1": {IN}},
        ),
        (
            {"targets": {"1": {"output": "tensor"}}, "all_modules": True},
            {
                "": {IN, OUT, GRAD_IN, GRAD_OUT},
                "0": {IN, OUT, GRAD_IN, GRAD_OUT},
                "1": {OUT},
                "2": {IN, OUT, GRAD_IN, GRAD_OUT},
            },
        ),
        ({"targets": {"1": {"input": "tensor", "input_grad": "tensor"}}, "forward_only": True}, {"1": {IN}}),
    ],
)
def test_targets_and_switches_select_the_measured_tensors(options, expected):
    """A selected module is measured as its target specifies; with all_modules, all others are measured completely."""
    run = train(stack(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), plain_loss, 2, options)

    assert expected == kinds_by_module(run)
    assert (0, []) == (run.faults, run.notices)


@pytest.mark.usual(4)
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"steps.tuple": {"output": "tuple[3]:2", "output_grad": "tuple[3]:0"}}, {("act_out", 2), ("act_grad_out", 0)}),
        ({"steps.tensor": {"input": "list[3]:1", "input_grad": "list[3]:1"}}, {("act_in", 1), ("act_grad_in", 1)}),
        ({"steps.tensor": {"input": "tuple[5]:0", "output": "tensor"}}, {("act_in", 0), ("act_out", None)}),
        ({"steps.tensor": {"input": "dict:mask"}}, {("act_in", 2)}),
        ({"steps.output": {"output": "dict:states"}}, {("act_out", 2), ("act_out", 3)}),
        ({"steps.nested": {"output": "tuple[3]:1"}}, {("act_out", 3), ("act_out", 4)}),
        ({"steps.named": {"output": "tuple[2]"}}, {("act_out", 0), ("act_out", 1)}),
        ({"steps.data": {"output": "dict:hidden"}}, {("act_out", 0)}),
    ],
)
def test_only_the_selected_part_of_an_object_is_measured(parts, expected):
    run = train(zoo(), lambda model, step: model(batch(step)).mean(), 1, {"targets": parts})

    assert {next(iter(parts)): expected} == kinds_by_module(run)
    assert [] == run.notices


def test_missing_part_is_reported_once_and_has_no_row():
    targets = {"1": {"input": "tuple[2]:0", "output": "tensor", "output_grad": "dict:logits"}}
    run = train(stack(nn.Linear(6, 6), nn.Tanh()), plain_loss, 3, {"targets": targets})

    assert {"1": {OUT}} == kinds_by_module(run)
    assert [
        "activations: 1: input has 1 tensors in 1 elements, which does not match pattern 'tuple[2]:0' of its target",
        "activations: 1: output has 1 tensors in 1 elements, which does not match pattern 'dict:logits' of its target",
    ] == run.notices


def test_forward_only_with_backward_only_measures_nothing_and_is_reported():
    run = train(stack(nn.Linear(6, 6)), plain_loss, 2, {"forward_only": True, "backward_only": True})

    assert {} == run.rows
    assert ["activations: forward_only and backward_only exclude each other; nothing is measured"] == run.notices


def test_notice_about_unmatched_target_names_the_nearest_modules():
    run = train(zoo(), lambda model, step: model(batch(step)).mean(), 1, {"targets": ["embed", "steps.tupel", "x"]})

    assert {"embed"} == kinds_by_module(run).keys()
    assert [
        "activations: target 'steps.tupel' matches no module; nearest: steps.tuple, steps.tensor, steps.output",
        "activations: target 'x' matches no module",
    ] == run.notices


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"targets": {"head": {"input": "tuple[2]:2"}}}, "element 2 of 2 does not exist"),
        (
            {"targets": {"head": {"input": "garbage"}}},
            "does not select an element of an argument or result: write 'tensor', 'tuple",
        ),
        ({"targets": {"head": {"inputs": "tensor"}}}, "'inputs' is unknown; valid names are input, output, input_grad"),
        ({"targets": {"head": "tensor"}}, "must be a table of input, output"),
        ({"targets": ["a"], "parts": {"b": {}}}, "is not in targets: add 'b' to targets"),
        ({"parts": ["a"]}, "parts must be a table of tables"),
        ({"inputs": 1}, "inputs must be true or false"),
        (
            {"inputs": False, "outputs": False, "input_grads": False, "output_grads": False},
            "set one of them to true",
        ),
        ({"all_module": True}, r"Did you mean options\.activations\.all_modules"),
    ],
)
def test_invalid_options_are_rejected(options, text):
    with pytest.raises(ConfigError, match=text):
        MonitorConfig(quantities=("activations",), options={"activations": options})


def test_evaluations_are_not_measured_but_modules_in_eval_mode_are():
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.no_grad():
            model.eval()(batch(99))
        model.train()
        model[1].eval()
        return plain_loss(model, step)

    run = train(stack(nn.Linear(6, 6), nn.Dropout(0.5)), loss, 2, EVERYTHING)
    still = train(stack(nn.Linear(6, 6), nn.Dropout(0.0)), plain_loss, 2, EVERYTHING)

    assert still.rows == run.rows


class Odd(nn.Module):
    """Objects without statistics, and objects with unusual behaviour."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.silent = nn.Linear(2, 2)
        self.nested = nn.Identity()
        self.packed = nn.Identity()
        self.cache = nn.Identity()
        self.mapped = nn.Linear(6, 6)
        self.empty = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.nested(torch.nested.nested_tensor([x[0], x[1, :2]]))
        self.packed(torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8))
        self.cache(Evil())
        self.empty(7)
        return self.linear(x) + torch.vmap(self.mapped)(x)


class Evil:
    """A custom object of the model."""


def test_unmeasurable_tensor_is_reported_once_and_has_no_row():
    torch.manual_seed(0)
    run = train(Odd(), plain_loss, 3, EVERYTHING)

    assert 0 == run.faults
    assert {"", "linear"} == kinds_by_module(run).keys()
    notices = set(run.notices)
    assert len(notices) == len(run.notices)
    assert {
        "activations: nested: input is a nested tensor",
        "activations: packed: input[0] is packed or quantized (qint8)",
        "activations: cache: input contains an object that is not searched for tensors: Evil",
        "activations: mapped: input[0] is inside of a functorch transform",
        "activations: silent: was not called in a forward of the model, so it has no activations",
    } <= {message.replace("nested: input[0]", "nested: input") for message in notices}


class Explosive(dict):  # type: ignore[type-arg]  # any dict
    """A result that raises when it is read."""

    def items(self) -> Any:
        raise RuntimeError("no")


class Careless(nn.Module):
    """A module that returns such a result, and raises in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.wrap = nn.Identity()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = dict.__getitem__(self.wrap(Explosive(y=self.linear(x), z=x)), "y")
        if self.fails:
            raise ValueError("the model's own")
        return y


def test_failing_hook_or_module_loses_only_its_own_rows():
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        model.fails = step == 2  # type: ignore[assignment]  # a plain attribute
        if step == 2:
            with pytest.raises(ValueError, match="the model's own"):
                model(batch(step))
            model.fails = False  # type: ignore[assignment]  # see above
        return plain_loss(model, step)

    torch.manual_seed(0)
    bare = train(model := Careless(), loss, 3, None)
    torch.manual_seed(0)
    run = train(model := Careless(), loss, 3, EVERYTHING)

    assert equal_bits(bare, run)
    assert run.faults > 0
    assert {"", "linear"} == kinds_by_module(run).keys()
    assert run.rows[1].keys() == run.rows[3].keys()
    assert [] == [hook for module in model.modules() for hook in module._forward_hooks]


def test_view_written_in_place_is_harmless_and_its_lost_gradient_is_reported():
    """A linear layer over three dimensions returns a view; an in-place write removes its earlier gradient."""
    make = lambda: stack(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))  # noqa: E731 - twins
    loss = lambda model, step: model(batch(step)[None]).square().mean()  # noqa: E731 - one for both
    bare, run = train(make(), loss, 2, None), train(make(), loss, 2, EVERYTHING)

    assert equal_bits(bare, run)
    assert {IN, OUT} == kinds_by_module(run)["0"]
    assert {IN, OUT, GRAD_OUT} == kinds_by_module(run)["1"]
    assert [
        "activations: 0: output is a view that was written in place: its gradient before the write is not measured",
        "activations: 1: input is a view that was written in place: its gradient before the write is not measured",
    ] == run.notices


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tensors in each call of the kernel."""
    counts: list[int] = []
    measure = MeasureGroup.measure

    def counted(self: Any, tensors: Any, table: Any) -> None:
        counts.append(len(tensors))
        measure(self, tensors, table)

    monkeypatch.setattr(MeasureGroup, "measure", counted)
    return counts


def test_recomputed_tensor_is_read_once(measured):
    counts = []
    for mode in ("plain", "reentrant", "without reentrance"):
        train(blocks(mode), block_loss(0), 1, {"forward_only": True})
        counts.append(sum(measured))
        measured.clear()

    assert counts[0] > 10
    # The end of the first computation of a part and the beginning of the next are then two tensors.
    assert [counts[0], counts[0], counts[0]] == counts


class Student(nn.Module):
    """Part of the model runs without gradients, on a tensor that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.linear = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = self.teacher(x)
        return self.linear(x) - aim


def test_module_without_gradients_has_no_gradient_rows():
    torch.manual_seed(0)
    found = kinds_by_module(train(Student(), plain_loss, 2, EVERYTHING))

    assert {IN, OUT} == found["teacher"]
    assert {IN, OUT, GRAD_IN, GRAD_OUT} == found["linear"]


def test_without_optimizer_next_step_releases_tensors_of_the_last_step():
    net = stack(nn.Linear(6, 6))
    config = MonitorConfig(quantities=("activations",), console=False, exit_wait_seconds=0)
    x = batch(1).requires_grad_()
    with Monitor(config).attach(net) as monitor:
        counts = []
        for _ in range(3):
            loss = net(x).sum()
            counts.append(len(x._backward_hooks))
            loss.backward()
            monitor.end_step()

    assert [1, 1, 1] == counts
    assert not x._backward_hooks


def test_tensor_passed_through_several_modules_is_measured_once(measured):
    run = train(stack(nn.Linear(6, 6), nn.Identity(), nn.Identity()), plain_loss, 1, EVERYTHING)

    assert 8 * 2 == len(run.rows[1])
    assert 4 == sum(measured)  # the input, the layer's output, and their gradients


def test_unsampled_steps_register_no_tensor_hooks():
    inputs = {}

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        inputs[step] = batch(step).requires_grad_()
        value: torch.Tensor = model(inputs[step]).sum()
        inputs[step, "hooks"] = len(inputs[step]._backward_hooks or ())
        return value

    run = train(stack(nn.Linear(6, 6)), loss, 6, {"every": 3})

    assert [1, 4] == [step for step, rows in run.rows.items() if rows]
    assert {1: 1, 2: 0, 3: 0, 4: 1, 5: 0, 6: 0} == {step: inputs[step, "hooks"] for step in range(1, 7)}
    assert [0] * 6 == [len(inputs[step]._backward_hooks or ()) for step in range(1, 7)]


def test_detach_in_the_middle_of_a_step_leaves_no_hooks():
    net = stack(nn.Linear(6, 6), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = MonitorConfig(quantities=("activations",), console=False, exit_wait_seconds=0)
    monitor = Monitor(config).attach(net, optimizer)
    x = batch(1).requires_grad_()
    loss = net(x).sum()
    monitor.detach()
    loss.backward()

    assert not x._backward_hooks
    for module in net.modules():
        assert {} == {**module._forward_hooks, **module._forward_pre_hooks}
        assert {} == {**module._forward_hooks_with_kwargs, **module._forward_pre_hooks_with_kwargs}
    assert 0 == monitor.faults


def test_alert_counters_exist_before_the_first_step():
    net = stack(nn.Linear(6, 6))
    settings = {"quantities": ("activations",), "options": {"activations": {"forward_only": True}}}
    with Monitor(MonitorConfig(**settings, console=False, exit_wait_seconds=0)).attach(net) as monitor:
        page = urllib.request.urlopen(f"{monitor.address}/metrics", timeout=10).read().decode()

    counters = {line for line in page.splitlines() if line.startswith("rankscope_anomaly_events_total")}
    assert {True} == {line.endswith(" 0.0") for line in counters}
    for kind in ("act_in", "act_out"):
        assert any(f'kind="{kind}"' in line for line in counters)
    assert not any("act_grad" in line for line in counters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_neither_statistics_nor_training(dtype):
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast(torch.get_default_device().type, dtype=dtype):
            return model(batch(step).requires_grad_()).float().square().mean()

    def make() -> nn.Module:
        return stack(nn.Linear(6, 64), nn.ReLU(inplace=True), nn.Linear(64, 2))

    bare, run = train(make(), loss, 3, None), train(make(), loss, 3, EVERYTHING)
    with torch.autocast(torch.get_default_device().type, dtype=dtype):
        half = make()[0](batch(1)).detach()

    assert equal_bits(bare, run)
    assert (0, []) == (run.faults, run.notices)
    key = Key("act_out", "0")
    assert dtype == half.dtype
    same({key: half}, {key: run.rows[1][key]})


class Replicated(nn.Module):
    """Calls a replica of one of its modules, which shares its hooks, as DataParallel does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = copy.copy(self.linear)(x)
        return result


def test_dataparallel_replicas_are_reported_and_not_measured():
    run = train(Replicated(), plain_loss, 2, EVERYTHING)

    assert {""} == kinds_by_module(run).keys()
    assert ["activations: linear: runs as replicas of DataParallel, which are not measured"] == run.notices


def test_copy_of_the_model_is_not_measured():
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        twin = copy.deepcopy(model)
        twin(batch(50)).sum().backward()
        return plain_loss(model, step)

    make = lambda: stack(nn.Linear(6, 6), nn.Tanh())  # noqa: E731 - twins
    alone = train(make(), plain_loss, 2, EVERYTHING)

    assert alone.rows == train(make(), loss, 2, EVERYTHING).rows


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_measures_nothing():
    net = stack(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = MonitorConfig(quantities=("activations",), console=False, exit_wait_seconds=0)
    with Monitor(config).attach(net, optimizer) as monitor:
        net(batch(1)).sum().backward()
        child = os.fork()
        if not child:
            x = batch(2).requires_grad_()
            net(x)
            os._exit(0 if not x._backward_hooks and monitor.faults == 0 else 1)

        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules_are_reported_and_no_graph_is_compiled_twice(whole):
    """A compiled module is measured from outside, its parts are not, and the gate triggers no compilation."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def make() -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        model = nn.Sequential(inner, nn.Linear(6, 2))
        if whole:
            return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]  # a module
        model[0] = torch.compile(inner, backend=backend, fullgraph=True)
        return model

    bare = train(make(), plain_loss, 5, None)
    without = len(graphs)
    torch._dynamo.reset()
    graphs.clear()
    run = train(make(), plain_loss, 5, {"every": 2})

    assert without == len(graphs) == 1
    assert equal_bits(bare, run)
    visible = {""} if whole else {"", "0", "1"}
    assert visible == kinds_by_module(run).keys()
    inside = "0, 0.0, 0.1 and 1 more" if whole else "0.0, 0.1"
    assert [f"activations: {inside}: is part of compiled code, so it has no activations"] == run.notices


def test_modules_inside_a_compiled_wrapper_are_reported_as_compiled():
    """`torch.compile(DDP(model))`: hooks of the user's outermost module run, those of its modules are compiled."""
    torch._dynamo.reset()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 2)))
        run = train(torch.compile(ddp, backend="eager"), plain_loss, 2, {})  # type: ignore[arg-type]  # a module
    finally:
        torch.distributed.destroy_process_group()

    assert {""} == kinds_by_module(run).keys()
    assert ["activations: 0: is part of compiled code, so it has no activations"] == run.notices
