"""A secret in each text that enters a service, and a search for it in everything that the service stores and sends."""

import json
import re

import pyarrow as pa
from aiohttp import web
from tests.ingest.remote_write.messages import post, write_request
from tests.ingest.servers import FakeExporter, serving

from rankscope.output.progress import log_to
from rankscope_contract.model.schema import Plan, PlanEntry
from rankscope_storage.base.datasets import DATASETS

OWN_LOG = "step 1 loss 2.0\nstep 2 loss 1.5\nRuntimeError: no access to s3://bob:{log line}@bucket/x\n"
ENTRANCES = (  # Places of the secrets. The secret of a place is its name with the digits 1 to 9 instead of the vowels.
    *("exporter address", "exporter without a name", "query of an exporter", "refused exporter", "exporter label"),
    *("list of exporters", "address for messages", "run", "host", "setting", "argument", "scalar", "scalar label"),
    *("event", "details of an event", "exception", "header", "remote write target", "remote write label"),
    *("user agent", "log line", "refused run", "registered address"),
)


JSON = {"Content-Type": "application/json", "Content-Encoding": "identity"}


def secret(entrance: str) -> str:
    assert entrance in ENTRANCES
    return f"pw{ENTRANCES.index(entrance):02}x" + re.sub("[aeiou ]", "7", entrance)


def url(entrance: str) -> str:
    return f"https://bob:{secret(entrance)}@host:8080/x"


def events() -> list[dict[str, str | None]]:
    error = f"ConnectionError: {url('exception')} refused, Bearer {secret('header')}"
    details = {"reason": "exception", "error": error, "last_step": 1}
    note = {"path": url("details of an event"), "commit": "0123456789abcdef0123456789abcdef01234567"}
    kept = f"token={secret('event')} at /data/a/very/long/path/model.layers.0.weight"
    return [
        {"type": "note", "message": kept, "details": json.dumps(note)},
        {"type": "exit", "severity": "critical", "message": f"exception: {error}", "details": json.dumps(details)},
    ]


async def register(service, rank) -> None:
    """Register `rank` as a rank of another release does, which masks nothing."""
    config = {"api_key": secret("setting"), "argv": ["train.py", "--password", secret("argument")]}
    own = {"run": url("run"), "host": url("host"), "config": config, "head": rank.head}
    document = json.dumps(json.loads(rank.registration.to_json()) | own)
    rank.lease = json.loads((await post(service, document, "/api/v1/register", **JSON))[2])["lease"]


async def send_others(service, rank) -> None:
    """Send a remote write request, and requests that the service refuses."""
    labels = {"__name__": "probe_up", "instance": url("remote write target"), "page": url("remote write label")}
    body = pa.compress(write_request((labels, [(1_700_000_000_000, 1.0)])), "snappy", asbytes=True)
    odd = json.loads(rank.registration.to_json()) | {"incarnation": "odd", "launch_id": "odd", "run": "odd"}
    documents = [
        {**odd, "url": url("registered address")},
        {**odd, "rank": f"token={secret('refused run')}"},
        {**odd, "rank": 7, "run": url("refused run")},
    ]
    wrong = {"User-Agent": f"agent {url('user agent')}", "Content-Type": "text/plain"}
    for headers in ({}, wrong):
        assert secret("user agent") not in (await post(service, body, **headers))[2]
    for document in documents:
        status, _, text = await post(service, json.dumps(document), "/api/v1/register", **JSON)
        assert 400 == status
        assert not any(secret(name) in text for name in ENTRANCES), text


async def everything(service) -> dict[str, str]:
    found = {
        name: json.dumps(service.rows(f"SELECT * FROM {name}"), default=str, ensure_ascii=False) for name in DATASETS
    }
    found |= {str(path): path.read_bytes().decode("latin-1") for path in service.store.rglob("*") if path.is_file()}
    run = service.rows("SELECT run FROM runs LIMIT 1")[0]["run"]
    base = "/runs/" + "".join(f"%{byte:02X}" for byte in run.encode())
    paths = ["/", "/service", "/metrics", "/sd", *(f"/api/v1/{name}" for name in ("status", "targets", "runs"))]
    for path in (*paths, "/api/v1/exporters", base, f"{base}/events", f"{base}/ranks", f"{base}/report"):
        status, found[path] = await service.get(path)
        assert status == 200, path
    return found


def settings(address, folder):
    """Return a configuration with exporters, a receiver of messages at `address`, and a log."""
    (folder / "list.json").write_text(json.dumps([{"targets": [f"bob:{secret('list of exporters')}@host:1"]}]))
    (folder / "train.log").write_text(OWN_LOG.replace("{log line}", secret("log line")))
    users = [f"reader:{secret('exporter address')}", f"reader:{secret('exporter without a name')}"]
    exporters = [{"url": f"http://{user}@{address}/metrics"} for user in users]
    query = f"?token={secret('query of an exporter')}"
    exporters.append({"url": f"http://a:{secret('refused exporter')}@127.0.0.1:1/m{query}", "name": "refused"})
    return {
        "exporters": [{**one, "every_seconds": 0.1, "timeout_seconds": 1} for one in exporters],
        "exporter_lists": [{"file": str(folder / "list.json"), "refresh_seconds": 1}],
        "notify.urls": [f"json://bob:{secret('address for messages')}@{address}/hook"],
        "notify.group_wait_seconds": 0.0,
        "watch": [{"log": str(folder / "train.log"), "run": "followed", "poll_seconds": 0.2, "settle_seconds": 0}],
    }


async def test_secret_of_no_entrance_is_stored_shown_or_sent(tmp_path, start_service, fake_rank, eventually):
    asked, bodies, lines = [], [], []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "POST":
            bodies.append(await request.text())
            return web.Response()
        asked.append(request.headers.get("Authorization"))
        return web.Response(text=f'probe{{page="{url("exporter label")}",key="queue:3",token="a"}} 1\n')

    with log_to(lines.append):
        async with (
            serving(web.route("*", "/{path:.*}", answer)) as address,
            start_service(**settings(address, tmp_path)) as service,
            fake_rank() as rank,
        ):
            scalar = {"name": url("scalar"), "value": 1.0, "labels": json.dumps({"of": url("scalar label")})}
            rank.publish(scalars=[{"name": "loss", "value": 2.0}, scalar], events=events())
            await register(service, rank)
            await send_others(service, rank)
            await eventually(lambda: len(set(asked)) == 2 and any("ConnectionError" in body for body in bodies))
            query = "SELECT DISTINCT target FROM samples WHERE metric = 'probe'"
            await eventually(lambda: len(service.rows(query)) == 2 and service.rows("SELECT 1 FROM runs"))
            await eventually(lambda: service.rows("SELECT 1 FROM scalars WHERE run = 'followed'"))
            await eventually(lambda: service.rows("SELECT 1 FROM runs WHERE run <> 'followed' AND state = 'failed'"))
            found = await everything(service) | {"log": "\n".join(lines), "messages": "\n".join(bodies)}

    leaks = {(name, place) for name in ENTRANCES for place, text in found.items() if secret(name) in text}
    assert set() == leaks
    assert [address, f"{address}#2"] == sorted(row["target"] for row in service.rows(query))
    assert "https://***@host:8080/x refused, Bearer ***" in found["messages"]
    assert '"key":"queue:3"' in service.rows("SELECT labels FROM samples WHERE metric = 'probe'")[0]["labels"]
    for kept in ("0123456789abcdef0123456789abcdef01234567", "/data/a/very/long/path/model.layers.0.weight"):
        assert kept in found["events"]


NAMES = {
    "name": "scalars WHERE name LIKE 'y%'",
    "tensor": "tensor_stats",
    "metric": "samples WHERE metric LIKE 'y%'",
    "labels": "samples WHERE metric LIKE 'y%'",
}


async def test_long_texts_are_cut_at_each_entrance(start_service, fake_rank, eventually):
    """Names of an exporter, and of a rank of another release, remain different if they differ after the limit."""
    long = "y" * 50_000
    page = "".join(f'{long}{end}{{a="{long}{end}"}} 1\n' for end in "ab")
    quick = {"every_seconds": 0.1, "timeout_seconds": 5}
    plan = Plan(tuple(PlanEntry("param", f"{long}{end}") for end in "ab"), ("norm",), ("numel",))
    async with (
        FakeExporter(page.encode()) as exporter,
        start_service(exporters=[{"url": exporter.url, **quick}]) as service,
        fake_rank() as rank,
    ):
        numbers = {"plan": rank.add_plan(plan), "values": [1.0, 2.0], "counts": [1, 1]}
        labels = json.dumps({"of": long})
        scalars = [{"name": f"{long}{end}", "value": 1.0, "labels": labels} for end in "ab"]
        events = [{"type": "note", "message": long, "details": json.dumps({"of": long})}]
        events.append({"type": "exit", "message": long, "details": json.dumps({"reason": "exception", "error": long})})
        rank.publish(scalars=scalars, events=events, **numbers)
        await rank.register(service.url)
        await eventually(lambda: service.rows("SELECT 1 FROM runs WHERE state = 'failed'"))
        await eventually(lambda: service.rows("SELECT 1 FROM samples WHERE metric LIKE 'y%'"))
        found = await everything(service)
        names = {
            column: [row[column] for row in service.rows(f"SELECT DISTINCT {column} FROM {table}")]
            for column, table in NAMES.items()
        }

    assert {"name": 2, "tensor": 2, "metric": 2, "labels": 2} == {column: len(two) for column, two in names.items()}
    assert 256 == max(len(name) for column, two in names.items() for name in two if column != "labels")
    assert [] == [place for place, text in found.items() if long[:5000] in text]
    assert "… (50,000 characters)" in found["events"]
    assert "yyy… (50,000 characters)" in service.rows("SELECT reason FROM runs WHERE state = 'failed'")[0]["reason"]
