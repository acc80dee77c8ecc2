"""Activations and their gradients, compared with tensors that the model records in a run without a monitor."""

import copy
import csv
import re
import urllib.request
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from tests.exporter.measure.quantities.test_structure import Transformer
from tests.exporter.measure.quantities.trainings import Composed, Key, Notes, equal_bits, nothing, same, stack, train
from tests.exporter.parts import config_of, hooks_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankscope_exporter import Monitor
from rankscope_exporter.adapters.pytree import Found, received, returned
from rankscope_exporter.measure.quantities import activations

STEPS = 3
IN, OUT, GRAD_IN, GRAD_OUT = (("act_in", None), ("act_out", None), ("act_grad_in", None), ("act_grad_out", None))
ALL = {IN, OUT, GRAD_IN, GRAD_OUT}


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
        def call(form: str, given: dict[int | None, Any], *args: Any, **kwargs: Any) -> Any:
            for number, tensor in given.items():
                note("in", f"steps.{form}", tensor, number)
            return self.steps[form](*args, **kwargs)

        def noted(form: str, tensors: dict[int | None, torch.Tensor]) -> list[torch.Tensor]:
            return [note("out", f"steps.{form}", tensor, number) for number, tensor in tensors.items()]

        note("in", "", x)
        ids = note("in", "embed", (x.abs() * 2).long().clamp(max=8)[:, 0])
        table = note("out", "embed", self.embed(ids))
        mask = torch.ones(3, dtype=torch.bool)
        # Two positional tensors, one keyword tensor, and arguments without tensors between them.
        y = call("tensor", {0: x, 1: table, 2: mask}, x, None, table, scale=2.0, mask=mask)
        (y,) = noted("tensor", {None: y})
        (y,) = noted("single", {None: call("single", {None: y}, x=y)[0]})
        left, _, right = call("tuple", {None: y}, y)
        left, right = noted("tuple", {0: left, 2: right})
        y, z = noted("list", dict(enumerate(call("list", {0: left, 1: right}, [left, right]))))  # nested in an argument
        found = call("mapping", {0: z, 1: y}, {"y": y}, z)  # direct arguments before nested ones
        y, _ = noted("mapping", {1: found["y"], 2: found["other"]})
        (y,) = noted("data", {0: call("data", {None: y}, y).hidden})
        pair = call("named", {None: y}, y)
        left, right = noted("named", {0: pair.left, 1: pair.right})
        out = call("output", {None: left}, left)
        y, first, second = noted("output", {0: out["logits"], 2: out["states"][0], 3: out["states"][1]})
        one, (two, (three,)), four = call("nested", {0: y, 1: first}, y, first)
        one, four, two, three = noted("nested", {0: one, 2: four, 3: two, 4: three})
        return note("out", "", one + two + three + four + right + second)


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
    run = train(zoo(), lambda model, step: model(batch(step)).mean(), STEPS, lr=1e-5)

    assert 0 == run.faults
    assert [1, 2, 3] == list(run.rows)
    for step, notes in enumerate(references, 1):
        same(notes.tensors(), run.rows[step])
    assert equal_bits(bare, run)
    assert [] == run.notices


RECORDED = Path(__file__).parents[3] / "data/msprobe/single_rank"


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
        return model(torch.arange(32).view(4, 8)).square().mean()

    run = train(Transformer(), [loss, loss], 1)

    token_ids = {Key("act_in", module, None, micro) for module in ("", "embedding") for micro in range(2)}
    assert recorded_names() - token_ids == set(run.rows[1])
    assert len(run.rows[1]) > 150


def indexed() -> nn.Module:
    """Return a model with integer arguments and results, as language models and routers have them."""

    def forward(net: Any, ids: torch.Tensor, *, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return net.pick(net.embed(ids) * mask[..., None] + positions[..., None], ids.to(torch.uint8))[0]

    pick = Composed(lambda _net, hidden, _pixels: tuple(hidden.topk(2)))
    return Composed(forward, embed=nn.Embedding(9, 6), pick=pick)


def indexed_loss(model: nn.Module, _step: int) -> torch.Tensor:
    ids = torch.arange(8).view(2, 4)
    return model(ids, mask=ids > 2, positions=ids.to(torch.int32)).square().mean()


def test_integers_and_truth_values_are_measured_only_if_a_target_names_them():
    """Token ids, masks, positions, images in bytes and indices keep their numbers, but have no row."""
    run = train(indexed(), indexed_loss, 1)
    named = train(indexed(), indexed_loss, 1, {"targets": {"embed": {"input": "tensor", "output": "tensor"}}})

    assert {
        "": {OUT, GRAD_OUT},
        "embed": {OUT, GRAD_OUT},
        "pick": {("act_in", 0), ("act_grad_in", 0), ("act_out", 0), ("act_grad_out", 0)},
    } == run.kinds_by_module()
    assert {"embed": {IN, OUT}} == named.kinds_by_module()
    assert (0, [], 0, []) == (run.faults, run.notices, named.faults, named.notices)


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
        return checkpoint(whole, x, use_reentrant=self.mode == "reentrant")

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
    run = train(blocks(mode), losses, STEPS)

    assert 0 == run.faults
    for step, expected in enumerate(block_references, 1):
        same(expected, run.rows[step])
    assert equal_bits(bare, run)
    assert [] == run.notices


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step).requires_grad_()).square().mean()


@pytest.mark.usual(5)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"targets": ["[12]"], "outputs": False}, {"1": {IN, GRAD_IN, GRAD_OUT}, "2": {IN, GRAD_IN, GRAD_OUT}}),
        ({"targets": ["re:2|0"], "forward_only": True}, {"0": {IN, OUT}, "2": {IN, OUT}}),
        ({"targets": ["1"], "backward_only": True}, {"1": {GRAD_IN, GRAD_OUT}}),
        ({"targets": ["1"], "inputs": False, "input_grads": False}, {"1": {OUT, GRAD_OUT}}),
        ({"targets": {"1": {}}}, {"1": ALL}),
        ({"targets": {"1": {"output": "tensor", "output_grad": "tuple[1]:0"}}}, {"1": {OUT, GRAD_OUT}}),
        ({"targets": ["0", "1"], "parts": {"1": {"input": "list[1]:0"}}}, {"0": ALL, "1": {IN}}),
        ({"targets": {"1": {"output": "tensor"}}, "all_modules": True}, {"": ALL, "0": ALL, "1": {OUT}, "2": ALL}),
        ({"targets": {"1": {"input": "tensor", "input_grad": "tensor"}}, "forward_only": True}, {"1": {IN}}),
    ],
)
def test_targets_and_switches_select_the_measured_tensors(options, expected):
    """A selected module is measured as its target specifies; with all_modules, all others are measured completely."""
    run = train(stack(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), plain_loss, 2, options)

    assert expected == run.kinds_by_module()
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

    assert {next(iter(parts)): expected} == run.kinds_by_module()
    assert [] == run.notices


@pytest.mark.parametrize(
    ("options", "modules", "notices"),
    [
        (
            {"targets": {"steps.single": {"input": "tuple[2]:0", "output": "tensor", "output_grad": "dict:logits"}}},
            {"steps.single"},
            [
                f"steps.single: {slot} has 1 tensors in 1 elements, which does not match pattern '{part}' of its target"
                for slot, part in (("input", "tuple[2]:0"), ("output", "dict:logits"))
            ],
        ),
        (
            {"targets": ["embed", "steps.tupel", "x"]},
            {"embed"},
            [
                "target 'steps.tupel' matches no module; nearest: steps.tuple, steps.tensor, steps.output",
                "target 'x' matches no module",
            ],
        ),
        (
            {"forward_only": True, "backward_only": True},
            set(),
            ["forward_only and backward_only exclude each other; nothing is measured"],
        ),
    ],
    ids=["missing parts", "unmatched targets", "both directions excluded"],
)
def test_selection_without_effect_is_reported_once_and_has_no_row(options, modules, notices):
    run = train(zoo(), lambda model, step: model(batch(step)).mean(), 3, options)

    assert modules == run.kinds_by_module().keys()
    assert [f"activations: {notice}" for notice in notices] == run.notices


def test_evaluations_are_not_measured_but_modules_in_eval_mode_are():
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.no_grad():
            model.eval()(batch(99))
        model.train()
        model[1].eval()
        return plain_loss(model, step)

    run = train(stack(nn.Linear(6, 6), nn.Dropout(0.5)), loss, 2)
    still = train(stack(nn.Linear(6, 6), nn.Dropout(0.0)), plain_loss, 2)

    assert still.rows == run.rows


def test_unmeasurable_tensor_is_reported_once_and_has_no_row():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.nested(torch.nested.nested_tensor([x[0], x[1, :2]]))
        net.packed(torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8))
        net.cache(object())
        net.empty(7)
        return net.linear(x) + torch.vmap(net.mapped)(x)

    modules = {name: nn.Identity() for name in ("nested", "packed", "cache", "empty")}
    modules |= {name: nn.Linear(6, 6) for name in ("linear", "mapped", "silent")}
    run = train(Composed(forward, **modules), plain_loss, 3)

    assert 0 == run.faults
    assert {"", "linear"} == run.kinds_by_module().keys()
    assert {
        "activations: nested: input is a nested tensor",
        "activations: packed: input[0] is packed or quantized (qint8)",
        "activations: cache: input contains an object that is not searched for tensors: object",
        "activations: mapped: input[0] is inside of a functorch transform",
        "activations: silent: was not called in a forward of the model, so it has no activations",
    } <= {message.replace("nested: input[0]", "nested: input") for message in run.notices}
    assert len(set(run.notices)) == len(run.notices)


class Explosive:
    """Any code of a container of the script."""

    def _raises(self, *_: Any) -> Any:
        raise RuntimeError("no")

    items = keys = __iter__ = __getitem__ = __len__ = __getattr__ = _raises


class Fields(Explosive, dict):  # type: ignore[type-arg,misc]  # any dict
    pass


class Items(Explosive, list):  # type: ignore[type-arg,misc]  # any list
    pass


class Lazy(Explosive, Mapping):  # type: ignore[type-arg]  # any mapping
    pass


@dataclass(slots=True)
class Slotted:
    hidden: torch.Tensor


def test_containers_are_searched_without_code_of_their_classes():
    x = torch.ones(1)
    found = received((Fields(x=x), Items([x]), UserDict(x=x), Slotted(x), Answer(x), Lazy()), {})

    assert ["[0].x", "[1][0]", "[2].x", "[3].hidden", "[4].hidden"] == [slot.path for slot in found.slots]
    assert ("Lazy",) == found.unknown


def test_failing_hook_or_module_loses_only_its_own_rows(monkeypatch):
    """The hook of a module fails, and the model raises in one step."""

    def failing(output: Any) -> Found:
        return returned(output) if isinstance(output, torch.Tensor) else output["no"]  # type: ignore[no-any-return]

    def forward(net: Any, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        y: torch.Tensor = net.wrap({"y": net.linear(x), "z": x})["y"]
        if fails:
            raise ValueError("the model's own")
        return y

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        if step == 2:
            with pytest.raises(ValueError, match="the model's own"):
                model(batch(step), fails=True)
        return plain_loss(model, step)

    monkeypatch.setattr(activations, "returned", failing)
    twins = [Composed(forward, linear=nn.Linear(6, 6), wrap=nn.Identity()) for _ in range(2)]
    bare, run = train(twins[0], loss, 3, None), train(twins[1], loss, 3)

    assert equal_bits(bare, run)
    assert run.faults > 0
    assert {"act_in", "act_grad_in"} == {kind for kind, _ in run.kinds_by_module()["wrap"]}
    assert ALL == run.kinds_by_module()["linear"]
    assert run.rows[1].keys() == run.rows[3].keys()
    assert [] == [hook for module in twins[1].modules() for hook in module._forward_hooks]


def test_view_written_in_place_is_harmless_and_its_lost_gradient_is_reported():
    """A linear layer over three dimensions returns a view; an in-place write removes its earlier gradient."""
    make = lambda: stack(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))  # noqa: E731 - twins
    loss = lambda model, step: model(batch(step)[None]).square().mean()  # noqa: E731 - one for both
    bare, run = train(make(), loss, 2, None), train(make(), loss, 2)

    assert equal_bits(bare, run)
    assert {IN, OUT} == run.kinds_by_module()["0"]
    assert {IN, OUT, GRAD_OUT} == run.kinds_by_module()["1"]
    assert [
        "activations: 0: output is a view that was written in place: its gradient before the write is not measured",
        "activations: 1: input is a view that was written in place: its gradient before the write is not measured",
    ] == run.notices


def test_module_without_gradients_has_no_gradient_rows():
    """Part of the model runs without gradients, on a tensor that has them."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = net.teacher(x)
        return net.linear(x) - aim

    student = Composed(forward, teacher=nn.Linear(6, 6), linear=nn.Linear(6, 6))

    assert {"": ALL, "teacher": {IN, OUT}, "linear": ALL} == train(student, plain_loss, 2).kinds_by_module()


def test_detach_in_the_middle_of_a_step_leaves_no_hooks():
    net = stack(nn.Linear(6, 6), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor(config_of("activations")).attach(net, optimizer)
    x = batch(1).requires_grad_()
    loss = net(x).sum()
    monitor.detach()
    loss.backward()

    assert not x._backward_hooks
    assert (0, 0) == (hooks_of(net, optimizer), monitor.faults)
    assert not any(module._forward_hooks_with_kwargs or module._forward_pre_hooks_with_kwargs for module in net)


def test_alert_counters_exist_before_the_first_step():
    options = {"activations": {"forward_only": True}}
    with Monitor(config_of("activations", options=options)).attach(stack(nn.Linear(6, 6))) as monitor:
        page = urllib.request.urlopen(f"{monitor.address}/metrics", timeout=10).read().decode()

    counters = [line for line in page.splitlines() if line.startswith("rankscope_anomaly_events_total")]
    assert all(line.endswith(" 0.0") for line in counters)
    assert {"act_in", "act_out"} == {kind for kind in re.findall('kind="([^"]*)"', str(counters)) if "act_" in kind}


def test_autocast_changes_neither_statistics_nor_training():
    def autocast() -> Any:
        return torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with autocast():
            return model(batch(step).requires_grad_()).float().square().mean()

    def make() -> nn.Module:
        return stack(nn.Linear(6, 64), nn.ReLU(inplace=True), nn.Linear(64, 2))

    bare, run = train(make(), loss, 3, None), train(make(), loss, 3)
    with autocast():
        half = make()[0](batch(1)).detach()

    assert equal_bits(bare, run)
    assert (0, []) == (run.faults, run.notices)
    assert torch.bfloat16 == half.dtype
    same({(key := Key("act_out", "0")): half}, {key: run.rows[1][key]})


def test_dataparallel_replicas_are_reported_and_not_measured():
    """A replica of a module shares its hooks."""
    run = train(Composed(lambda net, x: copy.copy(net.linear)(x), linear=nn.Linear(6, 6)), plain_loss, 2)

    assert {""} == run.kinds_by_module().keys()
    assert [
        "activations: linear: runs as copies, such as replicas of DataParallel, which are not measured"
    ] == run.notices


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
    assert visible == run.kinds_by_module().keys()
    inside = "0, 0.0, 0.1 and 1 more" if whole else "0.0, 0.1"
    assert [f"activations: {inside}: is part of compiled code, so it has no activations"] == run.notices


def test_modules_inside_a_compiled_wrapper_are_reported_as_compiled(group):
    """`torch.compile(DDP(model))`: hooks of the user's outermost module run, those of its modules are compiled."""
    torch._dynamo.reset()
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 2)))
    run = train(torch.compile(ddp, backend="eager"), plain_loss, 2, {})  # type: ignore[arg-type]  # a module

    assert {""} == run.kinds_by_module().keys()
    assert ["activations: 0: is part of compiled code, so it has no activations"] == run.notices
