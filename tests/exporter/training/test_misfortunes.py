"""Unusual events during training: it continues or ends as without the monitor, and each step is counted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.exporter.parts import Watched
from tests.programs import run_program
from torch import nn
from torch.ao import quantization
from torch.func import functional_call

from rankscope_exporter.adapters import Framework
from rankscope_exporter.adapters.base import FrameworkTraits
from rankscope_exporter.measure.quantities.activations import Activations
from rankscope_exporter.measure.quantities.gradients import Gradients
from rankscope_exporter.measure.quantities.update import OptimizerState, Parameters
from rankscope_exporter.monitors.throughput import ThroughputConfig
from rankscope_exporter.training.step_tracker import Ended, Signal, StepTracker

STEPS, FAULTY = 5, 3
ALWAYS = list(range(1, STEPS + 1))
FROM_FAULTY = ALWAYS[FAULTY - 1 :]
QUANTITIES = ("parameters", "gradients", "micro_gradients", "optimizer_state", "activations", "structure")


class Run:
    notes: Sequence[str] = ()
    faults: Sequence[str] = ()
    skipped: Sequence[int] = ()
    rows: Sequence[tuple[str, str, list[int]]] = (("param_after", "0.weight", ALWAYS),)
    """Kinds, tensors and the steps at which they have rows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler: Any = None
        self.seen: list[Any] = []

    def before(self, step: int) -> None:
        """Change the training before a step."""

    def forward(self, step: int) -> torch.Tensor:
        return self.net(torch.full((2, 3), float(step))).square().sum()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.forward(step)
        loss.backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.seen.append(loss.item())

    def train(self) -> Run:
        for step in ALWAYS:
            self.before(step)
            self.step(step)
        return self

    def watched(self, **settings: Any) -> Watched:
        off = ThroughputConfig(method="off")  # on a GPU, its absence would be one more notice
        with Watched(self.net, self.optimizer, quantities=QUANTITIES, throughput=off, **settings) as watched:
            self.train()
        return watched

    def state(self) -> list[Any]:
        parameters = [item.detach().clone() for item in self.net.parameters()]
        return [torch.tensor(self.seen), *parameters, torch.random.get_rng_state()]


class ModeOfTheModelRaises(Run):
    """The attribute `training` of the model is a property of the script, which raises once."""

    faults = ("a forward hook failed, training continues: ZeroDivisionError()",)
    rows = (("param_after", "0.weight", ALWAYS), ("act_out", "0", [1, 2, 4, 5]))

    def before(self, step: int) -> None:
        def training(_net: nn.Module) -> bool:
            if step == FAULTY:
                raise ZeroDivisionError
            return True

        self.net.__class__ = type("Net", (nn.Sequential,), {"training": property(training)})


class OtherParametersForOnePass(Run):
    """Meta-learning: the loss of an inner step on plain tensors gives the gradients of the outer step."""

    rows = (("grad_reduced", "0.weight", ALWAYS),)

    def forward(self, step: int) -> torch.Tensor:
        inputs = torch.full((2, 3), float(step))
        fast = {name: item * 1.0 for name, item in self.net.named_parameters()}
        inner = functional_call(self.net, fast, inputs).square().sum()
        gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: item - 0.01 * gradient for (name, item), gradient in zip(fast.items(), gradients, strict=True)}
        return functional_call(self.net, fast, inputs).square().sum()


class UsersHookRaises(Run):
    """A user hook that raises, before and after those of the monitor. The loop catches the error."""

    skipped = (FAULTY,)  # the failed forward pass is no step
    rows = (("param_after", "0.weight", [1, 2, 4]),)

    def step(self, step: int) -> None:
        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        handles = []
        if step == FAULTY:
            handles.append(self.net[2].register_forward_hook(fail))
        if step == FAULTY + 1:
            handles.append(self.net[0].weight.register_post_accumulate_grad_hook(fail))
        with suppress(ZeroDivisionError):
            super().step(step)
        for handle in handles:
            handle.remove()


class Stumbling(torch.optim.SGD):
    """An optimizer that fails once, after it has changed all parameters."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        result = super().step(closure)
        if self.calls == FAULTY:
            raise OSError
        return result


class StepRaises(Run):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = Stumbling(self.net.parameters(), lr=0.1)

    def step(self, step: int) -> None:
        with suppress(OSError):
            super().step(step)


class LossRaises(Run):
    """A failed step, to which the next forward pass belongs."""

    rows = (("param_after", "0.weight", [1, 2, 3, 4]),)

    def forward(self, step: int) -> torch.Tensor:
        loss = super().forward(step)
        if step == FAULTY:
            raise ValueError
        return loss

    def step(self, step: int) -> None:
        with suppress(ValueError):
            super().step(step)


class LayerAdded(Run):
    notes = ("2 parameters were added to the optimizer after attach() and are not measured",)

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net.append(nn.Linear(2, 2))
            self.optimizer.add_param_group({"params": list(self.net[-1].parameters())})


class LayerThawed(Run):
    """A layer that is added to the optimizer during fine-tuning."""

    rows = tuple((kind, "0.weight", FROM_FAULTY) for kind in ("momentum", "grad_reduced"))

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.9)

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.net[0].parameters())})


class LayerReplaced(Run):
    notes = ("2 parameters were replaced after attach()", "activations: 2: other code has removed the module")
    rows = (("grad_reduced", "0.weight", ALWAYS), ("grad_reduced", "2.weight", [1, 2]))

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net[2] = nn.Linear(4, 2)
            self.optimizer.param_groups[0]["params"][2:] = list(self.net[2].parameters())


class LayersReplaced(Run):
    """Each new parameter may have the id() of the freed one of another layer, which it is not."""

    notes = ("4 parameters were replaced after attach()", "activations: 0, 2: other code has removed the module")
    rows = (("grad_reduced", "0.weight", [1, 2]), ("grad_reduced", "2.weight", [1, 2]))

    def __init__(self) -> None:
        super().__init__()
        self.net[0], self.net[2] = nn.Linear(3, 3), nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.optimizer.param_groups[0]["params"].clear()
            for index in (0, 2):
                self.net[index] = nn.Linear(3, 3)
                self.optimizer.param_groups[0]["params"] += self.net[index].parameters()


class QuantizationPrepared(Run):
    """The layers become others with the same parameters, and torch copies the hooks of the layers to them."""

    notes = ("activations: 0, 2: other code has removed the module, so it has no activations",)
    rows = (
        *((kind, "0.weight", ALWAYS) for kind in ("grad_reduced", "momentum", "param_after")),
        *(("param_after", "2.weight", ALWAYS), ("act_out", "0", [1, 2]), ("act_out", "1", ALWAYS)),
    )
    is_frozen = False

    def __init__(self) -> None:
        super().__init__()
        self.net[2].requires_grad_(not self.is_frozen)

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net.qconfig = quantization.get_default_qat_qconfig("x86")
            quantization.prepare_qat(self.net, inplace=True)


class QuantizationOfFrozenLayer(QuantizationPrepared):
    is_frozen = True


class AdaptersAdded(Run):
    """The gradients of the frozen layers remain from the step before. The optimizer has only new parameters."""

    notes = (
        "the optimizer was replaced after attach(): the monitor now observes Adam",
        "2 parameters were added to the optimizer after attach() and are not measured (2.1.weight, 2.1.bias)",
    )
    rows = (
        *(("param_after", "2.0.weight", []), ("param_after", "2.weight", ALWAYS), ("act_out", "2", ALWAYS)),
        *((kind, "0.weight", steps) for kind, steps in (("grad_reduced", [1, 2]), ("grad_clipped", []))),
    )

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net.requires_grad_(False)
            self.net[2] = nn.Sequential(self.net[2], nn.Linear(2, 2))
            self.replaced, self.optimizer = self.optimizer, torch.optim.Adam(self.net[2][1].parameters())


class AdapterNextToHead(AdaptersAdded):
    rows = (*AdaptersAdded.rows, ("grad_reduced", "2.weight", ALWAYS))

    def before(self, step: int) -> None:
        super().before(step)
        if step == FAULTY:
            self.net[2].requires_grad_(True)
            self.optimizer = torch.optim.Adam(self.net[2].parameters())


class FrozenAndThawed(Run):
    rows = (("grad_unreduced", "0.weight", [1, 2, 4, 5]),)

    def before(self, step: int) -> None:
        self.net[0].requires_grad_(step != FAULTY)


class OptimizerReplaced(Run):
    """The state before the first step of the new optimizer is unknown. No number is of a deleted optimizer."""

    notes = ("the optimizer was replaced after attach(): the monitor now observes Adam",)
    rows = (
        *(("param_before", "0.weight", [1, 2, 4, 5]), ("param_after", "0.weight", ALWAYS)),
        *(("momentum", "0.weight", [1, 2]), ("exp_avg", "0.weight", FROM_FAULTY)),
    )

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)


class SchedulerCreatedLater(Run):
    """A scheduler that replaces the method `optimizer.step`."""

    rows = (("param_after", "2.weight", ALWAYS),)

    def before(self, step: int) -> None:
        if step == FAULTY - 1:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)


class Lazy(Run):
    """A layer whose weight has no shape until the first forward pass."""

    notes = ("2 parameters have no shape yet and are not measured (1.weight, 1.bias)",)
    rows = (("grad_reduced", "0.weight", ALWAYS), ("act_out", "1", ALWAYS))

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


class Scripted(Run):
    """A layer of TorchScript. It does not accept hooks; the other layers are measured."""

    notes = ("structure: 2: no hook can be registered", "activations: 2: no hook can be registered")
    rows = (("act_out", "0", ALWAYS), ("grad_reduced", "2.weight", ALWAYS))

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.jit.script(self.net[2])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


class ModelCopied(Run):
    """The loop continues with a copy of the model, which is not monitored."""

    rows = (("param_after", "0.weight", [1, 2]),)

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net = copy.deepcopy(self.net)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


class TwoOptimizers(Run):
    """The monitor receives only one of two optimizers. The other one has other parameters and steps twice as often."""

    notes = ("an optimizer unknown to attach() stepped: the monitor now observes Adam",)
    rows = (("param_after", "2.weight", ALWAYS),)

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.net[2].parameters(), lr=0.1)
        self.other = torch.optim.Adam(self.net[0].parameters(), lr=0.1)

    def step(self, step: int) -> None:
        super().step(step)
        self.other.step()
        self.other.step()
        self.other.zero_grad()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as ZeroRedundancyOptimizer is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([item for group in inner.param_groups for item in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class OuterGiven(Run):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = Wrapper(self.optimizer)


class InnerGiven(Run):
    def train(self) -> Run:
        self.optimizer = Wrapper(self.optimizer)
        return super().train()


CASES = (
    *(UsersHookRaises, StepRaises, LossRaises, LayerAdded, LayerThawed, LayerReplaced, FrozenAndThawed),
    *(LayersReplaced, QuantizationPrepared, QuantizationOfFrozenLayer, AdaptersAdded, AdapterNextToHead),
    *(OptimizerReplaced, SchedulerCreatedLater, Lazy, Scripted, ModelCopied, OtherParametersForOnePass),
    *(TwoOptimizers, OuterGiven, InnerGiven, ModeOfTheModelRaises),
)


@pytest.mark.filterwarnings(
    *("ignore:Lazy modules", "ignore:.*lr_scheduler.step", "ignore:.*torch.jit.script"),
    *("ignore:.*quantization", "ignore:.*quant_min"),
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training_is_bit_identical_and_gaps_are_reported_once(case):
    alone, run = case().train(), case()
    watched = run.watched()
    notes = [text for text in watched.messages("note") if "not called" not in text and "no tensor" not in text]

    assert all(map(torch.equal, alone.state(), run.state()))
    assert (len(case.faults), list(case.skipped)) == (watched.faults, watched.skipped())
    for expected, found in ((case.faults, watched.messages("fault")), (case.notes, notes)):
        assert len(expected) == len(found), found
        assert all(text in message for text, message in zip(expected, found, strict=True)), found
    assert list(case.rows) == [(kind, tensor, watched.steps(kind, tensor)) for kind, tensor, _ in case.rows]


@pytest.mark.parametrize("case", [LayerReplaced, OptimizerReplaced], ids=lambda case: case.__name__)
def test_changes_are_reported_once_where_every_second_step_is_sampled(case):
    alone, run = case().train(), case()
    watched = run.watched(every=2)

    assert all(map(torch.equal, alone.state(), run.state()))
    for expected, found in ((case.faults, watched.messages("fault")), (case.notes, watched.messages("note"))):
        assert [1] * len(expected) == [sum(text in message for message in found) for text in expected]


@pytest.mark.parametrize(
    ("quantity", "moment"),
    [
        *((Activations, "install"), (Gradients, "on_gradient_ready"), (Gradients, "on_gradients_ready")),
        *((Gradients, "on_optimizer_step_begin"), (OptimizerState, "on_optimizer_step_end")),
        (Parameters, "on_optimizer_step_end"),
    ],
    ids=lambda place: getattr(place, "__name__", place),
)
def test_hook_that_raises_is_counted_and_logged_once(quantity, moment, monkeypatch):
    """Other quantities continue."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    alone, run = Run().train(), Run()
    monkeypatch.setattr(quantity, moment, fail)
    if moment == "on_gradient_ready":
        monkeypatch.setattr(Framework, "traits", FrameworkTraits(local_until_backward_ends=False))
    watched = run.watched()

    assert all(map(torch.equal, alone.state(), run.state()))
    assert watched.faults > 0
    assert 1 == len(watched.messages("fault"))
    assert quantity.name in watched.messages("fault")[0]
    assert "failed, training continues: RuntimeError('broken')" in watched.messages("fault")[0]
    assert [] == watched.skipped()
    assert ALWAYS == watched.steps("param_before", "0.weight")
    assert {None, 0} >= {row.entry.micro_step for row in watched.rows("grad_unreduced")} >= {0}


SCRIPT = """
import os, sys, torch
from torch import nn
from rankscope_exporter import Monitor, MonitorConfig
data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step(inputs=torch.ones(2, 4)):
    optimizer.zero_grad()
    net(inputs).sum().backward()
    optimizer.step()
config = MonitorConfig(statistics="torch", console=False, exit_wait_seconds=0, enabled=WATCHED)
with Monitor(config).attach(net, optimizer) as monitor:
    try:
        for (inputs,) in torch.utils.data.DataLoader(data, 2, num_workers=WORKERS, multiprocessing_context=HOW):
            step(inputs)
        EVENT
        step()
    finally:
        print([item.tolist() for item in net.parameters()], monitor.faults, flush=True)
"""


@pytest.mark.parametrize(
    ("event", "code", "how"),
    [
        ("pass", 0, "fork"),
        pytest.param("pass", 0, "spawn", marks=pytest.mark.thorough),  # a spawned worker imports torch
        ("net[2].register_forward_hook(lambda *_: 1 / 0)", 1, None),
        ("optimizer.register_step_pre_hook(lambda *_: 1 / 0)", 1, None),
        ("optimizer.register_step_post_hook(lambda *_: sys.exit(6))", 6, None),
        ("net[0].weight.register_hook(lambda _: sys.exit(5))", 5, None),
        ("net[0].register_forward_hook(lambda *_: os._exit(7))", 7, None),
    ],
)
def test_process_ends_as_without_the_monitor(event, code, how):
    script = SCRIPT.replace("EVENT", event).replace("HOW", repr(how)).replace("WORKERS", "2" if how else "0")
    without, watched = (run_program(script.replace("WATCHED", watched)) for watched in ("False", "True"))

    assert code == without.returncode, without.stderr
    assert (code, without.stdout) == (watched.returncode, watched.stdout), watched.stderr
    assert bool(without.stdout) == (code != 7)


def ended(tracker: StepTracker, *events: str) -> list[tuple[int, bool]]:
    """Return the steps that the events end, and whether each was skipped. A pass with "!" finds deleted gradients."""
    calls: dict[str, Any] = {
        "forward": lambda: tracker.move(Signal.FORWARD, lambda: False),
        "forward!": lambda: tracker.move(Signal.FORWARD, lambda: True),
        "backward": lambda: tracker.move(Signal.BACKWARD, lambda: False),
        "backward!": lambda: tracker.move(Signal.BACKWARD, lambda: True),
        "update": lambda: tracker.move(Signal.UPDATE, repeated=False),
        "same optimizer": lambda: tracker.move(Signal.UPDATE, repeated=True),
        "updated": lambda: tracker.move(Signal.UPDATED),
        "end": tracker.end,
        "end, not skipped": lambda: tracker.end(skipped=False),
    }
    return [(item.step, item.skipped) for item in [calls[event]() for event in events] if isinstance(item, Ended)]


PASSES = ("forward", "backward")
UPDATE = ("update", "updated")
CLEARED = ("forward!", "backward!")
AGAIN = ("same optimizer", "updated")
CLOSURE: dict[str, Any] = {"running_updates": lambda: 1}
RAISED: dict[str, Any] = {"running_updates": lambda: 0}


@pytest.mark.parametrize(
    ("settings", "events", "expected"),
    [
        ({}, (*PASSES, *UPDATE, "forward", "end"), [(1, False), (2, False)]),
        ({}, (*PASSES * 4, *UPDATE, "end"), [(1, False)]),  # micro-batches
        ({}, (*PASSES, "forward!"), [(1, True)]),
        ({}, (*UPDATE, "forward"), [(1, False)]),  # before any pass
        ({}, ("backward", "backward!"), [(1, True)]),  # no forward pass is seen
        ({}, ("forward", "backward", "backward!", *UPDATE, "end"), [(1, False)]),  # gradient surgery
        ({}, ("backward", *UPDATE * 2, "forward"), [(1, False)]),  # two optimizers
        (CLOSURE, ("update", "backward", "updated", "same optimizer"), [(1, False)]),
        (CLOSURE, ("update", *CLEARED * 4, "updated", "same optimizer", *CLEARED * 4, "updated"), [(1, False)]),
        (RAISED, (*PASSES, "update", *PASSES, *UPDATE, "end"), [(1, True), (2, False)]),
        ({"first_step": 7}, ("backward", "end, not skipped", "end"), [(7, False)]),
        ({"has_optimizer": False}, ("backward", "forward!"), [(1, False)]),
        ({"has_optimizer": False}, (*PASSES, *UPDATE, *PASSES, "forward!"), [(1, False), (2, True)]),  # made later
        ({"explicit": True}, (*(*CLEARED, *AGAIN) * 3, "end"), [(1, False)]),
        ({"explicit": True}, (*PASSES, *UPDATE, *AGAIN, "end"), [(1, False)]),
    ],
)
def test_step_ends_at_the_event_that_begins_the_next(settings, events, expected):
    assert expected == ended(StepTracker(**settings), *events)
