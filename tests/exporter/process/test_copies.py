"""Each object of the public API can be copied and saved: copies of data are complete, copies of a training inactive."""

import copy
import gc
import importlib
import inspect
import io
import logging
import multiprocessing
import pickle
import threading
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exporter.publish.sinks.records import FINITE, entry, identity, record
from torch import nn

import rankscope
import rankscope_exporter
from rankscope.reports import OpenedRun
from rankscope_contract.model.events import Event, ExitReason
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_contract.rules.curve import CurveRule
from rankscope_contract.rules.expression import parse
from rankscope_contract.rules.score import ScoreRule
from rankscope_contract.wire.tls import TlsServer
from rankscope_exporter import Anomaly, CaptureConfig, ConfigError, Monitor, MonitorConfig, RankscopeError, ServeConfig
from rankscope_exporter.api.attachment import EndedRun
from rankscope_exporter.api.monitor import OpenPhases, PhaseContext
from rankscope_exporter.config.monitor_config import HardwareConfig
from rankscope_exporter.measure.quantities import quantity_classes
from rankscope_exporter.monitors.flop_counter import FlopCount
from rankscope_exporter.monitors.throughput import ThroughputConfig
from rankscope_exporter.process.errors import CountError
from rankscope_exporter.process.inert import CopiesDoNothing
from rankscope_exporter.publish.serving_config import Address
from rankscope_exporter.publish.sinks import Sink, sink_classes
from rankscope_exporter.publish.sinks.memory import Row
from rankscope_msprobe.trainer_mon import TrainerMon
from rankscope_storage.connection import Connection


class Holding(nn.Module):
    """A model with a monitor, callback or sink as an attribute."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "pickle, an old protocol": lambda value: pickle.loads(pickle.dumps(value, 2)),
    "torch.save": saved,
    "a copy of a copy": lambda value: copy.deepcopy(pickle.loads(pickle.dumps(value))),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


def train_elsewhere(model: Holding, results: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.held.attach(model, optimizer)
    step(model, optimizer)
    results.put((model.held.is_copy, model.held.address, model.held.faults, model.body[0].weight.tolist()))


TOKEN = "not-for-a-file"
SERVE = ServeConfig(token=TOKEN, spool_dir=None)
QUIET = MonitorConfig(console=False, exit_wait_seconds=0, sinks={"api": {}}, serve=SERVE)
TLS = TlsServer(cert_file=Path("cert.pem"), key_file=Path("key.pem"))
EVENT = Event(type="anomaly", message="it is NaN", rule="nan", tensor="w", kind="grad_reduced", op="nans", value=1.0)
Factory = Callable[[pytest.FixtureRequest], Any]

DATA: tuple[Any, ...] = (
    *(Address("127.0.0.1", 9470), AnomalyNan(threshold=3.0), AnomalyTurbulence(threshold=3.0)),
    *(ScoreRule(name="Mine", score="param_after.norm", above=1.0), parse("param_after.norm")),
    *(CurveRule(name="Reward", ratio=3.0, names=("reward",)), CaptureConfig(steps=3), EVENT, HardwareConfig(), QUIET),
    Anomaly(run="r", rank=1, step=2, events=(EVENT,), samples=(3,)),
    EndedRun(run="r", rank=0, source="records", is_stored=True),
    FlopCount(1e9, tokens=3, samples=2, unknown=("aten::sort",)),
    *(Row(3, entry(), {**FINITE}), ServeConfig(token=TOKEN), ThroughputConfig(), TLS, entry()),
    *(kind.options_class() for kind in quantity_classes().values()),  # type: ignore[misc]
    *(ConfigError("every is a number"), CountError("no tokens"), RankscopeError("something")),
)


def attached(request: pytest.FixtureRequest, config: MonitorConfig = QUIET) -> Monitor:
    net = Holding()
    monitor = Monitor(config, on_anomaly=lambda _: None)
    monitor.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    request.addfinalizer(monitor.detach)
    assert monitor.address is not None
    return monitor


def phase(request: pytest.FixtureRequest) -> PhaseContext:
    entered = attached(request).phase("evaluation")
    return entered.__enter__()


def trainer_mon(request: pytest.FixtureRequest) -> TrainerMon:
    path = request.getfixturevalue("tmp_path") / "monitor_config.json"
    path.write_text('{"targets": {"body": {}}, "format": "api", "ops": ["norm"]}')
    net = Holding()
    monitor = TrainerMon(path, process_group=None)
    monitor.set_monitor(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    request.addfinalizer(monitor.detach)
    return monitor


def callback_class(module: str) -> type[Any]:
    return importlib.import_module(f"rankscope_exporter.integrations.{module}").RankscopeCallback


def callback_of(module: str) -> Factory:
    def make(request: pytest.FixtureRequest) -> Any:
        made = callback_class(module)(QUIET)
        net = Holding()
        made.begin(net, torch.optim.SGD(net.parameters(), lr=0.1), first_step=1, total_steps=None)
        made.enter_phase("evaluation")
        request.addfinalizer(made.end)
        return made

    return make


def sink_of(kind: type[Sink]) -> Factory:
    def make(request: pytest.FixtureRequest) -> Sink:
        folder = str(request.getfixturevalue("tmp_path") / "sink")
        names = {item.name for item in fields(kind.options_class)}
        sink = kind(kind.options_class(**({"folder": folder} if "folder" in names else {})), identity())
        sink.put(record(1, (entry(), FINITE)))
        return sink

    return make


OUR_SINKS = [kind for kind in sink_classes().values() if kind.__module__.startswith("rankscope")]
"""The sinks of Rankscope, without those that other tests in this process define."""
CALLBACKS: dict[str, Factory] = {name: callback_of(name) for name in ("huggingface", "lightning")}
"""The callbacks by module. A trainer is imported when a test needs it, because each test process collects this file."""
SINKS: dict[type[Any], Factory] = {kind: sink_of(kind) for kind in OUR_SINKS}
LIVE: dict[Any, Factory] = {Monitor: attached, PhaseContext: phase, TrainerMon: trainer_mon, **CALLBACKS, **SINKS}
UNIMPORTED = {"Monitor": Monitor, "Location": Path, "SparkConnection": object}
"""Types that modules import only for the checker of types. Spark, which is not installed here, has no copies."""
ELSEWHERE = {Connection: "tests/storage/connection/test_connection.py", OpenedRun: "tests/cli/test_report.py"}
ABSTRACT = {Sink, CopiesDoNothing, OpenPhases}
"""Base classes of the classes above, and a part of the monitor."""


def copies(made: Any) -> dict[str, Any]:
    return {way: copy_of(made) for way, copy_of in WAYS.items()}


# All public classes.


def ours(hint: Any) -> Iterator[type[Any]]:
    for part in typing.get_args(hint):
        yield from ours(part)
    if inspect.isclass(hint) and hint.__module__.startswith("rankscope") and not typing.get_args(hint):
        yield hint


def returned(found: Any) -> Iterator[type[Any]]:
    """Yield the classes that a public function, or the methods, properties and fields of a class, return."""
    members = inspect.getmembers(found) if inspect.isclass(found) else [(found.__name__, found)]
    functions = [getattr(member, "fget", member) for name, member in members if not name.startswith("_")]
    functions = [item for item in functions if isinstance(item, types.FunctionType)]
    functions = [item for item in functions if item.__module__.startswith("rankscope")]
    hints = [typing.get_type_hints(item, localns=UNIMPORTED).get("return") for item in functions]
    for hint in [*hints, *(typing.get_type_hints(found).values() if is_dataclass(found) else ())]:
        yield from ours(hint)


def public_classes() -> set[type[Any]]:
    found: set[type[Any]] = set()
    names = [(module, name) for module in (rankscope, rankscope_exporter) for name in module.__all__]
    waiting = [getattr(module, name) for module, name in names if not name.startswith("__")]
    waiting += [*map(callback_class, CALLBACKS), *OUR_SINKS]
    while waiting:
        item = waiting.pop()
        new = set(returned(item)) | ({item} if inspect.isclass(item) else set())
        waiting += [kind for kind in new - found - {*ELSEWHERE} if kind is not item]
        found |= new
    return {kind for kind in found if not (issubclass(kind, str) or getattr(kind, "_is_protocol", False))}


@pytest.mark.filterwarnings("ignore")
def test_every_public_class_is_covered_by_a_copy_test():
    callbacks = {callback_class(name) for name in CALLBACKS}
    known = {*map(type, DATA), *LIVE, *ELSEWHERE, *ABSTRACT, *callbacks} - {*CALLBACKS}
    found = public_classes()

    assert set() == {kind for kind in found - known if not any(issubclass(one, kind) for one in known)}
    assert {Monitor, TrainerMon, Connection, Row, PhaseContext, Anomaly, *callbacks, *SINKS} <= found


# Data: a copy is complete.


@pytest.mark.parametrize("made", DATA, ids=lambda made: type(made).__name__)
def test_copy_of_data_is_equal(made):
    for way, copied in copies(made).items():
        assert type(made) is type(copied), way
        assert str(made) == str(copied), way
        assert made == copied or isinstance(made, Exception), way
        assert getattr(made, "__dict__", None) == getattr(copied, "__dict__", None), way


# Objects of a training: a copy is inactive.


def names_of(made: Any) -> set[str]:
    return {name for name in dir(made) if not name.startswith("_")}


@pytest.mark.parametrize(
    "kind", LIVE, ids=lambda kind: kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
)
def test_copy_has_all_attributes_and_is_inactive(kind, request):
    """Also within a model. The file of the model does not contain the token."""
    made = LIVE[kind](request)
    model = Holding(made)
    threads = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, models = copies(made), copies(model)

    for way, copied in found.items():
        assert (type(made), names_of(made)) == (type(copied), names_of(copied)), way
        assert (False, True) == (made.is_copy, copied.is_copy), way
        assert way == "copy.copy" or models[way].held.is_copy
        assert torch.equal(model(torch.ones(1, 3)), models[way](torch.ones(1, 3))), way
    assert set(threading.enumerate()) <= threads
    assert TOKEN.encode() not in pickle.dumps(model)


CALLS: Mapping[str, Callable[[Monitor], Any]] = {
    "attach": lambda monitor: monitor.attach(Holding(), ()),
    "batch": lambda monitor: monitor.batch([1, 2]),
    "event": lambda monitor: monitor.event("note", "text", detail=1),
    "log": lambda monitor: monitor.log(loss=1.0, step=3),
    "phase": lambda monitor: monitor.phase("evaluation"),
    "end_of_process": lambda monitor: monitor.end_of_process(ExitReason.COMPLETED, None),
    "sink": lambda monitor: monitor.sink("api"),
    "remark": lambda monitor: monitor.remark("text"),
    "switch": lambda monitor: monitor.switch({"no such setting": 1}, on=False),
}
"""Calls of the methods of a monitor; methods that are not listed are called without arguments."""
NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("address", "batch", "detach", "dump_stacks", "end_of_process", "end_step", "ended", "event")),
    **dict.fromkeys(("log", "remark", "run", "switch")),
    "current": (),
    "faults": 0,
    "is_copy": True,
    "measuring": {},
    "overhead_seconds": {},
    "structure": "",
}
"""Results of methods and attributes of a copied monitor, except those that return an object of Rankscope."""


@pytest.mark.parametrize("way", ["copy.deepcopy", "pickle"])
def test_every_method_of_a_copied_monitor_has_no_effect(way, request, caplog):
    monitor = attached(request)
    before = monitor.address, monitor.run
    copied = WAYS[way](monitor)
    threads = set(threading.enumerate())
    answers: dict[str, Any] = {}
    with caplog.at_level(logging.WARNING, "rankscope"):
        for name in sorted(names_of(copied)):
            member = getattr(copied, name)
            answers[name] = CALLS[name](copied) if name in CALLS else member() if callable(member) else member
    objects = {name: answers.pop(name) for name in ("attach", "config", "phase", "sink")}
    with objects["phase"], copied:
        copied.log(loss=2.0)
    attach = "attach() on a copy of a Monitor has no effect: create a Monitor in the process that trains"

    assert (NOTHING, [attach]) == (answers, caplog.messages)
    assert copied is objects["attach"]
    assert QUIET.without_secrets() == objects["config"]
    assert () == objects["sink"].rows()
    assert set(threading.enumerate()) <= threads
    assert before == (monitor.address, monitor.run)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_makes_a_report_unless_it_is_turned_off(name):
    """Here, because only this file and the long tests of trainers import all trainers."""
    kind = callback_class(name)
    choices = [kind(QUIET), kind(QUIET, report=False), kind(QUIET, report="end.html")]

    assert [True, False, "end.html"] == [callback._report for callback in choices]


def test_attributes_of_a_subclass_are_copied():
    class Own(Monitor):
        def __init__(self) -> None:
            super().__init__(QUIET, total_steps=7)
            self.notes = ["a"]

    made = Own()
    copied = copy.deepcopy(made)
    copied.notes.append("b")

    assert (Own, ["a"], ["a", "b"]) == (type(copied), made.notes, copied.notes)


def test_original_continues_after_copies_are_used_and_deleted():
    model = Holding()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.held = monitor = Monitor(QUIET)
    with monitor.attach(model, optimizer):
        step(model, optimizer)
        models, optimizers = copies(model), [copy.deepcopy(optimizer), saved(optimizer)]
        del models["copy.copy"]  # which shares the attributes
        for copied in models.values():
            with copied.held:
                step(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
            copied.held.detach()
        for other in optimizers:
            other.step()
        del copied, models, optimizers
        gc.collect()
        model(torch.ones(5, 3)).square().sum().backward()
        rows = monitor.current("grad_reduced")

        assert {(2, name) for name, _ in model.named_parameters()} == {(row.step, row.entry.tensor) for row in rows}
        assert 0 == monitor.faults
        assert monitor.address is not None


def test_training_with_copies_is_bit_identical():
    def train(*, watched: bool) -> list[torch.Tensor]:
        model = Holding()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model.held = Monitor(QUIET)
        if watched:
            model.held.attach(model, optimizer)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(4):
            step(model, optimizer)
            average.update_parameters(model)
            saved(model)
        model.held.detach()
        return [*model.state_dict().values(), *average.state_dict().values()]

    assert all(map(torch.equal, train(watched=False), train(watched=True)))


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_model_in_a_spawned_process_trains_without_monitoring(request):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=train_elsewhere, args=(Holding(attached(request)), results), daemon=True)
    worker.start()
    alone = Holding()
    step(alone, torch.optim.SGD(alone.parameters(), lr=0.1))

    assert (True, None, 0, alone.body[0].weight.tolist()) == results.get(timeout=120)
    worker.join(30)


# The other objects.


def test_copied_trainer_mon_is_inactive(request, caplog):
    made = trainer_mon(request)
    for copied in copies(made).values():
        net = Holding()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rankscope"):
            copied.set_monitor(net, optimizer=optimizer)
            copied.monitor_gnorm_with_ad(net, optimizer=optimizer)
        copied.set_wrapped_optimizer(optimizer)
        copied.ops = ["max"]
        copied.reload_xy(True)
        copied.detach()

        assert 2 == len(caplog.messages)
        assert (True, None) == (copied.monitor.is_copy, copied.monitor.address)
        assert ({}, {}) == copied.generate_wgrad_metrics() == copied.generate_xy_metrics()
        assert (["norm"], 0) == (copied.ops, copied.faults)
        assert not net.body[0]._forward_hooks
    assert made.monitor.address is not None


METRICS: dict[str, torch.Tensor] = {}
ARGS = (types.SimpleNamespace(world_size=1), types.SimpleNamespace(max_steps=3, global_step=0, num_input_tokens_seen=0))
TRAINER = types.SimpleNamespace(callback_metrics=METRICS, global_step=1)
CONTROL = types.SimpleNamespace(should_evaluate=True, should_save=True)
OF_TRAINER: dict[str, Callable[[Any, Holding], object]] = {
    "huggingface": lambda copied, net: [
        copied.on_train_begin(*ARGS, CONTROL, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)),
        copied.on_step_begin(*ARGS, CONTROL),
        copied.on_step_end(*ARGS, CONTROL),
        copied.on_log(*ARGS, CONTROL, logs={"loss": 1.0}),
        copied.on_evaluate(*ARGS, CONTROL),
        copied.on_train_end(*ARGS, CONTROL),
    ],
    "lightning": lambda copied, net: [
        copied.on_train_start(TRAINER, net),
        copied.on_train_batch_start(TRAINER, net, None, 0),
        copied.on_before_backward(TRAINER, net, torch.ones(())),
        copied.on_train_batch_end(TRAINER, net, torch.ones(()), None, 0),
        copied.on_validation_start(TRAINER, net),
        METRICS.update({"loss of evaluation": torch.ones(())}),
        copied.on_validation_end(TRAINER, net),
        copied.on_save_checkpoint(TRAINER, net, {}),
        copied.on_exception(TRAINER, net, ValueError("x")),
        copied.on_train_end(TRAINER, net),
    ],
}
"""The calls of each trainer, in order."""


@pytest.mark.parametrize("trainer", OF_TRAINER)
def test_copied_callback_is_inactive(trainer, request, caplog):
    made = LIVE[trainer](request)
    for copied in copies(made).values():
        net = Holding()
        caplog.clear()
        METRICS.clear()
        with caplog.at_level(logging.WARNING, "rankscope"):
            OF_TRAINER[trainer](copied, net)

        assert 1 == len(caplog.messages)
        assert copied.monitor is None
        assert not net._forward_pre_hooks
        assert set() == getattr(made, "_of_evaluation", set())
    assert made.monitor.address is not None


@pytest.mark.parametrize("kind", SINKS, ids=lambda kind: kind.__name__)
def test_copied_sink_receives_no_records(kind, request, tmp_path):
    made = SINKS[kind](request)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for copied in copies(made).values():
        copied.put(record(2, (entry(), FINITE), events=(EVENT,)))
        copied.close()

        assert (made.name, made.options_class) == (copied.name, copied.options_class)
        assert kind.name != "api" or ((1,), ()) == (made.steps(), copied.steps())
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_copied_phase_does_not_change_the_phases_of_the_original(request):
    monitor = attached(request)
    entered = monitor.phase("evaluation")
    with entered:
        copied = copy.deepcopy(entered)
        with copied:
            pass
        copied.__exit__(None, None, None)

        assert ["evaluation"] == monitor._phases.names
    assert [] == monitor._phases.names


def test_model_and_tensors_with_hooks_are_saved_without_a_warning():
    model = Holding()
    config = {"quantities": ["activations", "structure", "micro_gradients"], "console": False, "exit_wait_seconds": 0}
    given = torch.ones(5, 3, requires_grad=True)
    with Monitor(config).attach(model, torch.optim.SGD(model.parameters(), lr=0.1)), warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model(given)
        tensors = [saved(given), copy.copy(given), saved(model.body[0].weight)]
        output.sum().backward()
        file = pickle.dumps(model)

    assert b"rankscope" not in file
    assert all(map(torch.equal, [given, given, model.body[0].weight], tensors))
    assert not any(item._backward_hooks for item in tensors)
