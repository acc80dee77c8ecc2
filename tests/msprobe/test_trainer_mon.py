"""The calls of msprobe scripts, in both argument orders: they work, and none of them disturbs training."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.msprobe.monitored_runs import LONG_SECONDS, QUIET, Run, adam, batch, left, model, train, write
from tests.programs import run_command, run_program
from torch import nn

from rankscope import TrainerMon
from rankscope_exporter import ConfigError
from rankscope_exporter.api import session
from rankscope_msprobe.trainer_mon import Attachment, Construction, first_step, wrong_hints

NET = model()
EVERYTHING = {"wg_distribution": True, "xy_distribution": True, "ops": ["norm", "nans"]}


def attached(folder: Path, *arguments: Any, net: nn.Module, construction: tuple[Any, ...] = (), **document: Any) -> Run:
    """Train two steps under a monitor that is attached with `arguments`."""
    path = write(folder / "monitor_config.json", {**QUIET, "format": "api", "wg_distribution": True, **document})
    monitor = TrainerMon(path, *construction)
    monitor.set_monitor(*arguments)
    optimizer = next(item for item in arguments if hasattr(item, "step"))
    for _ in range(2):
        net(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.monitor is not None
    return left(monitor.monitor, net, folder, monitor.faults)


def unattached(folder: Path) -> TrainerMon:
    return TrainerMon(write(folder / "c.json", {**QUIET, "format": "api", "wg_distribution": True}))


def test_wrapped_optimizer_and_first_step_are_accepted(tmp_path, group):
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.step, self.zero_grad = optimizer, optimizer.step, optimizer.zero_grad

    net = model()
    run = attached(tmp_path, [net], 1, Wrapper(adam(net)), group, None, 10, net=net, mv_distribution=True)

    assert {"exp_avg", "exp_avg_sq"} <= run.kinds()
    assert ([11, 12], 0) == (run.steps(), run.faults), "the tool's steps 10 and 11"


def test_wrong_hints_are_reported_once_and_change_no_number(tmp_path):
    net, hints = model(), (None, True, "Megatron_DistributedOptimizer")
    run = attached(tmp_path, [net, nn.Linear(2, 2)], adam(net), net=net, construction=hints)

    several = "the 2 models are no chunks that Megatron-Core's DDP wraps, and the first is monitored"
    assert [
        "params_have_main_grad=True, but no parameter has a main_grad: gradients are read from .grad",
        "opt_ty='Megatron_DistributedOptimizer', but the optimizer is a AdamW, and is read as one",
        f"{several}: make a TrainerMon for each",
    ] == run.said()
    assert [1, 2] == run.steps("grad_reduced")


@pytest.mark.parametrize("call", ["set_monitor", "monitor_gnorm_with_ad"])
def test_attach_errors_are_raised_before_training(call, tmp_path):
    monitor = unattached(tmp_path)
    with pytest.raises(ConfigError, match=f"{call} needs the optimizer"):
        getattr(monitor, call)(model())

    assert monitor.monitor is None


def test_old_names_work_with_one_deprecation_line_each(tmp_path):
    net = model()
    optimizer = adam(net)
    monitor = unattached(tmp_path)
    monitor.ops = ["max"]  # applies to the first step
    assert ["max"] == monitor.ops
    for _ in range(2):
        monitor.set_wrapped_optimizer(optimizer)
    monitor.monitor_gnorm_with_ad(net, 1, None, None, None, 0)
    for step in range(4):
        net(batch()).square().mean().backward()
        if step % 2:
            monitor.reload_xy(xy_distribution=step == 1)
        else:
            monitor.ops = ["min"]
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.monitor is not None
    run = left(monitor.monitor, net, tmp_path, monitor.faults)
    deprecated = [sentence.partition(" is deprecated: ")[0] for sentence in run.said()]

    assert ["monitor.ops = […]", "set_wrapped_optimizer", "monitor_gnorm_with_ad", "reload_xy"] == deprecated
    assert {"max"} == {op for row in run.rows if row.step == 1 for op in ("max", "norm") if row.numbers[op] is not None}
    assert 0 == run.faults


def test_second_model_is_rejected_with_a_remark(tmp_path):
    said = train(tmp_path, {"wg_distribution": True}, during=lambda _, one: one.set_monitor(NET, adam(NET))).said()

    assert ["set_monitor was called before, and the first model remains attached"] == [
        sentence.partition(": create a TrainerMon")[0] for sentence in said
    ]


# The getters.


def test_getters_return_the_statistics_of_the_current_step(tmp_path):
    seen = []

    def look(step: int, monitor: TrainerMon) -> None:
        reduced, unreduced = monitor.generate_wgrad_metrics()
        actv, actv_grad = monitor.generate_xy_metrics()
        gradient = net.head.weight.grad
        assert gradient is not None
        expected = [pytest.approx(float(tensor.double().norm()), rel=1e-5) for tensor in (gradient, batch(step))]
        assert expected[0] == float(reduced["0:head.weight/rank0/post_grad"]["norm"])
        assert expected[0] == float(unreduced["0:head.weight/rank0/acc_grad"]["norm"])
        assert expected[1] == float(actv["0:.input:0/rank0/actv"]["norm"])
        assert {"0:layers.0.output_0:0/rank0/actv", "0:layers.0.output_1:0/rank0/actv"} <= set(actv)
        assert "0:head.output:0/rank0/actv_grad" in actv_grad
        assert {("norm", "nans")} == {tuple(numbers) for numbers in (*reduced.values(), *actv.values())}
        seen.append(step)

    net = model()
    run = train(tmp_path, EVERYTHING, net=net, during=look)

    assert ([1, 2], 0) == (seen, run.faults)


def test_getters_change_neither_records_nor_training(tmp_path):
    def look(_step: int, monitor: TrainerMon) -> None:
        monitor.generate_wgrad_metrics()
        monitor.generate_xy_metrics()

    document = {**EVERYTHING, "mv_distribution": True, "param_distribution": True}
    looked, alone = (train(tmp_path, document, steps=3, **during) for during in ({"during": look}, {}))
    bare = model()
    optimizer = adam(bare)
    for step in (1, 2, 3):
        bare(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    rows, others = ([(row.step, row.entry, row.numbers) for row in run.rows] for run in (looked, alone))
    assert rows == others
    for net in (alone.net, looked.net):
        assert all(map(torch.equal, bare.parameters(), net.parameters()))


def test_getter_returns_the_last_measured_step(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "CATCH_UP_SECONDS", LONG_SECONDS)
    norms = []

    def look(_step: int, monitor: TrainerMon) -> None:
        reduced, _ = monitor.generate_wgrad_metrics()
        norms.append(float(reduced["0:head.bias/rank0/post_grad"]["norm"]) if reduced else None)

    run = train(tmp_path, {"wg_distribution": True, "start_step": 1, "step_interval": 9}, steps=3, during=look)
    entries = {(row.entry.tensor, row.entry.kind): row.numbers["norm"] for row in run.rows}
    measured = pytest.approx(entries["head.bias", "grad_reduced"])

    assert [2] == run.steps()
    assert [None, measured, measured] == norms


def test_getters_return_nan_with_a_nan_and_zeros_as_a_share(tmp_path):
    found: dict[str, float] = {}

    def look(_step: int, monitor: TrainerMon) -> None:
        numbers = monitor.generate_xy_metrics()[0]["0:.input:0/rank0/actv"]
        found.update({op: float(value) for op, value in numbers.items()})

    inputs = torch.tensor([[[math.nan, 0.0, 0.0, 2.0]]])
    document = {"xy_distribution": True, "ops": ["norm", "mean", "nans", "zeros"]}
    train(tmp_path, document, steps=1, net=nn.Linear(4, 2), inputs=lambda _step: inputs, during=look)

    assert (1.0, 0.5) == (found["nans"], found["zeros"])
    assert math.isnan(found["norm"])
    assert math.isnan(found["mean"])


def test_getters_are_empty_without_a_measurement_and_after_an_error(tmp_path, monkeypatch):
    def fails(step: int, monitor: TrainerMon) -> None:
        assert ({}, {}) == monitor.generate_xy_metrics()
        if step == 2:
            monkeypatch.setattr(monitor.monitor, "current", lambda *_: 1 / 0, raising=True)
            assert ({}, {}) == monitor.generate_wgrad_metrics({})

    monitor = unattached(tmp_path)
    assert ({}, {}) == monitor.generate_wgrad_metrics() == monitor.generate_xy_metrics()
    assert 1 == train(tmp_path, {"wg_distribution": True}, during=fails).faults


# Changes while training runs.


def test_new_ops_are_published_from_the_next_step_on(tmp_path):
    """Invalid ones are reported without an error."""

    def change(step: int, monitor: TrainerMon) -> None:
        assert (["norm", "nans"] if step == 1 else ["max"]) == monitor.ops
        monitor.ops = ["max"]
        monitor.ops = ["norm", "nons"]
        monitor.ops = "norm"  # type: ignore[assignment]  # a mistake
        assert ["max"] == monitor.ops

    run = train(tmp_path, {"wg_distribution": True, "ops": ["norm", "nans"]}, during=change)
    known = {(row.step, op) for row in run.rows for op in ("norm", "max", "nans") if row.numbers[op] is not None}

    assert {(1, "norm"), (1, "nans"), (2, "max")} == known
    for reason in ("'nons' is not a statistic", "ops must be a list of statistics, not 'norm'"):
        assert 1 == len([sentence for sentence in run.said() if reason in sentence])


def test_reload_xy_switches_activations_with_the_configured_targets(tmp_path):
    document = {"wg_distribution": True, "targets": {"head": {"output": "tensor"}}}
    run = train(tmp_path, document, steps=3, during=lambda step, monitor: monitor.reload_xy(xy_distribution=step == 1))

    assert [2] == run.steps("act_out")
    assert {"head"} == run.names("act_out")
    assert [1, 2, 3] == run.steps("grad_reduced")
    assert {"act_out"} == run.kinds() - {"grad_reduced", "grad_unreduced"}


def test_pipeline_group_gives_stage_and_group_mates(tmp_path, group, output):
    net = nn.Linear(4, 2)
    document = {"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}}
    net.weight.data.fill_(math.nan)
    run = attached(tmp_path, net, adam(net), net=net, construction=(group,), **document)
    text = (output / "anomaly_detected/rank0/anomaly.json").read_text()

    assert '"pp_stage": 0' in text
    assert '"group_mates": [0]' in text
    assert {0} == {event.pp_stage for record in run.records for event in record.events if event.type == "anomaly"}


ORDERED = nn.Linear(2, 2)
SGD = torch.optim.SGD(ORDERED.parameters(), lr=0.1)
DATA, TENSOR = object(), object()


class Wrapper:
    """An optimizer around another one, as in DeepSpeed and Accelerate."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.step = optimizer, optimizer.step


class Index:
    """An integer type other than int, as in numpy."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


MEANT = Attachment(model=ORDERED, optimizer=SGD, grad_acc_steps=8, dp_group=DATA, tp_group=TENSOR, start_iteration=5)


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        ((ORDERED, 8, SGD, DATA, TENSOR, 5), ()),
        ((ORDERED, SGD, 8, TENSOR, DATA, 5), ()),
        ((ORDERED, 8, SGD, DATA), ("tp_group", "start_iteration")),
        ((ORDERED, 8), ("optimizer", "dp_group", "tp_group", "start_iteration")),
        ((), ("model", "optimizer", "grad_acc_steps", "dp_group", "tp_group", "start_iteration")),
    ],
)
def test_manual_and_code_argument_orders_are_equivalent(positional, named):
    given = Attachment.of("set_monitor", positional, {name: getattr(MEANT, name) for name in named})
    given.check("set_monitor")

    assert MEANT == given


@pytest.mark.parametrize("steps", [Index(8), torch.tensor(8), 8.0])
def test_any_number_type_decides_the_argument_order(steps):
    given = Attachment.of("set_monitor", (ORDERED, steps, SGD), {})
    given.check("set_monitor")

    assert (SGD, steps) == (given.optimizer, given.grad_acc_steps)
    assert [] == hints(grad_acc_steps=Index(8), start_iteration=torch.tensor(3))


@pytest.mark.parametrize(
    ("positional", "named", "words"),
    [
        ((ORDERED,), {}, "needs the optimizer"),
        ((), {"optimizer": SGD}, "needs the model"),
        ((SGD, ORDERED), {}, "are exchanged"),
        ((5, SGD), {}, "model must be a torch module or a list of its chunks, not a int"),
        (([ORDERED, 3], SGD), {}, "model must be a torch module or a list of its chunks, not a list of Linear, int"),
        (([], SGD), {}, "a list of nothing"),
        ((ORDERED, "adam"), {}, "optimizer must be a torch optimizer or wrap one, not a str"),
        ((ORDERED, SGD), {"optimizer": SGD}, "optimizer is given by position and by name"),
        ((ORDERED, SGD), {"grad_acc": 4}, "no argument 'grad_acc'; its arguments are model, optimizer, grad_acc_steps"),
        ((ORDERED, 8, SGD, None, None, 0, 1), {}, "takes 6 arguments by position, not 7"),
    ],
)
def test_wrong_argument_is_rejected_with_the_correct_form(positional, named, words):
    with pytest.raises(ConfigError, match=words):
        Attachment.of("set_monitor", positional, named).check("set_monitor")


GROUP = SimpleNamespace(rank=lambda: 0)
OPT = "Megatron_DistributedOptimizer"


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        ((GROUP, False, OPT), {}),
        ((False, OPT), {"process_group": GROUP}),
        ((), {"process_group": GROUP, "param_have_main_grad": False, "opt_ty": OPT}),
    ],
)
def test_constructor_accepts_old_and_new_orders(positional, named):
    assert Construction(process_group=GROUP, params_have_main_grad=False, opt_ty=OPT) == Construction.of(
        positional, named
    )


@pytest.mark.parametrize(
    ("positional", "named", "words"),
    [
        ((7,), {}, "process_group must be the process group of the pipeline or None, not 7"),
        ((), {"params_have_main_grad": "no"}, "params_have_main_grad must be True or False, not 'no'"),
        ((), {"main_grad": True}, "no argument 'main_grad'; its arguments are process_group"),
        ((None, True, "x", 4), {}, "TrainerMon takes config_file_path, process_group"),
        ((True,), {"params_have_main_grad": True}, "by position and by name"),
    ],
)
def test_wrong_constructor_argument_is_rejected(positional, named, words):
    with pytest.raises(ConfigError, match=words):
        Construction.of(positional, named)


def hints(*, said: Construction | None = None, **given: Any) -> list[str]:
    return list(wrong_hints(said or Construction(), Attachment(**{"model": ORDERED, "optimizer": SGD, **given})))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"said": Construction(opt_ty="adam")}, "opt_ty='adam' is none of Megatron_DistributedOptimizer"),
        ({"grad_acc_steps": 2.5}, "grad_acc_steps=2.5 is no number of micro-batches"),
        ({"start_iteration": "3"}, "start_iteration='3' is no number of a step"),
    ],
)
def test_wrong_hints_are_reported_without_an_error(given, words):
    (sentence,) = hints(**given)

    assert words in sentence


@pytest.mark.parametrize(
    ("given", "step"),
    [(0, 1), (41, 42), (torch.tensor(41), 42), (Index(41), 42), (-1, 1), (1.0, 1), (None, 1), (True, 1), (10**30, 1)],
)
def test_first_step_is_one_more_than_msprobes(given, step):
    assert step == first_step(Attachment(model=ORDERED, start_iteration=given))


SCRIPT = """
import sys, torch
from rankscope_msprobe.trainer_mon import TrainerMon
def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainerMon("config.json")
    monitor.set_monitor(model, optimizer=optimizer, grad_acc_steps=1)
    for step in range(4):
        model(torch.ones(1, 4) * (step + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            monitor.ops = ["max", "norm", "mean"]
    END
main()
"""


def trained(folder: Path, end: str) -> int:
    config = {"wg_distribution": True, "format": "csv", "step_count_per_record": 9, "ops": ["norm", "min"]}
    (folder / "config.json").write_text(json.dumps(config))
    output = {"MONITOR_OUTPUT_DIR": str(folder / "out"), "RANKSCOPE_SPOOL_DIR": str(folder / "records")}
    done = run_program(SCRIPT.replace("END", end), folder=folder, whole_exit=True, **output)
    assert "Traceback" not in done.stderr
    return done.returncode


@pytest.mark.parametrize(("end", "code", "state"), [("pass", 0, "completed"), ("sys.exit(3)", 3, "failed")])
def test_script_that_ends_well_is_completed_with_all_its_files(end: str, code: int, state: str, tmp_path: Path) -> None:
    assert code == trained(tmp_path, end)
    done = run_command("sql", "select state from attempts", "--store", tmp_path / "records", "--format", "json")
    (folder,) = (tmp_path / "out").iterdir()
    before, after = (path.read_text().splitlines() for path in sorted(folder.glob("grad_reduced_*.csv")))

    assert [{"state": state}] == json.loads(done.stdout)
    assert before[0].endswith("name,step,norm,min,shape,dtype")
    assert before[-1] == "0,bias,1,1.414214,1.0,[2],torch.float32"
    assert after[0].endswith("name,step,max,norm,mean,shape,dtype")
    assert after[-1] == "0,bias,3,1.0,1.414214,1.0,[2],torch.float32"
