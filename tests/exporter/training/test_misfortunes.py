"""Unusual events during training: it continues or ends as without the monitor, and gaps are reported once."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.exporter.parts import session_of
from tests.properties import THOROUGH, named
from torch import nn
from torch.func import functional_call

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.observers.throughput import ThroughputConfig
from rankscope_exporter.quantities.activations.quantity import Activations
from rankscope_exporter.quantities.gradients import Gradients
from rankscope_exporter.quantities.optimizer_state import OptimizerState
from rankscope_exporter.training.model_changes import NewOptimizers

STEPS = 5
FAULTY = 3
QUANTITIES = ("parameters", "gradients", "micro_gradients", "optimizer_state", "activations", "structure")


class Run:
    """A training with an unusual event before or in a step."""

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

    def train(self) -> None:
        for step in range(1, STEPS + 1):
            self.before(step)
            self.step(step)

    def state(self) -> list[Any]:
        parameters = [item.detach().clone() for item in self.net.parameters()]
        return [self.seen, *parameters, torch.random.get_rng_state()]


class OtherParametersForOnePass(Run):
    """Meta-learning: the loss of an inner step on plain tensors gives the gradients of the outer step."""

    def forward(self, step: int) -> torch.Tensor:
        inputs = torch.full((2, 3), float(step))
        fast = {name: item * 1.0 for name, item in self.net.named_parameters()}
        inner = functional_call(self.net, fast, inputs).square().sum()
        gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: item - 0.01 * gradient for (name, item), gradient in zip(fast.items(), gradients, strict=True)}
        return functional_call(self.net, fast, inputs).square().sum()


class UsersHookRaises(Run):
    """A user hook that raises, before and after those of the monitor. The loop catches the error."""

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

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls = 0

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
    def forward(self, step: int) -> torch.Tensor:
        loss = super().forward(step)
        if step == FAULTY:
            raise ValueError
        return loss

    def step(self, step: int) -> None:
        with suppress(ValueError):
            super().step(step)


class LayerAdded(Run):
    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net.append(nn.Linear(2, 2))
            self.optimizer.add_param_group({"params": list(self.net[-1].parameters())})


class LayerThawed(Run):
    """A layer that is added to the optimizer during fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.9)

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.net[0].parameters())})


class LayerReplaced(Run):
    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net[2] = nn.Linear(4, 2)
            self.optimizer.param_groups[0]["params"][2:] = list(self.net[2].parameters())


class FrozenAndThawed(Run):
    def before(self, step: int) -> None:
        self.net[0].requires_grad_(step != FAULTY)


class FrozenAtFirst(Run):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net[0].requires_grad_(True)


class OptimizerReplaced(Run):
    def before(self, step: int) -> None:
        if step == FAULTY:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)


class SchedulerCreatedLater(Run):
    """A scheduler that replaces the method `optimizer.step`."""

    def before(self, step: int) -> None:
        if step == FAULTY - 1:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)


class Lazy(Run):
    """A layer whose weight has no shape until the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


class Scripted(Run):
    """A layer of TorchScript. It does not accept hooks; the other layers are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.jit.script(self.net[2])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


class ModelCopied(Run):
    """The loop continues with a copy of the model, which is not monitored."""

    def before(self, step: int) -> None:
        if step == FAULTY:
            self.net = copy.deepcopy(self.net)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


NOTES: dict[type[Run], str] = {
    LayerAdded: "2 parameters were added to the optimizer after attach() and are not measured",
    OptimizerReplaced: "the optimizer was replaced after attach(): the monitor now observes Adam",
    Scripted: "activations: 2: no hook can be registered",
    Lazy: "2 parameters have no shape yet and are not measured (1.weight, 1.bias)",
}
FAULTS: dict[type[Run], str] = {LayerReplaced: "2 parameters were replaced after attach()"}
CASES = (
    *(UsersHookRaises, StepRaises, LossRaises, LayerAdded, LayerThawed, LayerReplaced, FrozenAndThawed, FrozenAtFirst),
    *(OptimizerReplaced, SchedulerCreatedLater, Lazy, Scripted, ModelCopied, OtherParametersForOnePass),
)


class Watched:
    """The result of a run with the monitor."""

    def __init__(self, case: Callable[[], Run], *, every: int = 1) -> None:
        self.run = case()
        config = MonitorConfig(
            quantities=QUANTITIES,
            every=every,
            console=False,
            exit_wait_seconds=0,
            throughput=ThroughputConfig(method="off"),  # on a GPU, its absence would be one more notice
        )
        with Monitor(config).attach(self.run.net, self.run.optimizer) as monitor:
            session = session_of(monitor)
            self.run.train()
            monitor.end_step()
            assert session.publisher.stop(60)  # all records are in the ring now
            self.state = self.run.state()
        self.faults = monitor.faults
        records = session.channel.ring.after(-1, 1 << 30).records
        self.events = [event for record in records for event in record.events]
        self.rows = set(_rows(records))

    def messages(self, type_: str) -> list[str]:
        return [str(event.message) for event in self.events if event.type == type_]

    def steps(self, kind: str, tensor: str) -> set[int]:
        return {step for step, k, t in self.rows if (k, t) == (kind, tensor)}


def _rows(records: Any) -> Iterator[tuple[int, str, str]]:
    for record in records:
        if record.statistics is not None:
            entries = record.statistics.plan.plan.entries
            numel = record.statistics.counts.to_pylist()[-len(entries) :]
            yield from (
                (record.step, str(e.kind), e.tensor) for e, n in zip(entries, numel, strict=True) if n is not None
            )


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*lr_scheduler.step", "ignore:.*torch.jit.script")
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.usual(5)
def test_training_is_bit_identical_and_gaps_are_reported_once(case, every):
    alone = case()
    alone.train()
    watched = Watched(case, every=every)

    assert same(alone.state(), watched.state)
    assert bool(case in FAULTS) == watched.faults
    assert [case in FAULTS] * watched.faults == [FAULTS[case] in text for text in watched.messages("fault")]
    notes = [text for text in watched.messages("note") if "not called" not in text and "no tensor" not in text]
    if case in NOTES:
        assert 1 == len([note for note in notes if NOTES[case] in note]), notes
    else:
        assert [] == notes


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*lr_scheduler.step", "ignore:.*torch.jit.script")
def test_rows_exist_for_all_measurable_tensors():
    everything = set(range(1, STEPS + 1))
    frozen, at_first = Watched(FrozenAndThawed), Watched(FrozenAtFirst)
    replaced, later, lazy = Watched(OptimizerReplaced), Watched(SchedulerCreatedLater), Watched(Lazy)
    added, thawed, scripted = Watched(LayerAdded), Watched(LayerThawed), Watched(Scripted)

    assert everything - {FAULTY} == frozen.steps("grad_unreduced", "0.weight")
    assert {step for step in everything if step >= FAULTY} == at_first.steps("grad_reduced", "0.weight")
    # The state before the first step of the new optimizer is unknown.
    assert everything - {FAULTY} == replaced.steps("param_before", "0.weight")
    assert everything == replaced.steps("param_after", "0.weight")
    assert {1, 2} == replaced.steps("momentum", "0.weight")  # never a number of a deleted optimizer
    assert [] == replaced.messages("step_skipped")
    assert everything == later.steps("param_after", "2.weight")
    assert everything == lazy.steps("grad_reduced", "0.weight")
    assert everything == lazy.steps("act_out", "1")
    assert everything == Watched(OtherParametersForOnePass).steps("grad_reduced", "0.weight")
    assert everything == added.steps("param_after", "0.weight")
    assert everything == scripted.steps("act_out", "0") == scripted.steps("grad_reduced", "2.weight")
    assert {step for step in everything if step >= FAULTY} == thawed.steps("momentum", "0.weight")


class TwoOptimizers(Run):
    """The monitor receives only one of two optimizers. The other one has other parameters and steps twice as often."""

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
    def train(self) -> None:
        self.optimizer = Wrapper(self.optimizer)
        super().train()


def test_inner_optimizer_does_not_replace_a_foreign_outer_one():
    """An optimizer as in DeepSpeed: its groups are those of the inner optimizer."""
    net = nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)

    class Outer:
        param_groups = inner.param_groups

    outer: Any = Outer()
    followed = [outer]
    replacing = NewOptimizers(followed, lambda _optimizer, *, replaces: None)
    handles: list[Any] = []
    replacing.install(handles.append, lambda _where, function: function)
    try:
        for _ in range(3):
            replacing.followed_begins(outer)
            inner.step()
            replacing.followed_ended(outer)
        assert [outer] == followed
        inner.step()
        assert [inner] == followed
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("case", [TwoOptimizers, OuterGiven, InnerGiven])
def test_unrelated_outer_or_inner_optimizer_replaces_nothing(case):
    watched = Watched(case)

    assert not [text for text in watched.messages("note") if "replaced" in text]
    assert 0 == watched.faults
    assert set(range(1, STEPS + 1)) == watched.steps("param_after", "2.weight")
    assert [] == watched.messages("step_skipped")


PLACES = [
    (Activations, "install"),
    (Gradients, "on_gradient_ready"),
    (Gradients, "on_gradients_ready"),
    (Gradients, "on_optimizer_step_begin"),
    (OptimizerState, "on_optimizer_step_end"),
]


@pytest.mark.parametrize(("quantity", "moment"), PLACES, ids=lambda place: getattr(place, "__name__", place))
def test_hook_that_raises_is_counted_and_logged_once(quantity, moment, monkeypatch):
    alone = Run()
    alone.train()

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(quantity, moment, fail)
    watched = Watched(Run)

    assert same(alone.state(), watched.state)
    assert watched.faults > 0
    assert 1 == len([text for text in watched.messages("fault") if "broken" in text])
    assert {1, STEPS} <= watched.steps("param_after", "0.weight")


SCRIPT = """
import json, os, sys, torch
from torch import nn
from rankscope_exporter import Monitor, MonitorConfig
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.full((4,), float(index))
def step(net, optimizer, inputs=torch.ones(2, 4)):
    optimizer.zero_grad()
    net(inputs).sum().backward()
    optimizer.step()
def main(body, watched):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = MonitorConfig(statistics="torch", console=False, exit_wait_seconds=0, enabled=watched)
    with Monitor(config).attach(net, optimizer) as monitor:
        exec(body, globals() | locals())
    print([item.tolist() for item in net.parameters()], monitor.faults)
def outcome(body, watched):
    # Torch is imported once: each training is a child that ends in its own way.
    sys.stdout.flush()
    out, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with open(out) as said:
            text = said.read()
        return text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.dup2(write, 1)
    os.close(write)
    code = 0
    try:
        main(body, watched)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        print(repr(error))
        code = 1
    sys.stdout.flush()
    os._exit(code)
if __name__ == "__main__":
    import torch._dynamo  # the first optimizer would, in each child
    print(json.dumps([[outcome(body, watched) for watched in (False, True)] for body in BODIES]))
"""

ENDINGS = {
    "workers by fork": """
        for inputs in torch.utils.data.DataLoader(Data(), 2, num_workers=2, multiprocessing_context="fork"):
            step(net, optimizer, inputs)
    """,
    "workers by spawn": """
        for inputs in torch.utils.data.DataLoader(Data(), 2, num_workers=1, multiprocessing_context="spawn"):
            step(net, optimizer, inputs)
    """,
    "an exception in the forward": """
        step(net, optimizer)
        net[2].register_forward_hook(lambda *_: 1 / 0)
        step(net, optimizer)
    """,
    "an exception in the optimizer": """
        step(net, optimizer)
        optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        step(net, optimizer)
    """,
    "exit in the optimizer": """
        step(net, optimizer)
        optimizer.register_step_post_hook(lambda *_: sys.exit(6))
        step(net, optimizer)
    """,
    "exit in backward": """
        step(net, optimizer)
        net[0].weight.register_hook(lambda _: sys.exit(5))
        step(net, optimizer)
    """,
    "exit at once in the forward": """
        step(net, optimizer)
        net[0].register_forward_hook(lambda *_: os._exit(7))
        step(net, optimizer)
    """,
}
CODES = dict(zip(ENDINGS, (0, 0, 1, 1, 6, 5, 7), strict=True))
USUAL = [name for name in ENDINGS if name != "workers by spawn"]  # a spawned worker imports torch


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """Return output and exit code of a process with and without the monitor, for each ending."""
    names = list(ENDINGS) if THOROUGH else USUAL
    script = tmp_path_factory.mktemp("endings") / "train.py"
    script.write_text(SCRIPT.replace("BODIES", repr([textwrap.dedent(ENDINGS[name]) for name in names])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    return dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.timeout(320)
@pytest.mark.parametrize("ending", named(USUAL, ENDINGS))
@pytest.mark.usual(1)
def test_process_ends_as_without_the_monitor(ending, ended):
    without, with_us = ended[ending]

    assert CODES[ending] == without[1], without[0]
    assert without == with_us
