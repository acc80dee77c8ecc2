"""Tests that each object of the public API can be copied and saved. Copies of training objects are inactive."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
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
from tests.exporter.base.copied_objects import WAYS, Holding, saved, step, train_elsewhere
from tests.exporter.sinks.records import FINITE, entry, identity, record

import rankscope
import rankscope_exporter
from rankscope.reports import OpenedRun
from rankscope_contract.model.events import Event
from rankscope_contract.rules.curve import CurveRule
from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_contract.security.web_config import TlsServer, WebConfig
from rankscope_exporter import Anomaly, CaptureConfig, ConfigError, Monitor, MonitorConfig, RankscopeError, ServeConfig
from rankscope_exporter.api.monitor import OpenPhases, Phase
from rankscope_exporter.api.session_end import EndedRun
from rankscope_exporter.base.copies import CopiesDoNothing
from rankscope_exporter.base.errors import CountError
from rankscope_exporter.compat.msprobe import TrainerMon
from rankscope_exporter.config.sections import HardwareConfig
from rankscope_exporter.observers.throughput.costs import ThroughputConfig
from rankscope_exporter.observers.throughput.flop_counter import FlopCount
from rankscope_exporter.quantities import quantity_classes
from rankscope_exporter.serving.config import Address
from rankscope_exporter.sinks import Sink, sink_classes
from rankscope_exporter.sinks.memory import Row
from rankscope_storage.connection import Connection

TOKEN = "not-for-a-file"
QUIET = MonitorConfig(
    console=False, exit_wait_seconds=0, sinks={"api": {}}, serve=ServeConfig(token=TOKEN, spool_dir=None)
)
TLS = TlsServer(cert_file=Path("cert.pem"), key_file=Path("key.pem"))
EVENT = Event(type="anomaly", message="it is NaN", rule="nan", tensor="w", kind="grad_reduced", op="nans", value=1.0)
Factory = Callable[[pytest.FixtureRequest], Any]

DATA: dict[type[Any], Factory] = {
    Address: lambda _: Address("127.0.0.1", 9470),
    Anomaly: lambda _: Anomaly(run="r", rank=1, step=2, events=(EVENT,), samples=(3,)),
    AnomalyNan: lambda _: AnomalyNan(threshold=3.0),
    AnomalyTurbulence: lambda _: AnomalyTurbulence(threshold=3.0),
    CurveRule: lambda _: CurveRule(name="Reward", ratio=3.0, names=("reward",)),
    CaptureConfig: lambda _: CaptureConfig(steps=3),
    EndedRun: lambda _: EndedRun(run="r", rank=0, source="records", is_stored=True),
    Event: lambda _: EVENT,
    FlopCount: lambda _: FlopCount(1e9, tokens=3, samples=2, unknown=("aten::sort",)),
    HardwareConfig: lambda _: HardwareConfig(),
    MonitorConfig: lambda _: QUIET,
    Row: lambda _: Row(3, entry(), {**FINITE}),
    ServeConfig: lambda _: ServeConfig(token=TOKEN),
    ThroughputConfig: lambda _: ThroughputConfig(),
    TlsServer: lambda _: TLS,
    WebConfig: lambda _: WebConfig(tls=TLS, users={"reader": "hash"}),
    type(entry()): lambda _: entry(),
    **{kind.options_class: lambda _, kind=kind: kind.options_class() for kind in quantity_classes().values()},  # type: ignore[misc]
}
ERRORS: dict[type[Any], Factory] = {
    ConfigError: lambda _: ConfigError("every is a number"),
    CountError: lambda _: CountError("no tokens"),
    RankscopeError: lambda _: RankscopeError("something"),
}


def attached(request: pytest.FixtureRequest, config: MonitorConfig = QUIET) -> Monitor:
    net = Holding()
    monitor = Monitor(config, on_anomaly=lambda _: None)
    monitor.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    request.addfinalizer(monitor.detach)
    assert monitor.address is not None
    return monitor


def phase(request: pytest.FixtureRequest) -> Phase:
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


def callback_of(module: str) -> Factory:
    """Return a function that creates a trainer callback during a training."""

    def make(request: pytest.FixtureRequest) -> Any:
        made = importlib.import_module(f"rankscope_exporter.integrations.{module}").RankscopeCallback(QUIET)
        net = Holding()
        made._attended.begin(net, torch.optim.SGD(net.parameters(), lr=0.1), first_step=1, total_steps=None)
        made._attended.enter_phase("evaluation")
        request.addfinalizer(made._attended.end)
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


def _callback(module: str) -> type[Any]:
    kind: type[Any] = importlib.import_module(f"rankscope_exporter.integrations.{module}").RankscopeCallback
    return kind


OUR_SINKS = [kind for kind in sink_classes().values() if kind.__module__.startswith("rankscope")]
"""The sinks of Rankscope, without those that other tests in this process define."""
CALLBACKS: dict[str, Factory] = {name: callback_of(name) for name in ("huggingface", "lightning")}
"""The callbacks by module. A trainer is imported when a test needs it, because each test process collects this file."""
SINKS: dict[type[Any], Factory] = {kind: sink_of(kind) for kind in OUR_SINKS}
LIVE: dict[type[Any] | str, Factory] = {
    Monitor: attached,
    Phase: phase,
    TrainerMon: trainer_mon,
    **CALLBACKS,
    **SINKS,
}
ELSEWHERE = {
    Connection: "tests/storage/connection/test_connection.py",
    OpenedRun: "tests/cli/test_report.py",
}
ABSTRACT = {Sink, CopiesDoNothing, OpenPhases}
"""Base classes of the classes above, and a part of the monitor."""


# All public classes.


def public_objects() -> Iterator[Any]:
    for module in (rankscope, rankscope_exporter):
        yield from (getattr(module, name) for name in module.__all__ if not name.startswith("__"))
    yield from map(_callback, CALLBACKS)
    yield from OUR_SINKS


def ours(hint: Any) -> Iterator[type[Any]]:
    """Yield the classes of this package that a type hint names."""
    for part in typing.get_args(hint):
        yield from ours(part)
    if inspect.isclass(hint) and hint.__module__.startswith("rankscope") and not typing.get_args(hint):
        yield hint


def returned(found: Any) -> Iterator[type[Any]]:
    """Yield the classes that public functions, methods, properties and fields return."""
    if not inspect.isclass(found):
        # A reader of a store imports the monitor only for its type hints.
        yield from ours(typing.get_type_hints(found, localns={"Monitor": Monitor}).get("return"))
        return
    if is_dataclass(found):
        for hint in typing.get_type_hints(found).values():
            yield from ours(hint)
    for name, member in inspect.getmembers(found):
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not isinstance(function, types.FunctionType):
            continue
        if function.__module__.startswith("rankscope"):
            with warnings.catch_warnings():
                yield from ours(typing.get_type_hints(function).get("return"))


def public_classes() -> set[type[Any]]:
    """Return the classes of the public API and the classes that they return."""
    found: set[type[Any]] = set()
    waiting = list(public_objects())
    while waiting:
        item = waiting.pop()
        new = set(returned(item)) | ({item} if inspect.isclass(item) else set())
        waiting += [kind for kind in new - found - {*ELSEWHERE} if kind is not item]
        found |= new
    return {kind for kind in found if not (issubclass(kind, str) or getattr(kind, "_is_protocol", False))}


def test_every_public_class_is_covered_by_a_copy_test():
    callbacks = {_callback(name) for name in CALLBACKS}
    known = {*DATA, *ERRORS, *LIVE, *ELSEWHERE, *ABSTRACT, *callbacks} - {*CALLBACKS}
    missing = {kind for kind in public_classes() - known if not any(issubclass(one, kind) for one in known)}

    assert set() == missing
    assert {Monitor, TrainerMon, Connection, Row, Phase, Anomaly, *callbacks, *SINKS} <= public_classes()


# Data: a copy is complete.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)
def test_copy_of_data_is_equal(kind, way, request):
    made = DATA[kind](request)
    copied = WAYS[way](made)

    assert made == copied
    assert type(made) is type(copied)
    assert getattr(made, "__dict__", None) == getattr(copied, "__dict__", None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_copy_of_an_error_has_the_same_text(kind, way, request):
    made = ERRORS[kind](request)
    copied = WAYS[way](made)

    assert (type(made), str(made)) == (type(copied), str(copied))


# Objects of a training: a copy is inactive.


def live_id(kind: type[Any] | str) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"


def names_of(made: Any) -> set[str]:
    return {name for name in dir(made) if not name.startswith("_")}


@pytest.mark.usual(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LIVE, ids=live_id)
def test_copy_has_all_attributes_and_is_inactive(kind, way, request):
    made = LIVE[kind](request)
    threads = set(threading.enumerate())
    copied = WAYS[way](made)

    assert (type(made), names_of(made)) == (type(copied), names_of(copied))
    assert (False, True) == (made.is_copy, copied.is_copy)
    assert set(threading.enumerate()) <= threads


@pytest.mark.usual(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LIVE, ids=live_id)
def test_model_with_a_monitor_object_can_be_copied_and_saved(kind, way, request):
    model = Holding(LIVE[kind](request))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = WAYS[way](model)

    assert way == "copy.copy" or copied.held.is_copy
    assert torch.equal(model(torch.ones(1, 3)), copied(torch.ones(1, 3)))


ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "attach": ((Holding(), ()), {}),
    "batch": (([1, 2],), {}),
    "event": (("note", "text"), {"detail": 1}),
    "log": ((), {"loss": 1.0, "step": 3}),
    "phase": (("evaluation",), {}),
    "end_of_process": (("completed", None), {}),
    "sink": (("api",), {}),
    "remark": (("text",), {}),
    "switch": (({"quantities": ["parameters"]},), {"on": False}),
}
"""The arguments of each method of a monitor; methods that are not listed are called without arguments."""


NOTHING: Mapping[str, Any] = {
    "address": None,
    "batch": None,
    "current": (),
    "detach": None,
    "dump_stacks": None,
    "end_of_process": None,
    "end_step": None,
    "ended": None,
    "event": None,
    "faults": 0,
    "is_copy": True,
    "log": None,
    "measuring": {},
    "overhead_seconds": {},
    "remark": None,
    "run": None,
    "structure": "",
    "switch": None,
}
"""Results of methods and attributes of a copied monitor, except those that return an object of Rankscope."""


@pytest.mark.usual(2)
@pytest.mark.parametrize("way", WAYS)
def test_every_method_of_a_copied_monitor_has_no_effect(way, request):
    monitor = attached(request)
    before = monitor.address, monitor.run
    copied = WAYS[way](monitor)
    threads = set(threading.enumerate())
    answers: dict[str, Any] = {}
    for name in sorted(names_of(copied)):
        member = getattr(copied, name)
        arguments, named = ARGUMENTS.get(name, ((), {}))
        answers[name] = member(*arguments, **named) if callable(member) else member
    objects = {name: answers.pop(name) for name in ("attach", "config", "phase", "sink")}
    with objects["phase"], copied:
        copied.log(loss=2.0)

    assert NOTHING == answers
    assert copied is objects["attach"]
    assert QUIET.without_secrets() == objects["config"]
    assert () == objects["sink"].rows()
    assert set(threading.enumerate()) <= threads
    assert before == (monitor.address, monitor.run)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_makes_a_report_unless_it_is_turned_off(name):
    """Here, because only this file and the long tests of trainers import all trainers."""
    kind = _callback(name)
    choices = [kind(QUIET), kind(QUIET, report=False), kind(QUIET, report="end.html")]

    assert [True, False, "end.html"] == [callback._attended._report for callback in choices]


def test_attach_of_a_copy_is_logged_and_has_no_effect(request, caplog):
    copied = copy.copy(attached(request))
    with caplog.at_level(logging.WARNING, "rankscope"):
        copied.attach(Holding(), ())

    assert [
        "attach() on a copy of a Monitor has no effect: create a Monitor in the process that trains"
    ] == caplog.messages


def test_copy_rejects_no_configuration():
    copied = copy.copy(Monitor(QUIET))

    assert copied.switch({"no such setting": 1}) is None


def test_attributes_of_a_subclass_are_copied():
    class Own(Monitor):
        def __init__(self) -> None:
            super().__init__(QUIET, total_steps=7)
            self.notes = ["a"]

    made = Own()
    copied = copy.deepcopy(made)
    copied.notes.append("b")

    assert (Own, ["a"], ["a", "b"]) == (type(copied), made.notes, copied.notes)


@pytest.mark.parametrize("kind", [Monitor, *CALLBACKS], ids=live_id)
def test_saved_model_does_not_contain_the_token(kind, request):
    assert TOKEN.encode() not in pickle.dumps(Holding(LIVE[kind](request)))


@pytest.mark.usual(1)
@pytest.mark.parametrize("way", WAYS)
def test_original_continues_after_copies_are_used_and_deleted(way, request):
    model = Holding()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.held = monitor = Monitor(QUIET)
    with monitor.attach(model, optimizer):
        step(model, optimizer)
        copied, optimizers = WAYS[way](model), [copy.deepcopy(optimizer), saved(optimizer)]
        if way != "copy.copy":  # which shares the attributes
            with copied.held:
                step(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
            copied.held.detach()
        for other in optimizers:
            other.step()
        del copied, optimizers
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
    model = Holding(attached(request))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=train_elsewhere, args=(model, results), daemon=True)
    worker.start()
    is_copy, address, run, faults, weight = results.get(timeout=120)
    worker.join(30)
    alone = Holding()
    step(alone, torch.optim.SGD(alone.parameters(), lr=0.1))

    assert (True, None, None, 0) == (is_copy, address, run, faults)
    assert alone.body[0].weight.tolist() == weight


# The other objects.


@pytest.mark.usual(2)
@pytest.mark.parametrize("way", WAYS)
def test_copied_trainer_mon_is_inactive(way, request, caplog):
    made = trainer_mon(request)
    copied = WAYS[way](made)
    net = Holding()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
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


@pytest.mark.usual(2)
@pytest.mark.parametrize("way", WAYS)
def test_copied_transformers_callback_is_inactive(way, request, caplog):
    made = LIVE["huggingface"](request)
    copied = WAYS[way](made)
    state = types.SimpleNamespace(max_steps=3, global_step=0, num_input_tokens_seen=0)
    control = types.SimpleNamespace(should_evaluate=True, should_save=True)
    args = types.SimpleNamespace(world_size=1)
    net = Holding()
    with caplog.at_level(logging.WARNING, "rankscope"):
        copied.on_train_begin(args, state, control, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    copied.on_step_begin(args, state, control)
    copied.on_step_end(args, state, control)
    copied.on_log(args, state, control, logs={"loss": 1.0})
    copied.on_evaluate(args, state, control)
    copied.on_train_end(args, state, control)

    assert 1 == len(caplog.messages)
    assert copied._attended.monitor is None
    assert not net._forward_pre_hooks
    assert made._attended.monitor.address is not None


@pytest.mark.usual(2)
@pytest.mark.parametrize("way", WAYS)
def test_copied_lightning_callback_is_inactive(way, request, caplog):
    made = LIVE["lightning"](request)
    copied = WAYS[way](made)
    metrics: dict[str, torch.Tensor] = {}
    trainer = types.SimpleNamespace(callback_metrics=metrics, global_step=1)
    net = Holding()
    with caplog.at_level(logging.WARNING, "rankscope"):
        copied.on_train_start(trainer, net)
    copied.on_train_batch_start(trainer, net, None, 0)
    copied.on_before_backward(trainer, net, torch.ones(()))
    copied.on_train_batch_end(trainer, net, torch.ones(()), None, 0)
    copied.on_validation_start(trainer, net)
    metrics["loss of evaluation"] = torch.ones(())
    copied.on_validation_end(trainer, net)
    copied.on_save_checkpoint(trainer, net, {})
    copied.on_exception(trainer, net, ValueError("x"))
    copied.on_train_end(trainer, net)

    assert 1 == len(caplog.messages)
    assert copied._attended.monitor is None
    assert set() == made._of_evaluation
    assert made._attended.monitor.address is not None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SINKS, ids=lambda kind: kind.__name__)
def test_copied_sink_receives_no_records(kind, way, request, tmp_path):
    made = SINKS[kind](request)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    copied = WAYS[way](made)
    copied.put(record(2, (entry(), FINITE), events=(EVENT,)))
    copied.close()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    assert before == after
    assert (made.name, made.options_class) == (copied.name, copied.options_class)
    assert kind.name != "api" or ((1,), ()) == (made.steps(), copied.steps())


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


def test_phase_decorator_enters_the_phase_once_per_call(request):
    monitor = attached(request)
    seen: list[list[str]] = []

    @monitor.phase("evaluation")
    def evaluate(again: bool) -> None:
        seen.append(list(monitor._phases.names))
        if again:
            evaluate(False)

    evaluate(True)

    assert [["evaluation"], ["evaluation", "evaluation"]] == seen
    assert [] == monitor._phases.names


def test_tensor_with_monitor_hooks_is_saved_without_a_warning(request):
    model = Holding()
    config = {"quantities": ["activations", "structure", "micro_gradients"], "console": False, "exit_wait_seconds": 0}
    given = torch.ones(5, 3, requires_grad=True)
    with Monitor(config).attach(model, torch.optim.SGD(model.parameters(), lr=0.1)), warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model(given)
        copies = [saved(given), copy.copy(given), saved(model.body[0].weight)]
        output.sum().backward()

    assert all(map(torch.equal, [given, given, model.body[0].weight], copies))
    assert not any(item._backward_hooks for item in copies)
