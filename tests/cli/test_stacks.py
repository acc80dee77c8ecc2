"""`rankscope stacks`: printed stack groups, selection of the run, and one-line error messages."""

import copy
import http.server
import json
import os
import threading
from pathlib import Path

import pytest

from rankscope.commands.stacks import stacks
from rankscope.shell.errors import CommandError

GOLDEN = Path(__file__).parents[1] / "golden" / "cli"
SITE = "/env/lib/python3.11/site-packages"


def rank(number, frames, *, seq, is_pending):
    threads = [
        {"ident": 1, "name": "MainThread", "is_training": True, "frames": frames},
        {"ident": 2, "name": "pin-memory", "frames": [["/env/lib/python3.11/threading.py", 331, "wait"]]},
        {"ident": 3, "name": "rankscope-http", "is_ours": True, "frames": []},
    ]
    collective = {"op": "all_reduce", "backend": "nccl", "group": "default_pg", "seq": seq, "is_pending": is_pending}
    collective |= {
        "age_seconds": 311.6,
        "sizes": [[4096, 4096]],
        "dtypes": ["BFloat16"],
        "group_id": "0",
        "bytes": 1 << 25,
    }
    groups = [{"id": "0", "ranks": "0-3", "latest_seq": seq}]
    place = {"rank": number, "host": f"node-{number // 2}", "pid": 4000 + number, "ts": 0, "step": 41}
    return place | {
        "stacks": {"reason": "request", "threads": threads, "left_out": 0},
        "flight": {"reason": "request", "collectives": [collective], "recorded": 1, "groups": groups},
    }


WAITS = [
    [f"{SITE}/torch/distributed/distributed_c10d.py", 3245, "all_reduce"],
    ["/job/train.py", 90, "train_step"],
    ["/job/train.py", 140, "main"],
]
LOADS = [[f"{SITE}/torch/utils/data/dataloader.py", 701, "__next__"], ["/job/train.py", 88, "main"]]
ANSWER = {
    "run": "pretrain",
    "attempt": 2,
    "state": "stalled",
    "reason": "alive, but no step for 312 s",
    "step": 4812,
    "world_size": 4,
    "ranks": [
        rank(0, WAITS, seq=41, is_pending=True),
        rank(1, LOADS, seq=40, is_pending=False),
        rank(2, WAITS, seq=41, is_pending=True),
        {"rank": 3, "host": "node-1", "pid": 4003, "error": "it does not answer"},
    ],
}


class Service:
    """A fake service that returns prepared responses and records the requests."""

    def __init__(self):
        self.answers = {"/api/v1/stacks": (200, ANSWER)}
        self.asked = []
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.asked.append((self.headers["Authorization"], body))
                self.do_GET()

            def do_GET(self):
                status, document = service.answers[self.path]
                body = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("RANKSCOPE_TOKEN", "secret")
    made = Service()
    threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_stacks_prints_groups_with_ranks_outside_of_collectives_first(service, capsys):
    stacks("pretrain", service=service.url)
    said = capsys.readouterr().out
    path = GOLDEN / "stacks.txt"
    if os.environ.get("RANKSCOPE_UPDATE_GOLDEN"):
        path.write_text(said, encoding="utf-8")

    assert path.read_text(encoding="utf-8") == said
    assert [("Bearer secret", {"run": "pretrain", "ranks": None})] == service.asked


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"world_size": 3},
            "cause: rank 1: it never entered all_reduce 41 (32.0 MiB bfloat16) of default_pg, in which",
        ),
        (
            {},
            "cause: unknown: the flight records of ranks 0-2 and the stacks of ranks 0-2 do not identify a single rank",
        ),
        ({"state": "running"}, None),
    ],
)
def test_stacks_prints_the_cause_of_a_stall_if_known(service, capsys, changes, cause):
    """Rank 3 does not respond, so it may be in the collective as well."""
    answer = copy.deepcopy(ANSWER | changes)
    answer["ranks"] = [entry for entry in answer["ranks"] if entry["rank"] < answer["world_size"]]
    for entry in answer["ranks"]:
        if "flight" in entry:
            entry["flight"]["groups"][0]["ranks"] = f"0-{answer['world_size'] - 1}"
    service.answers["/api/v1/stacks"] = (200, answer)
    stacks("pretrain", service=service.url)
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cause: ")]

    assert ([] if cause is None else [cause]) == [line[: len(cause or "")] for line in found]


def test_options_select_all_threads_and_single_ranks(service, capsys):
    stacks("pretrain", rank=[1], service=service.url, all_threads=True)
    said = capsys.readouterr().out

    assert "  thread pin-memory\n    wait  /env/lib/python3.11/threading.py:331\n" in said
    assert "  thread rankscope-http (of Rankscope)\n    no Python code\n" in said
    assert [1] == service.asked[0][1]["ranks"]


def test_json_is_the_unchanged_response_of_the_service(service, capsys):
    stacks("pretrain", service=service.url, as_json=True)

    assert ANSWER == json.loads(capsys.readouterr().out)


def test_run_name_is_optional_if_only_one_run_is_live(service, capsys):
    live = [{"run": "pretrain", "ranks_alive": 4}, {"run": "old", "ranks_alive": 0}]
    service.answers["/api/v1/runs"] = (200, live)
    stacks(service=service.url)

    assert "pretrain" == service.asked[0][1]["run"]

    service.answers["/api/v1/runs"] = (200, [*live, {"run": "other", "ranks_alive": 1}])
    with pytest.raises(
        CommandError, match=r"not exactly one live run at .*: name the run\. Live runs: pretrain, other"
    ):
        stacks(service=service.url)


def test_token_can_come_from_a_file(service, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("RANKSCOPE_TOKEN")
    monkeypatch.setenv("RANKSCOPE_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_text("from-a-file\n")
    stacks("pretrain", service=service.url)

    assert "Bearer from-a-file" == service.asked[0][0]


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (401, b"send Authorization", r"send Authorization \(RANKSCOPE_TOKEN is set here\)"),
        (403, b"set [service] token", r"set \[service\] token$"),
        (404, b"no run 'pretrain' is known here; there are a, b", "there are a, b"),
        (200, b"<html>", "<html>"),
        (200, {"ranks": []}, "has no live rank$"),
        (200, {"ranks": [{"rank": 0}]}, "returned a response that this release cannot read"),
    ],
)
def test_error_responses_are_one_line(service, status, answer, words):
    service.answers["/api/v1/stacks"] = (status, answer)
    with pytest.raises(CommandError, match=words) as refused:
        stacks("pretrain", service=service.url)

    assert "\n" not in str(refused.value)


def test_unreachable_service_error_names_the_option(free_port):
    with pytest.raises(CommandError, match="--service or RANKSCOPE_INGEST_URL"):
        stacks("pretrain", service=f"http://127.0.0.1:{free_port}")
