"""Tests of the rows that code in the training process can read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.exporter.sinks.records import ABSENT, FINITE, entry, identity, record
from torch import nn

from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.sinks.memory import Api, ApiOptions


def api(steps: int = 8) -> Api:
    return Api(ApiOptions(steps=steps), identity())


def test_rows_are_those_of_the_last_step_with_the_kind():
    kept = api()
    kept.put(record(1, (entry("w"), FINITE), (entry("w", "param_after"), FINITE)))
    nothing_finite = FINITE | dict.fromkeys(("norm", "min", "max", "mean")) | {"nans": 4}
    kept.put(record(2, (entry("w"), nothing_finite), (entry("w", "param_after"), ABSENT)))
    (row,) = kept.rows("grad_reduced")

    assert (2, "w", None, 4) == (row.step, row.entry.tensor, row.numbers["norm"], row.numbers["nans"])
    assert [1] == [row.step for row in kept.rows("param_after")]
    assert [1, 1] == [row.step for row in kept.rows(step=1)]
    assert () == kept.rows("exp_avg")


def test_at_most_the_configured_number_of_steps_is_kept():
    kept = api(steps=2)
    feature = {"kind": "stable_rank", "module": "head", "index": None, "value": 2.0}
    for step in range(1, 6):
        kept.put(record(step, (entry(), FINITE), features=(feature,)))
        kept.put(record(step))  # a later record of the same step has no rows

    assert (4, 5) == kept.steps()
    assert () == kept.rows(step=3)
    assert [2.0] == [row["value"] for row in kept.features("stable_rank")]
    assert () == kept.features("softmax_max")


def test_threads_may_read_while_records_arrive():
    kept = api(steps=3)
    done = threading.Event()

    def ask() -> list[tuple[int, ...]]:
        seen = []
        while not done.is_set():
            seen.append(kept.steps())
            kept.rows("grad_reduced")
        return seen

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        for step in range(300):
            kept.put(record(step, (entry(), FINITE)))
        done.set()

    assert [] == [steps for steps in asking.result() if list(steps) != sorted(steps) or len(steps) > 3]


def test_training_code_reads_gradients_from_the_sink(eventually):
    """The rows equal those of the record, which is also sent through the record channel."""
    config = MonitorConfig(console=False, exit_wait_seconds=60, sinks={"api": {"steps": 2}})
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(config).attach(net, optimizer) as monitor:
        assert monitor.sink("csv") is None
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        sink = monitor.sink("api")
        assert isinstance(sink, Api)
        rows = eventually(lambda: sink.rows("grad_reduced", step=2), 60)

    expected = {"weight": pytest.approx(4.0 * 6**0.5), "bias": pytest.approx(4.0 * 2**0.5)}
    assert expected == {row.entry.tensor: row.numbers["norm"] for row in rows}
    assert (2, 3) == sink.steps(), "it may still be asked after detaching, and the last step is there"


@pytest.mark.parametrize(
    ("sinks", "says"),
    [
        ({"apu": {}}, "'apu' is unknown; valid names are .*Did you mean 'api'"),
        ({"api": {"step": 3}}, "unknown setting sinks.api.step; .*Did you mean sinks.api.steps"),
        ({"api": {"steps": 0}}, "sinks.api: steps must be a number from 1"),
        ({"api": True}, "sinks.api must be a table"),
        (["api"], "sinks must be a table"),
    ],
)
def test_invalid_settings_are_rejected_with_the_nearest_name(sinks, says):
    with pytest.raises(ConfigError, match=says):
        MonitorConfig.from_mapping({"sinks": sinks})
