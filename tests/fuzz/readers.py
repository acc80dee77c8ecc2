"""The readers of bytes from outside, each with valid inputs and the only errors that it may raise."""

import asyncio
import contextlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
from multidict import CIMultiDict
from tensorboard.compat.proto.event_pb2 import Event
from tests.fuzz.mutations import mutated
from tests.ingest.conftest import encode_records
from tests.ingest.importers.cases import framed
from tests.ingest.remote_write.messages import write_request

from rankscope.access.service import Response
from rankscope_contract.model.redaction import redacted_json
from rankscope_contract.model.schema import Plan, PlanEntry, plan_hash
from rankscope_contract.model.stacks import FlightRecord, StackDump
from rankscope_contract.wire.channel import Registration, RegistrationReply
from rankscope_contract.wire.spool import SpoolError, SpoolReader, read_identity, write_identity
from rankscope_exporter.publish.registration import ServiceClient, UnreachableError
from rankscope_ingest.base.config import ExporterListSection
from rankscope_ingest.base.errors import ConfigError, DecodeError, FetchError, IngestError, RegistrationError
from rankscope_ingest.base.protobuf import unpacked
from rankscope_ingest.detect.incidents import exit_reports, firings, latest_events, parse_details, symptoms
from rankscope_ingest.detect.stall_tracker import parse_stacks_request
from rankscope_ingest.importers import Faults, find_importer, importers
from rankscope_ingest.notify.apprise_notifier import Secrets
from rankscope_ingest.record_channel.bodies import PlanCache, RowContext, check, decode, plan_ids
from rankscope_ingest.record_channel.client import Fetcher, open_stream
from rankscope_ingest.remote_read.handler import read_request
from rankscope_ingest.remote_write.decoder import WriteReader
from rankscope_ingest.scrape.discovery import listed
from rankscope_ingest.scrape.page_reader import PageReader
from rankscope_ingest.scrape.scraper import OwnTimes
from rankscope_ingest.targets.registry import parse_registration
from rankscope_storage.base.schema import conform

DATA = Path(__file__).parents[1] / "data"
PLAN = Plan(
    (PlanEntry("param", "layers.0.weight", shape=(2, 3), dtype="float32"), PlanEntry("grad", "w", aliases=("v",)))
)
CONTEXT = RowContext(run="r", attempt=0, rank=0, incarnation="i")
REGISTRATION = Registration(
    run="r", rank=0, world_size=2, local_rank=0, host="h", pid=1, incarnation="i", launch_id="l",
    url="http://127.0.0.1:9400", config={"lr": 0.1}, versions={"torch": "2.13"},
)  # fmt: skip
EXIT = json.dumps({"reason": "exception", "error": "e", "last_step": 3})
PLACE = {"kind": "grad", "tensor": "w", "op": "nans", "value": 3.0}
EVENTS = [
    {"type": "anomaly", "rule": "AnomalyNan", "message": "m", **PLACE},
    {"type": "exit", "message": "exception", "details": EXIT},
]
PAGES = (
    b'# HELP a A.\n# TYPE a gauge\na{x="y"} 1.5\nb 2 1700000000000\nc NaN\n',
    b"a 1\n",
    b'# TYPE a counter\na_total{x="y"} 1.0 1700000000.5 # {trace="z"} 1\n# EOF\n',
)
ROW = (
    " [2025-02-28 16:26:2{0}] iteration        {0}/    1000 | consumed samples:          256 |"
    " elapsed time per iteration (ms): 1217.4 | learning rate: 1.0E-05 | global batch size:   256 |"
    " lm loss: 1.217489E+01 | loss scale: 1.0 | grad norm: 5.127 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)
STATE = {
    "global_step": 2,
    "log_history": [{"epoch": 0.5, "loss": 2.5, "step": 1}, {"epoch": 1.0, "eval_loss": 2.0, "step": 2}],
    "max_steps": 2,
}
LOGS = {
    "textlog": "step 1 loss 2.5 lr 1e-3\nstep 2/100 loss 2.25 lr 1e-3 eta 00:10:00\nRuntimeError: no memory\n" * 3,
    "jsonl": '{"step": 1, "loss": 2.5, "time": "2026-01-01T00:00:00Z"}\n{"step": 2, "loss": NaN, "eval/x": [1, 2]}\n',
    "megatron": ROW.format(1) + ROW.format(2),
    "trainer_state": json.dumps(STATE),
    "columns": "step,loss,lr\n1,2.5,0.1\n2,2.25,0.1\n3,nan,0.1\n",
    "openmetrics": 'rankscope_loss{run="r",rank="0"} 2.5 1700000000\nup{a="b"} 1 1700000000\n',
}


@dataclass(frozen=True)
class Reader:
    """A reader of bytes, which may raise only `own` errors. Earlier releases raised others for inputs `former`."""

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    own: tuple[type[Exception], ...] = ()
    former: tuple[bytes, ...] = ()


def exposition(is_openmetrics: bool) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        pages = PageReader((("dc", "x"),))
        for number, body in enumerate((PAGES[1], data, data)):  # a page may have the template of the page before it
            found = pages.read(body, openmetrics=is_openmetrics and number > 0)
            OwnTimes().fresh(found, 1_700_000_000_000_000)
        return found

    return read


def written(version: int) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        reader = WriteReader()
        return reader.read(data) if version == 1 else reader.read_2(data, 1 << 20)

    return read


def snappy(data: bytes) -> object:
    return unpacked(data, 1 << 20)


def plan(data: bytes) -> object:
    text = data.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode()
    columns = PlanCache().add(plan_hash(text), text)
    return conform(columns.dimension_rows(lambda: {"run": "r", "attempt": 0, "rank": 0}), "tensors")


def body(data: bytes) -> object:
    wire = open_stream(data)
    plans = PlanCache()
    plans.add(PLAN.hash, PLAN.to_json())
    wanted = plan_ids(wire)
    if any(plans.get(one) is None for one in wanted):
        raise DecodeError("unknown plan")
    checked = check(wire, {one: plans.get(one) for one in wanted}, CONTEXT, after=-1, first_ordinal=0)
    events = checked.rows_of("events")
    symptoms(events), exit_reports(events), firings(events), latest_events(events)
    return {name: conform(table, name) for name, table in decode([checked]).items()}


def registration(data: bytes) -> object:
    return parse_registration(data).to_json().encode()


def reply(data: bytes) -> object:
    client = ServiceClient("http://127.0.0.1:1", None)
    client._post = lambda *_: data
    return client.register(REGISTRATION)


def details(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    event = {"run": "r", "ts": 1, "type": "exit", "details": text, "message": text}
    with contextlib.suppress(ValueError):
        json.loads(redacted_json(text) or "")  # as a page reads the stored details
    return parse_details(text), exit_reports([event])


def stacks(data: bytes) -> object:
    document = parse_details(data.decode("utf-8", "replace"))
    for kind in (StackDump, FlightRecord):
        try:
            kind.of(document)
        except ValueError:
            continue
    return document


def answer(data: bytes) -> object:
    """Read the bytes as the headers and the body of a rank's answer to a poll."""
    head, _, rest = data.partition(b"\n\n")
    lines = [line.partition(": ") for line in head.decode("latin-1").splitlines()]
    headers = CIMultiDict((name, value) for name, _, value in lines if name)
    status = {"204": 204, "409": 409, "429": 429, "503": 503}.get(headers.get("Status", ""), 200)
    length = headers.get("Content-Length", "")
    response = SimpleNamespace(
        status=status,
        headers=headers,
        content_type=headers.get("Content-Type", "").partition(";")[0],
        content_length=int(length) if length.isascii() and length.isdecimal() and len(length) < 10 else None,
        read=lambda: _done(rest),
        content=SimpleNamespace(read=lambda _: _done(rest)),
    )

    async def read() -> object:
        return await Fetcher(networks=(), token=None, timeout_seconds=1)._read_records(response, "i")

    return asyncio.run(read())


async def _done(value: bytes) -> bytes:
    return value


def lists(is_yaml: bool) -> Callable[[bytes], object]:
    return lambda data: listed(data, ExporterListSection(file="x"), is_yaml=is_yaml)


def notification_answer(data: bytes) -> object:
    secrets = Secrets(["json://user:pw@host/path?key=value"])
    return secrets.removed_from(data.decode("utf-8", "replace"))


def log(kind: str, folder: Path, suffix: str) -> Callable[[bytes], object]:
    path = folder / f"log{suffix}"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        for item in importers()[kind].read(path, Faults()):
            for table in getattr(item, "tables", {}).values():
                table.validate(full=True)
        return find_importer(path)

    return read


def spool(folder: Path) -> Callable[[bytes], object]:
    place = folder / REGISTRATION.incarnation
    place.mkdir(exist_ok=True)
    write_identity(place, REGISTRATION)
    (place / "lock").touch()

    def needed(stream: bytes) -> Iterable[str] | None:
        try:
            return plan_ids(open_stream(stream))
        except DecodeError:
            return None

    def read(data: bytes) -> object:
        (place / f"{0:012d}.arrows").write_bytes(data)
        reader = SpoolReader(place, pa, needed)
        reader.head()
        return reader.after(-1, 1 << 20)

    return read


def identity(folder: Path) -> Callable[[bytes], object]:
    place = folder / "identity" / REGISTRATION.incarnation
    place.mkdir(parents=True, exist_ok=True)

    def read(data: bytes) -> object:
        (place / "identity.json").write_bytes(data)
        return read_identity(place)

    return read


def _tensorboard() -> bytes:
    loss = Event(step=1, wall_time=1.7e9)
    loss.summary.value.add(tag="loss", simple_value=2.5)
    events = (Event(file_version="brain.Event:2", wall_time=1.7e9), loss, loss)
    return b"".join(framed(event.SerializeToString()) for event in events)


def readers(folder: Path) -> Iterator[Reader]:
    """Yield all readers. Those of files write into `folder`."""
    yield from _of_pages_and_writes()
    yield from _of_ranks(folder)
    yield from _of_diagnostics()
    yield from _of_answers()
    yield from _of_logs(folder)


def _of_pages_and_writes() -> Iterator[Reader]:
    own = (DecodeError,)
    yield Reader("page", PAGES[:2], exposition(False), own, (b"", b"a 1 " + b"9" * 400 + b"\n"))
    long = PAGES[2].replace(b"1700000000.5", b"9" * 400)
    yield Reader("page in OpenMetrics", PAGES[2:], exposition(True), own, (long,))
    series = ({"__name__": "m", "instance": "i", "x": "y"}, [(1_700_000_000_000, 1.0)], 1, 1)
    request = write_request(series, metadata=["m"])
    yield Reader("remote write", (request,), written(1), own)
    packed = (DATA / "remote_write_2" / "prometheus_3.16.snappy").read_bytes()
    recorded = unpacked(packed, 1 << 24)
    yield Reader("remote write 2.0", (recorded[:4000], recorded), written(2), own)
    small = pa.compress(request, "snappy", asbytes=True)
    yield Reader("snappy", (packed, small), snappy, (*own, RegistrationError))
    wanted = b"\x0a\x14\x08\x01\x10\x02\x1a\x0e\x12\x08__name__\x1a\x02up"
    yield Reader("remote read", (wanted,), read_request, own)


def _of_ranks(folder: Path) -> Iterator[Reader]:
    own, text = (DecodeError,), PLAN.to_json().encode()
    shapes = (b'"shape":[1e999]', b'"shape":["a"]', b'"shape":[%d]' % (1 << 70))
    wrong = [text.replace(b'"shape":[2,3]', shape) for shape in shapes]
    wrong += [text.replace(b'"kind":"grad"', b'"kind":null'), text.replace(b'"tensor":"w"', b'"tensor":null')]
    wrong += [b"[" * 100_000, text.replace(b'["v"]', b'[["v"]]'), text.replace(b'["v"]', b'["\\ud800"]')]
    yield Reader("plan", (text,), plan, own, tuple(wrong))
    scalars = [{"name": "loss", "value": 2.0, "labels": '{"a":"b"}'}]
    records = [
        {"seq": 0, "step": 1, "ts": 1, "scalars": scalars, "events": EVENTS},
        {"seq": 1, "step": 2, "ts": 2, "plan": PLAN.hash, "values": [1.0] * 12, "counts": [0] * 8},
    ]
    streams = tuple(encode_records(records, compression=one) for one in (None, "lz4"))
    odd = [streams[0].replace(b"message", b"m\xffssage"), streams[0].replace(b"micro_step", b"micro\xffstep")]
    odd += [mutated(streams[713_654 % 2], streams, random.Random(713_654))]  # an event after the year 9999
    yield Reader("records", streams, body, own, tuple(odd))
    yield Reader("spool", (streams[0],), spool(folder), (SpoolError,))
    write_identity(folder, REGISTRATION)
    yield Reader("identity of a spool", ((folder / "identity.json").read_bytes(),), identity(folder), (SpoolError,))
    yield Reader("registration", (REGISTRATION.to_json().encode(),), registration, (RegistrationError,))
    lease = RegistrationReply(lease="x", attempt=0, heartbeat_seconds=2.5).to_json().encode()
    yield Reader("reply to a registration", (lease,), reply, (UnreachableError,), (b"[" * 100_000,))
    head = (
        b"Status: 200\nRankscope-Incarnation: i\nRankscope-Schema: 1\nRankscope-Head: 1\nRankscope-Ring-Fill: 0.5\n"
        b"Rankscope-State: running\nRankscope-First: 0\nRankscope-Last: 1\nRankscope-Rows: 2\nContent-Length: 4\n"
        b"Content-Type: application/vnd.apache.arrow.stream\n\nbody"
    )
    nothing = b"Status: 204\nRetry-After: 5\nRankscope-Incarnation: i\nRankscope-Ring-Fill: nan\n\n"
    yield Reader("answer of a rank", (head, nothing), answer, (FetchError,))


def _of_diagnostics() -> Iterator[Reader]:
    asked = b'{"run": "r", "ranks": [0, 1]}'
    yield Reader("request of stacks", (asked,), parse_stacks_request, (RegistrationError,))
    known = tuple(str(event.get("details")).encode() for event in EVENTS)
    yield Reader("details", known, details, (), (b"[" * 100_000,))
    dump = {"reason": "hang", "threads": [{"ident": 1, "name": "m", "frames": [["a.py", 3, "f"]]}], "left_out": 0}
    entry = {"op": "all_reduce", "backend": "nccl", "group": "g", "seq": 1, "is_pending": True, "age_seconds": 1.0}
    groups = [{"id": "0", "ranks": "0-1", "latest_seq": 1}]
    flight = {"reason": "hang", "collectives": [entry], "recorded": 1, "groups": groups}
    endless = json.dumps(dump | {"left_out": math.inf}).encode()
    yield Reader("stacks", tuple(json.dumps(one).encode() for one in (dump, flight)), stacks, (), (endless,))


def _of_answers() -> Iterator[Reader]:
    targets = b'[{"targets": ["a:9100"], "labels": {"__metrics_path__": "/m", "job": "x"}}]'
    yield Reader("list of exporters", (targets,), lists(False), (ConfigError,))
    text = b"- targets: ['a:9100']\n  labels: {job: x}\n"
    yield Reader("list of exporters in YAML", (text, targets), lists(True), (ConfigError,))
    response = (b'{"status": "success", "data": {"activeTargets": []}}',)
    yield Reader("answer to a command", response, lambda data: Response(200, data).json(), (), (b"[" * 100_000,))
    page = b"<html>403 https://user:pw@host/path?key=value token=abc</html>"
    yield Reader("answer to a message", (page,), notification_answer)


def _of_logs(folder: Path) -> Iterator[Reader]:
    own = (IngestError,)
    suffixes = {"jsonl": ".jsonl", "trainer_state": ".json", "columns": ".csv"}
    for kind, text in LOGS.items():
        yield Reader(f"log: {kind}", (text.encode(),), log(kind, folder, suffixes.get(kind, ".log")), own)
    yield Reader("log: tensorboard", (_tensorboard(),), file_of("tensorboard", folder / "a.tfevents.1"), own)
    rank, samples = "Nov20_21-14-28-rank0-3209471c", DATA / "msprobe"
    seeds = tuple(path.read_bytes() for path in sorted((samples / "single_rank" / rank).glob("*.csv"))[:3])
    tables = file_of("msprobe", folder / "msprobe" / rank / "grad_reduced_0-1.csv")
    yield Reader("log: msprobe", seeds, tables, own, (seeds[0].replace(b", ", b"\x0c"),))
    documents = ("single_rank/anomaly_detected/anomaly_analyse.json", "print_struct/module_struct.json")
    for name in documents:
        path = folder / "msprobe" / rank / Path(name).name
        yield Reader(f"log: {path.name}", ((samples / name).read_bytes(),), file_of("msprobe", path), own)


def file_of(kind: str, path: Path) -> Callable[[bytes], object]:
    path.parent.mkdir(parents=True, exist_ok=True)

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return list(importers()[kind].read(path, Faults()))

    return read
