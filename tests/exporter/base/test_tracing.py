"""Tests of hooks under compilers, tracers and modes: training is bit-identical, and the records are right.

Each case trains twice: without a monitor and with one that measures everything. The test compares the parameters, the
objects that the case collects (such as counted operations) and the graphs and graph breaks of Dynamo. It also compares
the rows with the tensors.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.properties import few
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.tracing import Entry, is_plain, is_traced, on_compilation

STEPS = 4
EVERYTHING = (
    *("parameters", "gradients", "micro_gradients", "optimizer_state", "activations"),
    *("structure", "linear", "adam_updates", "hashes", "direction"),
)
AT_UPDATE = frozenset({"param_before", "grad_clipped"})
IN_BACKWARD = frozenset({"act_grad_in", "act_grad_out"})
IN_FORWARD = frozenset({"act_in", "act_out", "act_grad_in", "act_grad_out"})


class Loop:
    """A plain training loop. A case is a subclass that replaces parts of it."""

    absent: frozenset[str] = frozenset()
    """Kinds of rows that cannot be measured in this case."""
    names: str | None = None
    """A part of the notice about them; None if there is no notice."""
    quantities = EVERYTHING

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = self.make_optimizer()
        self.collected: list[Any] = []
        self.norms: dict[tuple[int, str, str], float] = {}

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def prepare(self) -> None:
        """Prepare the training after the monitor was attached."""

    def train(self, monitor: Monitor | None) -> None:
        for step in range(1, STEPS + 1):
            loss = self.step()
            self.note(step)
            self.between()
            if monitor is not None:
                monitor.log(loss=loss.detach())

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(torch.randn(3, 4))
        self.backward(loss)
        self.update()
        return loss

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().sum()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()

    def between(self) -> None:
        """Run between two steps."""

    def note(self, step: int) -> None:
        for name, parameter in self.net.named_parameters():
            state = self.optimizer.state[parameter]
            tensors = {"param_after": parameter, "grad_reduced": parameter.grad, "exp_avg": state.get("exp_avg")}
            for kind, tensor in tensors.items():
                if tensor is not None:
                    self.norms[step, kind, name] = float(tensor.detach().norm())


class CompiledUpdate(Loop):
    absent, names = AT_UPDATE, "the optimizer's step runs inside compiled code"
    backend = "eager"

    def prepare(self) -> None:
        self.compiled = torch.compile(self.step_once, backend=self.backend)

    def step_once(self) -> None:
        self.optimizer.step()

    def update(self) -> None:
        self.compiled()


class CompiledUpdateWithAot(CompiledUpdate):
    backend = "aot_eager"


class CompiledUpdateOfSGD(CompiledUpdate):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=torch.tensor(0.01), momentum=0.9, foreach=True)


class CompiledMethodStep(CompiledUpdate):
    def prepare(self) -> None:
        self.compiled = torch.compile(self.optimizer.step, backend="eager")


class CompiledUpdateOfMicroBatches(CompiledUpdate):
    def step(self) -> torch.Tensor:
        for _ in range(2):
            loss = self.loss(torch.randn(3, 4))
            self.backward(loss)
        self.update()
        return loss

    def between(self) -> None:
        self.optimizer.zero_grad()


class CompiledUpdateAndLateZero(CompiledUpdate):
    def step(self) -> torch.Tensor:
        loss = self.loss(torch.randn(3, 4))
        self.optimizer.zero_grad()
        self.backward(loss)
        self.update()
        return loss


class CompiledStep(Loop):
    absent, names = AT_UPDATE | IN_FORWARD, "the optimizer's step runs inside compiled code"

    def prepare(self) -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = self.net(x).square().sum()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        self.compiled = torch.compile(step, backend="eager")

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.compiled(torch.randn(3, 4))


class CompiledLoss(Loop):
    absent, names = IN_FORWARD, "is part of compiled code, so it has no activations"

    def prepare(self) -> None:
        self.compiled = torch.compile(lambda x: self.net(x).square().sum(), backend="aot_eager", fullgraph=True)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(x)


class Body(nn.Module):
    """A user-defined module. Dynamo does not compile the frames of torch's own modules separately."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(torch.relu(self.first(x)))
        return made


class CompiledInPlace(Loop):
    names = "first, last: is part of compiled code, so it has no activations"

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.net = Body()
        return super().make_optimizer()

    def prepare(self) -> None:
        self.net.compile(backend="aot_eager", fullgraph=True)


class CompiledBackward(Loop):
    absent, names = IN_BACKWARD, "the backward pass runs inside compiled code"
    # `structure` hooks tensors at only one step, and compiled autograd creates a graph for each set of hooks.
    quantities = tuple(name for name in EVERYTHING if name != "structure")
    backend = "aot_eager"

    def backward(self, loss: torch.Tensor) -> None:
        compiler = torch.compile(backend=self.backend, fullgraph=True, dynamic=True)
        with compiled_autograd._enable(compiler):
            loss.backward()


class CompiledBackwardAndClipping(CompiledBackward):
    absent = IN_BACKWARD | {"grad_unreduced", "grad_reduced"}

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.optimizer.step()

    def note(self, step: int) -> None:
        super().note(step)
        clipped = {key: norm for key, norm in self.norms.items() if key[1] == "grad_reduced"}
        for (number, _, name), norm in clipped.items():
            del self.norms[number, "grad_reduced", name]
            self.norms[number, "grad_clipped", name] = norm


class CapturedBackward(CompiledBackward):
    """Compiled autograd that captures the backward pass and runs it unchanged, so that hooks run."""

    absent, names = frozenset(), None

    def backward(self, loss: torch.Tensor) -> None:
        with compiled_autograd._enable(lambda graph: graph):
            loss.backward()


class JitTrace(Loop):
    def between(self) -> None:
        traced = torch.jit.trace(self.net, torch.ones(3, 4))
        self.collected.append(str(traced.inlined_graph).count("aten::"))


class JitTraceWithinAStep(JitTrace):
    def backward(self, loss: torch.Tensor) -> None:
        super().between()
        loss.backward()

    def between(self) -> None:
        pass


class MakeFx(Loop):
    def between(self, **how: Any) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.net(x)
            return made

        graph = make_fx(forward, **how)(torch.ones(3, 4))
        self.collected.append([str(node.target) for node in graph.graph.nodes])


class MakeFxWithFakes(MakeFx):
    def between(self, **how: Any) -> None:
        super().between(tracing_mode="symbolic", _allow_non_fake_inputs=True)


class MakeFxBeforeDispatch(MakeFx):
    def between(self, **how: Any) -> None:
        super().between(pre_dispatch=True)


class MakeFxOfGradients(Loop):
    def between(self) -> None:
        def gradients(x: torch.Tensor) -> Any:
            return torch.autograd.grad(self.net(x).sum(), list(self.net.parameters()))

        graph = make_fx(gradients)(torch.ones(3, 4))
        self.collected.append([str(node.target) for node in graph.graph.nodes])


class SymbolicTrace(Loop):
    def between(self) -> None:
        traced = torch.fx.symbolic_trace(nn.Sequential(self.net, nn.ReLU()))
        self.collected.append([str(node.target) for node in traced.graph.nodes])


class Export(Loop):
    strict = True

    def between(self) -> None:
        program = torch.export.export(self.net, (torch.ones(3, 4),), strict=self.strict)
        self.collected.append([str(node.target) for node in program.graph.nodes])


class ExportNotStrict(Export):
    strict = False


class FakeForward(Loop):
    def between(self) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            self.collected.append(tuple(self.net(torch.ones(3, 4)).shape))


class FakeParameters(Loop):
    """Fake tensors replace the parameters, and no mode is on the stack."""

    def between(self) -> None:
        mode = FakeTensorMode()
        fakes = {name: mode.from_tensor(parameter) for name, parameter in self.net.named_parameters()}
        result = torch.func.functional_call(self.net, fakes, (mode.from_tensor(torch.ones(3, 4)),))
        self.collected.append(tuple(result.shape))


class Aot(Loop):
    def between(self) -> None:
        compiled = aot_module(self.net, fw_compiler=lambda graph, _: graph)
        self.collected.append(float(compiled(torch.ones(3, 4)).sum()))


class CountedOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


class CountedFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(getattr(func, "__name__", func))] += 1
        return func(*args, **(kwargs or {}))


class Moded(Loop):
    """The whole step, including calls of the monitor, runs under a mode of the user."""

    def mode(self) -> Any:
        raise NotImplementedError

    def found(self, mode: Any) -> Any:
        return dict(mode.counted)

    def train(self, monitor: Monitor | None) -> None:
        for step in range(1, STEPS + 1):
            with self.mode() as mode:
                loss = self.step()
                if monitor is not None:
                    monitor.log(loss=loss.detach() if step % 2 else 1.0)
            self.note(step)
            self.collected.append(self.found(mode))


class UserDispatchMode(Moded):
    mode = CountedOperations

    def found(self, mode: Any) -> Any:  # the script calls detach() for log()
        return {name: count for name, count in mode.counted.items() if "detach" not in name}


class UserFunctionMode(Moded):
    mode = CountedFunctions

    def found(self, mode: Any) -> Any:
        return {name: count for name, count in mode.counted.items() if "detach" not in name}


class CountedFlops(Moded):
    def mode(self) -> Any:
        return FlopCounterMode(display=False)

    def found(self, mode: Any) -> Any:
        return mode.get_total_flops()


class CountedCollectives(Moded):
    mode = CommDebugMode

    def found(self, mode: Any) -> Any:
        return mode.get_total_counts()


class ModesOfBothKinds(Moded):
    @contextlib.contextmanager
    def mode(self) -> Iterator[Any]:
        with CountedFunctions(), CountedOperations() as operations, FlopCounterMode(display=False):
            yield operations

    found = UserDispatchMode.found


class MetaDevice(Moded):
    """`with torch.device("meta")`: a tensor that is created without a device argument has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.randn(3, 4)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.data)
        loss.backward()
        self.optimizer.step()
        return loss

    def mode(self) -> Any:
        return torch.device("meta")

    def found(self, mode: Any) -> Any:
        return None


class DefaultDevice(Loop):
    def train(self, monitor: Monitor | None) -> None:
        torch.set_default_device("cpu")
        try:
            super().train(monitor)
        finally:
            torch.set_default_device(None)


class SelectiveCheckpoint(Loop):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        def policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            saved = operation is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        made = checkpoint(self.net.__call__, x, use_reentrant=False, context_fn=contexts)
        return made.square().sum()


USUAL = [
    *(Loop, CompiledStep, CompiledLoss, JitTrace, JitTraceWithinAStep, MakeFx, MakeFxBeforeDispatch),
    *(SymbolicTrace, ExportNotStrict, FakeForward, FakeParameters, UserDispatchMode, UserFunctionMode),
    *(CountedFlops, CountedCollectives, MetaDevice, DefaultDevice, SelectiveCheckpoint),
]
LONG = [
    *(CompiledInPlace, CapturedBackward, MakeFxWithFakes, MakeFxOfGradients, Export, Aot, ModesOfBothKinds),
    *(CompiledUpdateWithAot, CompiledMethodStep, CompiledUpdateOfMicroBatches, CompiledUpdateAndLateZero),
    *(CompiledUpdate, CompiledUpdateOfSGD, CompiledBackward, CompiledBackwardAndClipping),
]
CASES = few(len(USUAL), [*USUAL, *LONG])


def config_of(case: type[Loop]) -> MonitorConfig:
    options = {"hashes": {"of": "all", "every": 1}}
    return MonitorConfig(quantities=case.quantities, options=options, console=False, exit_wait_seconds=0)


def trained(case: Callable[[], Loop], monitor: Monitor | None = None) -> tuple[Loop, tuple[Any, ...]]:
    """Return the loop after its training, and the values that must be equal with and without a monitor."""
    torch._dynamo.reset()
    counters.clear()
    loop = case()
    if monitor is not None:
        monitor.attach(loop.net, loop.optimizer)
    loop.prepare()
    loop.train(monitor)
    graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    bits = [parameter.detach().numpy().tobytes() for parameter in loop.net.parameters()]
    return loop, (bits, loop.collected, graphs)


@pytest.mark.usual(9)
@pytest.mark.filterwarnings("ignore")  # deprecation warnings of torch about its tracers
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training_is_bit_identical_and_its_rows_are_right(case, reader, eventually):
    _, alone = trained(case)
    with Monitor(config_of(case)) as monitor:
        loop, watched = trained(case, monitor)
        monitor.end_step()
        read = reader(monitor)
        eventually(lambda: [record for record in read.records() if record["step"] == STEPS and record["plan"]])
        rows, events = read.rows(), read.events()
        faults = monitor.faults

    assert alone[0] == watched[0], "the trained bits differ"
    assert alone[1] == watched[1], "the user collects operations of the monitor"
    assert alone[2] == watched[2], "graphs and graph breaks differ"
    assert 0 == faults
    assert list(range(1, STEPS + 1)) == sorted({row.step for row in rows})
    assert [] == [event for event in events if event["type"] in ("step_skipped", "anomaly")]
    found = {(row.step, row.kind, row.tensor): row.numbers["norm"] for row in rows if row.micro_step is None}
    known = {key: norm for key, norm in loop.norms.items() if key[1] not in case.absent or key in found}
    assert pytest.approx(known, rel=1e-5) == {key: found.get(key) for key in known}
    assert set() == {row.kind for row in rows} & case.absent - {key[1] for key in loop.norms}
    notes = [event["message"] for event in events if event["type"] == "note"]
    assert [case.names] == [case.names for note in notes if case.names is None or case.names in note] or not notes


@pytest.mark.parametrize(
    ("how", "plain", "traced"),
    [
        (contextlib.nullcontext, True, False),
        (lambda: torch.device("cpu"), False, False),
        (CountedOperations, False, False),
        (CountedFunctions, False, False),
        (FakeTensorMode, False, True),
    ],
)
def test_gate_distinguishes_modes_from_tracers(how, plain, traced):
    with how():
        seen = is_plain(), is_traced()

    assert (plain, traced) == seen


@pytest.mark.parametrize("how", [{}, {"tracing_mode": "fake"}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}])
def test_hook_entry_does_not_run_while_make_fx_traces(how):
    calls = []
    entry = Entry(lambda: calls.append(1), ErrorBoundary())

    def traced(x: torch.Tensor) -> torch.Tensor:
        entry()
        return x * 2

    make_fx(traced, **how)(torch.ones(2))
    entry()

    assert [1] == calls


def test_modes_are_restored_in_order_after_an_entry_that_raises():
    def fails() -> None:
        assert is_plain()
        raise RuntimeError("no")

    boundary = ErrorBoundary()
    with CountedFunctions() as outer, CountedFunctions() as inner, CountedOperations() as operations:
        Entry(fails, boundary)()
        torch.ones(2).sum()

    assert 1 == boundary.count
    assert outer.counted == inner.counted
    assert 1 == operations.counted["aten.sum.default"]


def test_compiled_entry_reports_each_compilation_and_does_not_run():
    torch._dynamo.reset()
    calls: list[str] = []
    entry = Entry(lambda: calls.append("ran"), ErrorBoundary(), on_compilation(lambda: calls.append("compiled")))

    @torch.compile(backend="eager", fullgraph=True)
    def frame(x: torch.Tensor) -> torch.Tensor:
        entry()
        return x * 2

    for _ in range(3):
        frame(torch.ones(2))

    assert ["compiled"] == calls


@pytest.mark.thorough
def test_learning_rates_of_a_compiled_update_are_the_used_ones(quiet, reader, eventually):
    class Scheduled(CompiledUpdate):
        def prepare(self) -> None:
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
            super().prepare()

        def between(self) -> None:
            self.schedule.step()

    with Monitor(quiet) as monitor:
        trained(Scheduled, monitor)
        monitor.end_step()
        read = reader(monitor)
        rates = eventually(lambda: len(found := read.scalars("learning_rate")) == STEPS and found)

    assert {step: pytest.approx(0.01 * 0.5 ** (step - 1)) for step in range(1, STEPS + 1)} == dict(rates)


def test_omitted_compiled_update_is_reported_as_skipped_step(quiet, reader, eventually):
    class Skipping(CompiledUpdate):
        updates = 0

        def update(self) -> None:
            self.updates += 1
            if self.updates != 2:
                self.compiled()

    with Monitor(quiet) as monitor:
        trained(Skipping, monitor)
        monitor.end_step()
        read = reader(monitor)
        eventually(lambda: [record for record in read.records() if record["step"] == STEPS and record["plan"]])
        skipped = [event["step"] for event in read.events() if event["type"] == "step_skipped"]

    assert [2] == skipped


def test_update_without_optimizer_state_is_not_reported_as_skipped(quiet, reader, eventually):
    class Fused(CompiledUpdate):
        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.01, fused=True)

    with Monitor(quiet) as monitor:
        trained(Fused, monitor)
        monitor.end_step()
        read = reader(monitor)
        eventually(lambda: [record for record in read.records() if record["step"] == STEPS and record["plan"]])
        events = read.events()

    assert [] == [event for event in events if event["type"] == "step_skipped"]


def test_monitor_calls_in_compiled_code_have_no_effect_and_one_notice(quiet, reader, eventually):
    torch._dynamo.reset()
    loop = Loop()
    with Monitor(quiet).attach(loop.net, loop.optimizer) as monitor:

        @torch.compile(backend="eager", fullgraph=True)
        def loss(x: torch.Tensor) -> torch.Tensor:
            with monitor.phase("loss"):
                made = loop.net(x).square().sum()
            monitor.log(loss=made)
            monitor.end_step()
            return made

        for _ in range(3):
            loss(torch.ones(3, 4)).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        monitor.end_step()
        read = reader(monitor)
        eventually(lambda: [record for record in read.records() if record["step"] == 3 and record["plan"]])
        notes = [event["message"] for event in read.events() if event["type"] == "note"]
        scalars, faults = read.scalars("loss"), monitor.faults

    assert (0, []) == (faults, scalars)
    assert 1 == sum("torch.compile" in note and "call it outside" in note for note in notes)
