"""Fixtures: records, a rank that serves them, a client over real HTTP, and a service double."""

import contextlib
import http.client
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest

from rankscope_contract.model.identity import Identity
from rankscope_contract.model.kinds import COUNT_OPS
from rankscope_contract.model.schema import WIRE_VALUE_OPS, Plan, PlanEntry
from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_contract.wire.channel import POKE_PATH, REGISTER_PATH, RegistrationReply
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.publish.http_server import Answer, HttpServer
from rankscope_exporter.publish.rank_server import RankServer
from rankscope_exporter.publish.routes import RankServerSources
from rankscope_exporter.publish.serving_config import Address, ServeConfig
from rankscope_exporter.records.plan import NamedPlan
from rankscope_exporter.records.record import Statistics, StepRecord

RULES = (AnomalyNan(), AnomalyTurbulence(threshold=3.0))
INCARNATION = "feedc0de"
Numbers = Mapping[str, float | int | None]


def statistics_of(entries: Sequence[PlanEntry], rows: Sequence[Numbers | None]) -> Statistics:
    """Return the statistics with `rows[i]` (by op; None: absent) for `entries[i]`."""
    values = [None if row is None else row.get(op) for op in WIRE_VALUE_OPS for row in rows]
    counts = [None if row is None else row.get(op, 0) for op in COUNT_OPS for row in rows]
    return Statistics(NamedPlan.of(Plan(tuple(entries))), pa.array(values, pa.float32()), pa.array(counts, pa.int64()))


def record_of(
    step: int, entries: Sequence[PlanEntry] = (), rows: Sequence[Numbers | None] = (), **more: Any
) -> StepRecord:
    """Return a record of `step`, with statistics if there are entries."""
    statistics = statistics_of(entries, rows) if entries else None
    return StepRecord(ts=1_700_000_000_000_000 + step, step=step, statistics=statistics, **more)


class NotingBoundary(ErrorBoundary):
    """An error boundary that lists the errors instead of logging them."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[tuple[str, BaseException]] = []

    def report(self, where: str, error: BaseException) -> None:
        self.count += 1
        self.faults.append((where, error))


@dataclass(slots=True)
class Got:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return pa.ipc.open_stream(self.body).read_all().to_pylist()

    @property
    def seqs(self) -> list[int]:
        return [row["seq"] for row in self.rows] if self.status == 200 else []


@dataclass(slots=True)
class Rank:
    """A rank server under test, and requests to it."""

    channel: RankServer
    faults: list[tuple[str, BaseException]] = field(default_factory=list)

    @property
    def port(self) -> int:
        assert self.channel.url is not None
        return int(self.channel.url.rpartition(":")[2])

    def get(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Got:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body=body, headers=named)
            answer = connection.getresponse()
            return Got(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def fill(self, records: int, begin: int = 0, **more: Any) -> list[int]:
        """Publish this number of records of one step each; return their sequence numbers."""
        return [self.channel.publish(record_of(step, **more)) for step in range(begin, begin + records)]

    def dropped(self, reason: str) -> float:
        """Return the number of records that the metrics page shows as dropped for `reason`."""
        pattern = rf'^rankscope_dropped_total.*reason="{reason}".* (.+)$'
        (shown,) = re.findall(pattern, self.get("/metrics").text, re.MULTILINE)
        return float(shown)

    def records(self, after: int, **query_and_headers: Any) -> Got:
        query = {name: value for name, value in query_and_headers.items() if name in ("committed", "max_bytes")}
        headers = {name: value for name, value in query_and_headers.items() if name not in query}
        path = f"/records?incarnation={self.channel.incarnation}&after={after}"
        return self.get(path + "".join(f"&{name}={value}" for name, value in query.items()), **headers)


class ServiceDouble:
    """A service on a real port: it stores requests and sends the configured replies. It never polls."""

    def __init__(self) -> None:
        self.registrations: list[dict[str, Any]] = []
        self.pokes: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.committed = -1
        self.notice: str | None = None
        self.lease = "lease-1"
        self.heartbeat_seconds = 30.0
        self.refusal: tuple[int, str] | None = None
        self.redirect_to: str | None = None
        self.shard_of_redirect: str | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.refused: tuple[str, ...] = ()
        double = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                double.authorizations.append(self.headers.get("Authorization"))
                double.hold.wait(10)
                if double.redirect_to is not None:
                    self.send_response(307)
                    self.send_header("Location", double.redirect_to)
                    if double.shard_of_redirect:
                        self.send_header("Rankscope-Shard", double.shard_of_redirect)
                    self.end_headers()
                    return
                {REGISTER_PATH: double.registrations, POKE_PATH: double.pokes}[self.path].append(document)
                status, text = double.refusal or (200, double.reply().to_json())
                if document["incarnation"] in double.refused:
                    status, text = 409, "not you"
                elif self.path == POKE_PATH and double.refusal is None:
                    status, text = 204, ""
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reply(self) -> RegistrationReply:
        more = {"heartbeat_seconds": self.heartbeat_seconds, "committed": self.committed, "notice": self.notice}
        return RegistrationReply(lease=self.lease, attempt=0, **more)

    def stop(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="session")
def record() -> Callable[..., StepRecord]:
    return record_of


@pytest.fixture(scope="session")
def statistics() -> Callable[..., Statistics]:
    return statistics_of


@pytest.fixture
def make_service() -> Iterator[Callable[[], ServiceDouble]]:
    with contextlib.ExitStack() as stack:

        def make() -> ServiceDouble:
            double = ServiceDouble()
            stack.callback(double.stop)
            return double

        yield make


@pytest.fixture
def service(make_service: Callable[[], ServiceDouble]) -> ServiceDouble:
    return make_service()


@pytest.fixture
def new_rank() -> Iterator[Callable[..., Rank]]:
    """Return a function that creates a rank from ServeConfig arguments; with `started=False` it has no socket."""
    ranks: list[Rank] = []

    def make(
        *,
        started: bool = True,
        settings: Any = None,
        sources: RankServerSources | None = None,
        run: str = "run-1",
        rank: int = 0,
        incarnation: str = INCARNATION,
        **config: Any,
    ) -> Rank:
        boundary = NotingBoundary()
        statistics: Any = {"overhead": lambda: {"publisher": 0.25}, "dropped": lambda: {"publisher_behind": 0}}
        who = {"run": run, "rank": rank, "incarnation": incarnation}
        identity = Identity(launch_id="launch-1", world_size=2, host="node-1", **who)
        channel = RankServer(
            identity=identity,
            config=ServeConfig(**{"spool_dir": None, **config}),
            rules=RULES,
            settings=settings or {"quantities": ["weights"]},
            planned_steps=100,
            boundary=boundary,
            sources=replace(sources or RankServerSources(), **statistics),
        )
        ranks.append(Rank(channel, boundary.faults))
        if started:
            channel.start()
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.channel.close()


@pytest.fixture
def rank(new_rank: Callable[..., Rank]) -> Rank:
    """Return a rank that listens on loopback and has no service."""
    return new_rank()


def echo(request: Any) -> Answer:
    return Answer.text(200, f"{request.path} {dict(request.query)}")


@pytest.fixture
def new_server() -> Iterator[Callable[..., Any]]:
    """Return a function that starts an HTTP server; its list `faults` contains the reported faults."""
    servers = []

    def make(application: Any = echo, tls: Any = None, **limits: Any) -> Any:
        faults: list[BaseException] = []
        report = {"on_fault": lambda _, error: faults.append(error), "meter": CpuMeter()}
        server: Any = HttpServer(Address("127.0.0.1", 0), application, tls=tls, **report)
        vars(server).update(limits, faults=faults)
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def leased(new_rank: Callable[..., Rank], service: ServiceDouble, eventually: Callable[..., Any]) -> Rank:
    """Return a rank that the service double has registered."""
    rank = new_rank(ingest_url=service.url)
    eventually(lambda: rank.channel.lease)
    return rank


@pytest.fixture
def until(eventually: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that polls a condition until a deadline and returns its first true value."""
    return eventually


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, BaseException], None]:
    """Return a function that makes a method raise an error."""

    def make(owner: Any, name: str, error: BaseException) -> None:
        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(owner, name, fail)

    return make
