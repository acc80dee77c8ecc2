"""A loss that becomes NaN, from the training to SQL: captured steps, their samples, and the overhead of the monitor."""

import json

import torch
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig, ServeConfig
from rankscope_storage.connection import connect

BAD = 6

SAMPLES = """
select e.step, json_extract_string(details, '$.state') as state, rule, tensor,
       json_extract(details, '$.samples') as samples
from events e
where run = 'captured' and type = 'capture'
order by state
"""
"""The query of docs/capture.md."""


def test_sql_finds_samples_and_captured_steps_of_a_bad_loss(service):
    service.start()
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = MonitorConfig(
        quantities=("parameters",),
        every=5,
        run="captured",
        capture={"quantities": ["activations"], "steps": 2},  # type: ignore[arg-type]  # the form of a file
        max_overhead="90 %",
        console=False,
        exit_wait_seconds=120,
        serve=ServeConfig(ingest_url=service.url),
    )
    with Monitor(config).attach(net, optimizer) as monitor:
        session = session_of(monitor)
        for step in range(1, 13):
            monitor.batch([f"shard-{step}", f"shard-{step + 100}"])
            loss = net(torch.ones(2, 3)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss if step != BAD else float("nan"))
            if step == BAD:
                monitor.end_step()
                assert session.publisher.catch_up(60)
    with connect(service.store) as connection:
        rows = connection.execute(SAMPLES).fetchall()
        kinds = connection.execute("select distinct step, kind from tensor_stats order by all").fetchall()
        spent = connection.execute("select labels, value from scalars where name = 'overhead_seconds'").fetchall()

    named = {state: (rule, json.loads(samples or "{}")) for _, state, rule, _, samples in rows}
    assert ("AnomalyNan", {str(BAD): [[f"shard-{BAD}", f"shard-{BAD + 100}"]]}) == named["asked"]
    captured = {str(step): [[f"shard-{step}", f"shard-{step + 100}"]] for step in (BAD + 1, BAD + 2)}
    assert captured == named["ended"][1]
    assert {"asked", "began", "ended"} == named.keys()
    assert [BAD + 1, BAD + 2] == [step for step, kind in kinds if kind == "act_out"]
    assert [1, 6, 11] == [step for step, kind in kinds if kind == "param_before"]
    assert {"attach", "hooks", "publisher"} <= {json.loads(labels)["thread"] for labels, _ in spent}
    assert all(seconds >= 0 for _, seconds in spent)
