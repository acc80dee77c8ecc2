"""A run has one loss on all pages, in all commands and in the service: the mean over the ranks that logged it."""

import json
import re
import time
import urllib.request

from tests.dashboards.conftest import FILES, judge, promql_errors, promtool, query_of  # noqa: F401 - fixtures
from tests.ingest.remote_read.streams import MESSAGES
from tests.programs import run_command, run_program

from rankscope_ingest.base.protobuf import packed, unpacked

EXPECTED = {"unequal": "3.620", "missing": "2.120", "stage": "7.120", "diverged": "NaN"}
NOTES = {"missing": "1 of 2 ranks"}

TRAINING = """
import os, socket, time
other = socket.socketpair()
rank = 1 if (child := os.fork()) == 0 else 0  # before any thread is started
import torch
from torch import nn
from rankscope_exporter import Monitor

os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
LOSSES = {
    "unequal": lambda rank, step: 2.0 + 3 * rank + step / 100,
    "missing": lambda rank, step: None if rank == 1 and step == 12 else 2.0 + 3 * rank + step / 100,
    "stage": lambda rank, step: 7.0 + step / 100 if rank == 1 else None,  # only the last stage of a pipeline
    "diverged": lambda rank, step: float("nan") if rank == 0 and step == 12 else 2.0,
}

for port, (run, loss) in enumerate(LOSSES.items()):
    os.environ["MASTER_PORT"] = str(port + 1)  # the identity of a launch
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor({"run": run, "exit_wait_seconds": 30.0}, total_steps=12).attach(model, optimizer) as monitor:
        for step in range(1, 13):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss(rank, step))
            time.sleep(0.002)  # samples of one millisecond are one sample of Prometheus
        other[rank].send(b".")
        other[rank].recv(1)  # the end of the first rank is behind the last step of both
if rank == 0:
    assert 0 == os.waitpid(child, 0)[1]
"""


def test_loss_of_a_run_is_one_number_everywhere(service, judge):  # noqa: F811 - the fixture
    service.poll_seconds = service.flush_after_seconds = 0.1
    service.start()
    done = run_program(TRAINING, folder=service.folder, RANKSCOPE_INGEST_URL=service.url)
    assert 0 == done.returncode, done.stderr

    def ended():
        found = {run["run"]: run for run in service.runs()}
        return found if len(found) == len(EXPECTED) and all(run["ended_at"] for run in found.values()) else None

    def stored_ends():
        text = _words(service.get("/"))
        return text if all(f" {run} Completed" in text for run in EXPECTED) else None

    live, listed, status = service.wait_for(ended), service.wait_for(stored_ends), _words(service.get("/service"))
    for run, expected in EXPECTED.items():
        page, report = (_words(service.get(f"/runs/{run}{path}")) for path in ("", "/report"))
        words = run_command("summary", run, "--store", service.store).stdout
        stored = json.loads(run_command("summary", run, "--store", service.store, "--format", "json").stdout)
        note = NOTES.get(run)
        found = {
            "status": _shown(live[run]["loss"]),
            "status page": re.search(rf"\b{run} attempt 0 .*? loss (\S+)", status).group(1),
            "list": re.search(rf"\b{run} Completed.*? in [\d.]+ \w+ (\S+)", listed).group(1),
            "page": re.search(r" Loss (\S+)", page).group(1),
            "report": re.search(r" Loss (\S+?)[.;]? ", report).group(1),
            "summary": _shown(float(re.search(r"current: ([^ ;]+)", words).group(1))),
            "summary json": _shown(float(stored["losses"]["current"])),
            "stored": _shown(float(stored["stored"]["loss_last"])),
        }

        assert dict.fromkeys(found, expected) == found
        assert [note is not None] * 3 == [bool(note) and note in text for text in (page, words, status)]
        assert live[run]["loss_ranks_missing"] == (1 if note else 0)

    assert {"unequal": 3.62, "missing": 2.12, "stage": 7.12} == {
        run: float(found[1])
        for run in ("unequal", "missing", "stage")
        if (found := re.search(rf'^rankscope_run_loss{{run="{run}"}} (\S+)$', service.get("/metrics"), re.MULTILINE))
    }
    read = {run: _remote_read(service, run, "rankscope_loss") for run in EXPECTED}
    assert {"unequal": 24, "missing": 23, "stage": 12, "diverged": 24} == {
        run: sum(len(values[:-1]) for values in found.values())  # the last sample is a stale marker
        for run, found in read.items()
    }
    boards = {
        name: query_of(json.loads(FILES[f"dashboards/rankscope/{name}.json"])) for name in ("run_overview", "runs")
    }
    queries = boards["run_overview"]("Latest loss"), boards["runs"]("Loss of the runs")
    cases = []
    for run, ranks in read.items():
        found = ranks | _remote_read(service, run, "rankscope_run_loss")
        given = {name: f"_x29 {values[-2]}" for name, values in found.items()}
        checks = []
        for query in (
            query.replace('run="r"', f'run="{run}"').replace('run=~"r"', f'run="{run}"') for query in queries
        ):
            is_nan = EXPECTED[run] == "NaN"
            expression = f"count({query} != {query})" if is_nan else f"round(sum({query}), 0.001)"
            checks.append((expression, "{}", 1 if is_nan else float(EXPECTED[run])))
        cases.append((given, checks))

    assert [None] * len(cases) == promql_errors(judge, cases)


def _remote_read(service, run, metric):
    """Return the values of the series of `metric` as Prometheus reads them, by the name of the series."""
    request = MESSAGES["ReadRequest"]()
    query = request.queries.add(start_timestamp_ms=0, end_timestamp_ms=int(time.time() * 1000))
    for name, value in (("__name__", metric), ("job", "rankscope"), ("run", run)):
        query.matchers.add(type=0, name=name, value=value)
    body, headers = packed(request.SerializeToString()), {"Content-Encoding": "snappy"}
    headers |= {"Content-Type": "application/x-protobuf", "X-Prometheus-Remote-Read-Version": "0.1.0"}
    post = urllib.request.Request(f"{service.url}/api/v1/read", body, headers)
    with urllib.request.urlopen(post, timeout=20) as answer:
        response = MESSAGES["ReadResponse"].FromString(unpacked(answer.read(), 1 << 20))
    found = {}
    for series in response.results[0].timeseries:
        labels = {label.name: label.value for label in series.labels} | {"job": "rankscope"}
        name = "{" + ", ".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
        found[name] = [sample.value for sample in series.samples]
    return found


def _words(page):
    return " ".join(re.sub(r"<(style|script)\b.*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL).split())


def _shown(value):
    return "NaN" if float(value) != float(value) else f"{float(value):.3f}"
