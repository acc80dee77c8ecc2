"""Steps that are not sampled and the removal of their hooks, and tensors without computable statistics."""

import gc
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import pytest
import torch
from tests.exporter.parts import Published, config_of, hooks_of, published, small, train
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter import Monitor
from rankscope_exporter.measure.kernels.isolation import FAILURES_IN_A_ROW, LEFT_OUT_STEPS, Isolation
from rankscope_exporter.measure.kernels.statistics_table import StatisticsTable
from rankscope_exporter.measure.table import StepTable, Table
from rankscope_exporter.records.plan import EVERY_OP, ParameterEntries


def rows_by_step(found: Published) -> dict[int, set[tuple[str, str, int | None]]]:
    rows: dict[int, set[tuple[str, str, int | None]]] = {}
    for row in found.rows:
        rows.setdefault(row.step, set()).add((row.entry.kind, row.entry.tensor, row.entry.micro_step))
    return rows


def calls_of_ours(function: Callable[[], None]) -> Counter[str]:
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and f"{os.sep}rankscope_exporter{os.sep}" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def hooked_parameters(net: nn.Module) -> list[str]:
    return [name for name, item in net.named_parameters() if item._post_accumulate_grad_hooks or item._backward_hooks]


EVERYTHING = ("parameters", "gradients", "micro_gradients", "optimizer_state", "activations", "structure", "linear")


def test_unsampled_step_costs_the_same_for_all_model_sizes():
    counts = []
    for layers in (2, 20):
        net = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(3, 3), nn.Tanh())))
        optimizer = torch.optim.Adam(net.parameters())
        with Monitor(config_of(*EVERYTHING, every=100)).attach(net, optimizer) as monitor:
            train(net, optimizer, steps=2)
            counts.append(calls_of_ours(lambda net=net, optimizer=optimizer: train(net, optimizer)))
            assert 0 == monitor.faults
            assert [f"{2 * layers - 2}.bias"] == hooked_parameters(net)
            assert 0 == sum(hooks_of(module) for module in net)

    assert counts[0] == counts[1]
    assert counts[0].total() < 300, counts[0]  # about 25 µs


def test_every_sampled_step_has_all_rows():
    net, optimizer = small()
    with Monitor(config_of(*EVERYTHING, every=3)).attach(net, optimizer) as monitor:
        train(net, optimizer, steps=7)
        found = published(monitor)
        assert 0 == monitor.faults

    seen = rows_by_step(found)
    assert {1, 4, 7} == seen.keys() == {row["step"] for row in found.of("features")}
    assert seen[1] == seen[4] == seen[7]
    assert 5 * 4 + 14 == len(seen[1])  # rows of parameters, and of modules and the model without gradients of the batch


class TwoHeads(nn.Module):
    """A model that trains one of two independent heads at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return self.get_submodule(head)(x)


def test_backward_pass_through_unmeasured_parameters_is_detected():
    """A skipped step is detected although no step with its head is sampled."""
    net = TwoHeads()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    skipped = {2, 4, 5, 6}
    with Monitor(config_of("gradients", every=100)).attach(net, optimizer) as monitor:
        for step, head in enumerate(["left", "right", "right", "left", "right", "left", "right"], start=1):
            net(torch.ones(1, 3), head).sum().backward()
            if step not in skipped:
                optimizer.step()
            optimizer.zero_grad()
        found = published(monitor)
        assert sorted(["left.bias", "right.bias"]) == sorted(hooked_parameters(net))

    assert skipped == {r.step for r in found.records for event in r.events if event.type == "step_skipped"}


def test_steps_that_begin_in_a_backward_pass_keep_gradient_hooks():
    """If the whole model is never called, a step begins with its first gradient. The others follow immediately."""
    net, optimizer = small()
    with Monitor(config_of("gradients", every=3)).attach(net, optimizer) as monitor:
        for _ in range(7):
            x = torch.ones(2, 3)
            for layer in net:
                x = layer(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        norms = published(monitor).norms("grad_unreduced")

    assert {(step, name) for step in (1, 4, 7) for name, _ in net.named_parameters()} == norms.keys()


@pytest.mark.parametrize("compiled_first", [True, False])
def test_transient_hooks_cause_no_recompilation(compiled_first):
    torch._dynamo.reset()
    net, optimizer = small()
    graphs = CompileCounterWithBackend("aot_eager")
    config = config_of("gradients", "micro_gradients", "activations", every=2)
    model = torch.compile(net, backend=graphs) if compiled_first else net
    with Monitor(config).attach(model, optimizer) as monitor:
        model = model if compiled_first else torch.compile(net, backend=graphs)
        train(model, optimizer)
        made = graphs.frame_count
        train(model, optimizer, 5)
        assert 0 == monitor.faults
    torch._dynamo.reset()

    assert made == graphs.frame_count > 0


@pytest.mark.parametrize("quantity", ["structure", "activations"])
def test_module_hooks_are_removed_after_the_last_sampled_step(quantity):
    net, optimizer = small()
    config = config_of("parameters", quantity, options={quantity: {"times": 1}})
    with Monitor(config).attach(net, optimizer) as monitor:
        hooked = hooks_of(net)
        train(net, optimizer, 2)
        bare = hooks_of(net)
        train(net, optimizer)
        found = published(monitor)
        structure = monitor.structure()
        assert 0 == monitor.faults

    assert bare < hooked
    assert bare <= 2  # hooks on begin and end of the forward pass
    kinds = {step: {kind for kind, *_ in rows} for step, rows in rows_by_step(found).items()}
    assert {1} == {row["step"] for row in found.of("modules")} | {step for step in kinds if "act_out" in kinds[step]}
    assert [1, 2, 3] == [step for step in kinds if "param_after" in kinds[step]]
    assert ("Linear" in structure) == (quantity == "structure")


class Codes(torch.Tensor):
    """A wrapper of integer codes that knows few operations, as the weights and moments of torchao."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Codes(args[0].codes)
        raise NotImplementedError(f"Codes has no {func}")


class Adapted(nn.Module):
    def __init__(self, base: nn.Parameter) -> None:
        super().__init__()
        self.base = base
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


Step = Callable[..., None]
PLAIN = {"first.weight", "first.bias", "last.weight", "last.bias"}


@contextmanager
def trained(base: torch.Tensor, *quantities: str, **options: Any) -> Iterator[tuple[nn.Module, Monitor, Step]]:
    """Yield a model with a frozen weight `base`, its monitor, and a function that trains a step."""
    torch.manual_seed(0)
    net = Adapted(nn.Parameter(base, requires_grad=False))
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)

    def step(before_update: Callable[[], None] = lambda: None) -> None:
        optimizer.zero_grad()
        net(torch.ones(1, 4)).square().sum().backward()
        before_update()
        optimizer.step()

    with Monitor(config_of(*quantities, options=options)).attach(net, optimizer) as monitor:
        yield net, monitor, step
        assert 0 == monitor.faults


def test_wrapped_weight_among_others_costs_its_own_rows():
    options = {"parameters": {"updates": True}, "hashes": {"of": "all", "every": 1}}
    with trained(Codes(torch.ones(3, 2, dtype=torch.int8)), *options, **options) as (net, monitor, step):
        for _ in range(5):
            step()
        found = published(monitor)
    norms = found.norms("param_after")

    assert {(number, name) for number in range(1, 6) for name in PLAIN} == norms.keys()
    assert PLAIN == {row["module"] for row in found.of("features") if row["step"] == 5}
    assert PLAIN == {row["tensor"] for row in found.of("hashes") if (row["step"], row["kind"]) == (5, "param_after")}
    assert 1 == sum(message.startswith("param_before of base cannot") for message in found.notices)
    assert float(net.last.weight.detach().double().norm()) == pytest.approx(norms[5, "last.weight"])


def test_first_parameter_on_meta_leaves_the_others_measured():
    with trained(torch.empty(5, 5, device="meta"), "parameters") as (_, monitor, step):
        step()
        norms = published(monitor).norms("param_after")

    assert PLAIN == {name for _, name in norms}


def test_wrapped_moment_costs_its_own_rows():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def encode(*_: Any) -> None:
        optimizer.state[net[0].weight]["exp_avg"] = Codes(torch.ones(6, 4, dtype=torch.int8))

    optimizer.register_step_post_hook(encode)  # before the hook of the monitor
    with Monitor(config_of("optimizer_state", "adam_updates")).attach(net, optimizer) as monitor:
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        found = published(monitor)
        assert 0 == monitor.faults

    others = {"0.bias", "1.weight", "1.bias"}
    kinds = {(row.entry.kind, row.entry.tensor) for row in found.rows}
    assert {(kind, name) for kind in ("exp_avg", "exp_avg_sq") for name in others} <= kinds
    assert ("exp_avg", "0.weight") not in kinds
    assert others == {row["tensor"] for row in found.of("histograms")}


def test_gradient_of_inference_mode_is_published_as_clipped():
    with trained(torch.ones(1), "gradients") as (net, monitor, step):

        def clip() -> None:
            with torch.inference_mode():
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad * 0.5

        step(clip)
        found = published(monitor)

    halves = {key: norm / 2 for key, norm in found.norms("grad_reduced").items()}
    assert PLAIN == {name for _, name in halves}
    assert pytest.approx(halves) == found.norms("grad_clipped")


def failing(isolation: Isolation, tensors: list[torch.Tensor], error: Exception) -> list[int]:
    """Measure `tensors`, of which number 1 raises `error`. Return the positions for which `compute` was called."""
    tried: list[int] = []

    def compute(positions: Any) -> None:
        tried.extend(positions)
        if 1 in positions:
            raise error

    isolation.run("rows", tensors, compute, what=lambda: "norm", name=str)
    return tried


def test_same_error_three_steps_in_a_row_leaves_the_tensor_out():
    """The tensor is measured again after many steps, or with another dtype."""
    told: list[str] = []
    isolation, tensors = Isolation(told.append), [torch.ones(2) for _ in range(4)]

    def at(step: int, error: Exception) -> bool:
        isolation.sample, isolation.step = isolation.sample + 1, step
        return 1 in failing(isolation, tensors, error)

    errors = [*[ValueError()] * 2, KeyError(), *[ValueError()] * (FAILURES_IN_A_ROW + 1)]
    assert [*[True] * 6, False] == [at(step, error) for step, error in enumerate(errors, 1)]
    assert [False, *[True] * 3, False] == [at(LEFT_OUT_STEPS + step, ValueError()) for step in range(5, 10)]
    tensors[1] = torch.ones(2, dtype=torch.bfloat16)
    assert at(10 + LEFT_OUT_STEPS, ValueError())
    assert ["norm of 1 cannot be measured and is absent: ValueError()"] == told


OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("can't allocate memory")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_out_of_memory_leaves_no_tensor_out(error):
    isolation, tensors = Isolation(lambda _: None), [torch.ones(2) for _ in range(4)]
    for step in range(6):
        isolation.sample, isolation.step = step, step

        assert 1 in failing(isolation, tensors, error)


def test_error_keeps_no_tensor_of_the_failed_batch_alive():
    isolation, tensors = Isolation(lambda _: None), [torch.ones(2)]
    alive = weakref.ref(tensors[0])

    def compute(_: Any) -> None:
        copy = tensors[0]
        raise ValueError(copy.shape)

    gc.disable()
    try:
        isolation.run("rows", tensors, compute, what=lambda: "norm", name=str)
        tensors.clear()
        assert alive() is None
    finally:
        gc.enable()


def test_failed_batch_keeps_the_rows_of_tensors_that_it_does_not_measure():
    table = StepTable(StatisticsTable(2, torch.device("cpu")), lambda _: None)
    own = Table(table, ParameterEntries(), (), EVERY_OP)
    own.begin(1)
    slots = own.add("both", lambda: [PlanEntry(kind="grad_clipped", tensor=name) for name in "ab"])
    own.measure([torch.ones(3), None], slots)
    own.measure([None, Codes(torch.ones(3, dtype=torch.int8))], slots)

    assert [True, False] == table.statistics.look(2, EVERY_OP).present.tolist()
