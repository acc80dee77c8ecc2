"""Hooks under compilers, tracers, modes and captures of CUDA graphs: training is bit-identical, records are right."""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.exporter.measure.kernels.conftest import Operations
from tests.exporter.parts import CaptureRuntime, Training, Watched
from tests.properties import few
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from rankscope_exporter.adapters import torch_private, tracing
from rankscope_exporter.adapters.hook_context import Hook, HookContext, IntraOpThreads
from rankscope_exporter.adapters.tracing import is_plain
from rankscope_exporter.process.errors import ErrorBoundary

EVERYTHING = (
    *("parameters", "gradients", "micro_gradients", "optimizer_state", "activations"),
    *("structure", "linear", "adam_updates", "hashes", "direction"),
)
AT_UPDATE = frozenset({"param_before", "grad_clipped"})
IN_BACKWARD = frozenset({"act_grad_in", "act_grad_out"})
IN_FORWARD = frozenset({"act_in", "act_out", "act_grad_in", "act_grad_out"})
ONES = torch.ones(3, 4)


class Loop:
    """A plain training loop. A case is a subclass that replaces parts of it."""

    steps = 4
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
        self.log: Callable[..., None] = lambda **_: None

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def prepare(self) -> None:
        """Prepare the training after the monitor was attached."""

    def train(self) -> None:
        for step in range(1, self.steps + 1):
            loss = self.step()
            self.note(step)
            self.between(step)
            self.log(loss=loss.detach())

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

    def between(self, step: int) -> None:
        """Run after a step."""

    def note(self, step: int) -> None:
        for name, parameter in self.net.named_parameters():
            state = self.optimizer.state[parameter]
            tensors = {"param_after": parameter, "grad_reduced": parameter.grad, "exp_avg": state.get("exp_avg")}
            for kind, tensor in tensors.items():
                if tensor is not None:
                    self.norms[step, kind, name] = float(tensor.detach().norm())


class CompiledUpdate(Loop):
    absent, names = AT_UPDATE, "the optimizer's step runs inside compiled code"

    def prepare(self) -> None:
        self.compiled = torch.compile(self.step_once, backend="eager")

    def step_once(self) -> None:
        self.optimizer.step()

    def update(self) -> None:
        self.compiled()


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
        return self.last(torch.relu(self.first(x)))


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

    def backward(self, loss: torch.Tensor) -> None:
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)):
            loss.backward()


def targets(traced: Any) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes]


def with_fake_input(net: nn.Module) -> tuple[int, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return tuple(net(torch.ones(3, 4)).shape)


def with_fake_parameters(net: nn.Module) -> tuple[int, ...]:
    """No mode is on the stack."""
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(parameter) for name, parameter in net.named_parameters()}
    return tuple(torch.func.functional_call(net, fakes, (mode.from_tensor(ONES),)).shape)


def of_jit(net: nn.Module) -> int:
    return str(torch.jit.trace(net, ONES).inlined_graph).count("aten::")


def of_fx(net: nn.Module, **how: Any) -> list[str]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    return targets(make_fx(forward, **how)(ONES))


class Traced(Loop):
    """A tracer runs after each step, and one within it."""

    tracers: tuple[Callable[[nn.Module], Any], ...] = (
        *(of_jit, with_fake_input, with_fake_parameters, of_fx, functools.partial(of_fx, pre_dispatch=True)),
        lambda net: targets(torch.fx.symbolic_trace(nn.Sequential(net, nn.ReLU()))),
        lambda net: targets(torch.export.export(net, (ONES,), strict=False)),
    )
    steps = len(tracers)

    def backward(self, loss: torch.Tensor) -> None:
        self.collected.append(of_jit(self.net))
        loss.backward()

    def between(self, step: int) -> None:
        self.collected.append(self.tracers[step - 1](self.net))


class CountedFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(getattr(func, "__name__", func))] += 1
        return func(*args, **(kwargs or {}))


def found_in(mode: Any) -> Any:
    """Return the result of a mode, without calls of detach(), which the script makes for log()."""
    if isinstance(mode, FlopCounterMode):
        return mode.get_total_flops()
    if isinstance(mode, CommDebugMode):
        return mode.get_total_counts()
    return {name: count for name, count in getattr(mode, "counted", {}).items() if "detach" not in name}


@contextlib.contextmanager
def modes_of_both_kinds() -> Iterator[Any]:
    with CountedFunctions(), Operations() as operations, FlopCounterMode(display=False):
        yield operations


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


class Moded(Loop):
    """Whole steps, including calls of the monitor, run under modes of the user."""

    modes: tuple[Callable[[], Any], ...] = (
        *(Operations, CountedFunctions, functools.partial(FlopCounterMode, display=False), CommDebugMode),
        *(modes_of_both_kinds, default_device, functools.partial(torch.device, "meta")),
    )
    steps = 2 * len(modes)

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.randn(3, 4)  # under torch.device("meta"), a new tensor has no values

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.data)
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self) -> None:
        for step in range(1, self.steps + 1):
            with self.modes[step // 2 % len(self.modes)]() as mode:
                loss = self.step()
                self.log(loss=loss.detach() if step % 2 else 1.0)
            self.note(step)
            self.collected.append(found_in(mode))


class SelectiveCheckpoint(Loop):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        def policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            saved = operation is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.net.__call__, x, use_reentrant=False, context_fn=contexts).square().sum()


USUAL = [Loop, CompiledLoss, CompiledStep, Traced, Moded, SelectiveCheckpoint]
LONG = [CompiledInPlace, CompiledUpdate, CompiledBackward]


def trained(case: Callable[[], Loop], **settings: Any) -> tuple[Loop, tuple[Any, ...], Watched | None]:
    """Return the loop after its training, the values that a monitor may not change, and the monitor with `settings`."""
    torch._dynamo.reset()
    counters.clear()
    loop, watched = case(), None
    if settings:
        watched = Watched(loop.net, loop.optimizer, **settings)
        loop.log = watched.monitor.log
    loop.prepare()
    loop.train()
    graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    if watched is not None:
        watched.finish()
    bits = [parameter.detach().numpy().tobytes() for parameter in loop.net.parameters()]
    return loop, (bits, loop.collected, graphs), watched


@pytest.mark.filterwarnings("ignore")  # deprecation warnings of torch about its tracers
@pytest.mark.parametrize("case", few(len(USUAL), [*USUAL, *LONG]), ids=lambda case: case.__name__)
def test_training_is_bit_identical_and_its_rows_are_right(case):
    _, alone, _ = trained(case)
    loop, same, watched = trained(case, quantities=case.quantities, options={"hashes": {"of": "all", "every": 1}})
    rows = watched.rows()

    assert alone[0] == same[0], "the trained bits differ"
    assert alone[1] == same[1], "the user collects operations of the monitor"
    assert alone[2] == same[2], "graphs and graph breaks differ"
    assert (0, [], []) == (watched.faults, watched.skipped(), watched.events("anomaly"))
    assert list(range(1, case.steps + 1)) == watched.measured()
    found = {(r.step, r.entry.kind, r.entry.tensor): r.numbers["norm"] for r in rows if r.entry.micro_step is None}
    known = {key: norm for key, norm in loop.norms.items() if key[1] not in case.absent or key in found}
    assert pytest.approx(known, rel=1e-5) == {key: found.get(key) for key in known}
    assert set() == {row.entry.kind for row in rows} & case.absent - {key[1] for key in loop.norms}
    notes = watched.messages("note")
    assert [case.names] == [case.names for note in notes if case.names is None or case.names in note] or not notes


def test_modes_are_restored_in_order_after_a_hook_that_raises():
    def fails() -> None:
        assert is_plain()
        raise RuntimeError("no")

    boundary = ErrorBoundary()
    context = HookContext(boundary, team=IntraOpThreads(), lock=contextlib.nullcontext(), tell=print)
    with CountedFunctions() as outer, CountedFunctions() as inner, Operations() as operations:
        Hook(context, "a hook", fails)()
        modes = torch.overrides._get_current_function_mode_stack()
        torch.ones(2).sum()

    assert (1, [outer, inner]) == (boundary.count, modes)
    assert 1 == operations.counted["aten.sum.default"] == outer.counted["sum"]


@pytest.mark.thorough
def test_learning_rates_of_a_compiled_update_are_the_used_ones():
    class Scheduled(CompiledUpdate):
        def prepare(self) -> None:
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
            super().prepare()

        def between(self, step: int) -> None:
            self.schedule.step()

    _, _, watched = trained(Scheduled, every=1)

    rates = {step: pytest.approx(0.01 * 0.5 ** (step - 1)) for step in range(1, Loop.steps + 1)}
    assert rates == dict(watched.scalars("learning_rate"))


def test_omitted_compiled_update_is_reported_as_skipped_step():
    class Skipping(CompiledUpdate):
        updates = 0

        def update(self) -> None:
            self.updates += 1
            if self.updates != 2:
                self.compiled()

    _, _, watched = trained(Skipping, every=1)

    assert ([1, 2, 3, 4], [2]) == (watched.measured(), watched.skipped())


def test_update_without_optimizer_state_is_not_reported_as_skipped():
    class Fused(CompiledUpdate):
        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.01, fused=True)

    _, _, watched = trained(Fused, every=1)

    assert ([1, 2, 3, 4], []) == (watched.measured(), watched.skipped())


def test_monitor_calls_in_compiled_code_have_no_effect_and_one_notice():
    torch._dynamo.reset()
    loop = Loop()
    with Watched(loop.net, loop.optimizer) as watched:
        monitor = watched.monitor

        @torch.compile(backend="eager", fullgraph=True)
        def loss(x: torch.Tensor) -> torch.Tensor:
            with monitor.phase("loss"):
                made = loop.net(x).square().sum()
            monitor.log(loss=made)
            monitor.end_step()
            return made

        for _ in range(3):
            loss(ONES).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    assert (0, [], [1, 2, 3]) == (watched.faults, watched.scalars("loss"), watched.measured())
    assert 1 == sum("torch.compile" in note and "call it outside" in note for note in watched.messages("note"))


def test_captured_step_is_not_a_step(monkeypatch):
    with Training() as training:
        training.train(loss=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(torch_private, "is_cuda_initialized", lambda: True)
            patch.setattr(tracing, "is_capturing", lambda: True)
            training.train(loss=1.0)
        training.train(loss=2.0)

    assert [1, 2] == training.measured()
    assert [0.0, 2.0] == [value for _, value in training.scalars("loss")]
    assert 0 == training.faults


def test_publisher_thread_is_in_the_relaxed_capture_mode(monkeypatch):
    runtime, modes = CaptureRuntime(), []
    with Training() as training:
        monkeypatch.setattr(tracing, "device_in_use", lambda: -1)
        monkeypatch.setattr(tracing, "exchange_of_modes", lambda: runtime.exchange)
        training.session.steps.items.put(lambda: modes.append(runtime.mode))
        training.publish()
        monkeypatch.undo()

    assert ([2], 0) == (modes, runtime.mode)


@pytest.mark.parametrize(("in_use", "expected"), [({5, 6}, [5, 5]), ({0, 6}, [0, 0]), (set(), [])])
def test_thread_calls_the_runtime_on_a_device_in_use_only(in_use, expected, monkeypatch):
    """Elsewhere, such as on device 0 in a new thread, a call would create a context of about 500 MB."""
    current, calls = [0], []

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        current.append(number)
        yield
        current.pop()

    def exchange(_mode: Any) -> int:
        calls.append(current[-1])
        return 0

    monkeypatch.setattr(tracing, "exchange_of_modes", lambda: exchange)
    for name, double in {"is_initialized": lambda: True, "device_count": lambda: 8, "device": device}.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", in_use.__contains__, raising=False)
    with tracing.others_may_capture() as is_relaxed:
        assert is_relaxed

    assert expected == calls
