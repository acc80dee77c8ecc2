"""Tests of sinks in a real training: their data equal the record channel, however training ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exporter.sinks.reading import imported
from torch import nn

from rankscope_contract.model.events import EventType
from rankscope_exporter import Monitor, MonitorConfig

STEPS = 4
VALUES = ("norm", "min", "max", "mean", "nans", "zeros", "numel")
QUANTITIES = ("parameters", "gradients", "micro_gradients", "optimizer_state", "activations", "direction", "linear")


def train(batches: Iterator[torch.Tensor], config: MonitorConfig | None, during: Callable[[Any], Any] = bool) -> Any:
    """Train with a monitor if there is a `config`, and return the model and the result of `during(monitor)`."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters())
    with contextlib.nullcontext() if config is None else Monitor(config).attach(net, optimizer) as monitor:
        for inputs in batches:
            optimizer.zero_grad()
            net(inputs).square().sum().backward()
            optimizer.step()
        return net, during(monitor)


def steps() -> Iterator[torch.Tensor]:
    return (torch.randn(5, 4, generator=torch.Generator().manual_seed(step)) for step in range(STEPS))


@pytest.fixture
def config(tmp_path: Path, quiet: MonitorConfig) -> MonitorConfig:
    """Return a configuration with every quantity and all sinks, and a long timeout for the last step."""
    folder = {"folder": str(tmp_path / "out")}
    sinks = {"csv": {**folder, "steps_per_file": 2}, "tensorboard": folder, "api": {}}
    return replace(quiet, quantities=QUANTITIES, sinks=sinks, exit_wait_seconds=60)


def test_training_is_bit_identical_with_all_sinks(config):
    nets = []
    for used in (config, None):
        net, faults = train(steps(), used, lambda monitor: monitor and monitor.faults)
        assert not faults
        nets.append((*(parameter.detach() for parameter in net.parameters()), torch.get_rng_state()))

    assert all(torch.equal(first, second) for first, second in zip(*nets, strict=True))


def test_files_have_the_values_of_the_record_channel(config, tmp_path, reader, eventually):
    def during(monitor):
        monitor.end_step()
        return eventually(lambda: told_if_whole(reader(monitor).rows()), 60)

    _, told = train(steps(), config, during)
    rows, faults = imported(tmp_path / "out")
    found = {
        (row["step"], row["kind"], row["tensor"], row["index"], row["micro_step"]): tuple(row[op] for op in VALUES)
        for row in rows["tensor_stats"]
    }

    assert 0 == faults.count, faults.first
    assert len(rows["tensor_stats"]) == len(found)
    assert told == found
    assert {"direction_agreement", "stable_rank", "spectral_norm"} == {row["kind"] for row in rows["features"]}


def told_if_whole(rows: list[Any]) -> dict[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return what the stream holds, in the terms of the layout, once its last step is there."""
    if not rows or rows[-1].step < STEPS:
        return None
    micro = {(row.step, row.kind, row.tensor) for row in rows if row.micro_step is not None}
    return {
        (row.step, row.kind, row.tensor, row.index, row.micro_step): tuple(row.numbers[op] for op in VALUES)
        for row in rows
        # The layout cannot hold a gradient of the step in addition to those of its micro-batches.
        if row.micro_step is not None or (row.step, row.kind, row.tensor) not in micro
    }


def test_read_only_folder_affects_neither_training_nor_channel(config, tmp_path, reader, eventually):
    (tmp_path / "out").write_text("in the way")

    def during(monitor):
        monitor.end_step()
        assert eventually(lambda: told_if_whole(reader(monitor).rows()), 60)
        events = [event["message"] for event in reader(monitor).events() if event["type"] == EventType.FAULT]
        return events, reader(monitor).get("/metrics").decode(), monitor

    _, (events, page, monitor) = train(steps(), config, during)

    assert ["sink csv failed", "sink tensorboard failed"] == sorted({text.split(", training")[0] for text in events})
    assert len(events) == 2, "each is named once"
    assert 'reason="sink_csv"' in page
    assert monitor.sink("api").steps(), "another sink has its rows"


def test_uncounted_nan_is_visible_in_the_published_columns(config, tmp_path):
    """The norm of finite elements, which the store receives, would hide the NaN from a reader of the file."""
    sinks = {"csv": {"folder": str(tmp_path)}}
    options = {"gradients": {"ops": ["max", "norm"]}}
    config = replace(config, quantities=("gradients", "parameters"), options=options, sinks=sinks)
    net = nn.Sequential(nn.Linear(4, 8))
    optimizer = torch.optim.Adam(net.parameters())
    with Monitor(config).attach(net, optimizer):
        (net(torch.ones(5, 4)).sum() + next(net.parameters())[0, 0] * torch.nan).backward()  # one of the gradients
        optimizer.step()
    files = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*/*.csv")}

    assert "vpp_stage,name,step,norm,max,shape,dtype" == files["grad_reduced_0-0.csv"][0]
    assert '0,0.weight,0,nan,nan,"[8, 4]",torch.float32' == files["grad_reduced_0-0.csv"][1]
    assert "vpp_stage,name,step,norm,min,max,mean,nans,zeros,shape,dtype" == files["param_origin_0-0.csv"][0]


class _StopError(Exception):
    pass


@pytest.mark.parametrize("ending", [None, _StopError, SystemExit, KeyboardInterrupt])
@pytest.mark.usual(2)
def test_last_step_is_in_the_file_however_training_ends(config, tmp_path, ending):
    def during(_):
        if ending is not None:
            raise ending

    with contextlib.suppress(_StopError, SystemExit, KeyboardInterrupt):
        train(steps(), config, during)
    rows, _ = imported(tmp_path / "out")

    assert STEPS == max(row["step"] for row in rows["tensor_stats"] if row["kind"] == "param_after")


def test_forked_workers_write_no_rows(config, tmp_path):
    """Workers inherit the monitor. Each row is written once, in one folder."""
    data = [torch.ones(4) * place for place in range(8)]
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    train(iter(loader), config)
    rows, faults = imported(tmp_path / "out")
    seen = [(row["step"], row["tensor"]) for row in rows["tensor_stats"] if row["kind"] == "param_after"]

    assert 0 == faults.count
    assert 4 * 4 == len(seen) == len(set(seen))
    assert 1 == len(list((tmp_path / "out").glob("*-rank0-*")))
