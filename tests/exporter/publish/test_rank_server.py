"""The life cycle of a rank server, its addresses and settings, and its registration with the service."""

import json
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.wire.channel import Registration
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.publish import http_server, registration
from rankscope_exporter.publish.http_server import Answer, open_server
from rankscope_exporter.publish.registration import MAX_RETRY_SECONDS, OrphanRecovery, ServiceClient, retry_seconds
from rankscope_exporter.publish.serving_config import ServeConfig, ServeError


@pytest.fixture
def own_threads():
    """Return a function that lists the threads of Rankscope that the test has started."""
    before = set(threading.enumerate())

    def since() -> list[str]:
        return [item.name for item in set(threading.enumerate()) - before if item.name.startswith("rankscope")]

    return since


def test_server_has_no_socket_and_no_thread_before_start(own_threads, new_rank):
    rank = new_rank(started=False)

    assert ([0], None, []) == (rank.fill(1), rank.channel.url, own_threads())

    rank.channel.start()
    assert [0] == rank.records(-1).seqs
    with pytest.raises(ServeError, match="create a new one"):
        rank.channel.start()


def test_records_of_several_threads_get_distinct_sequence_numbers(rank):
    """The watchdog and the HTTP server publish in parallel with the publisher."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda begin: rank.fill(200, begin), range(0, 4000, 1000)))
    steps = [row["step"] for row in rank.records(-1).rows]

    assert sorted(begin + n for begin in range(0, 4000, 1000) for n in range(200)) == sorted(steps)
    for thousand in range(4):
        ours = [step for step in steps if step // 1000 == thousand]
        assert ours == sorted(ours)


def test_close_frees_the_port_and_ends_the_threads_immediately(own_threads, new_rank, service, until, monkeypatch):
    monkeypatch.setattr(http_server, "_SWEEP_SECONDS", 60.0)
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.lease)
    begun = time.monotonic()
    rank.channel.close()
    rank.channel.close()
    with socket.create_server(("127.0.0.1", rank.port)):
        pass

    assert time.monotonic() - begun < 10.0
    assert [] == own_threads()


@pytest.mark.parametrize("with_service", [False, True])
def test_drain_does_not_wait_without_a_reachable_service(new_rank, free_port, with_service):
    rank = new_rank(ingest_url=f"http://127.0.0.1:{free_port}" if with_service else None)
    rank.fill(1)
    begun = time.monotonic()
    left = rank.channel.drain(30.0)

    assert 1 == left
    assert time.monotonic() - begun < 10.0


def test_drain_registers_as_draining_and_waits_for_the_commit(leased, service, until):
    leased.fill(3)

    def serve():
        until(lambda: service.pokes)
        leased.records(-1, Rankscope_Lease=service.lease)
        leased.records(2, committed=2, Rankscope_Lease=service.lease)

    puller = threading.Thread(target=serve)
    puller.start()
    left = leased.channel.drain(10.0)
    puller.join()

    assert 0 == left
    assert "draining" == service.registrations[-1]["state"]


@pytest.mark.parametrize("is_registered", [True, False])
def test_drain_ends_by_the_committed_value_of_the_reply(new_rank, service, until, is_registered):
    """The run may be shorter than its registration."""
    if not is_registered:
        service.hold.clear()
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.lease or not is_registered)
    rank.fill(1)
    service.committed = 0
    threading.Timer(0.2, service.hold.set).start()

    assert 0 == rank.channel.drain(10.0)


def test_forked_child_has_no_sockets_of_the_rank(rank):
    """The child has neither the listening socket nor the connections; the parent still serves and can close."""
    rank.fill(1)
    (report_in, report), (go_in, go), port = os.pipe(), os.pipe(), rank.port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as reader:
        reader.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        received = b""
        while b"head" not in received:
            received += reader.recv(10_000)
        child = os.fork()
        if child == 0:
            try:
                rank.channel.abandon_after_fork()
                inert = rank.fill(1), rank.channel.drain(5), rank.channel.close(), rank.channel.set_phase("x")
                ports = {one.laddr.port for one in psutil.Process().net_connections() if one.laddr}
                os.write(report, repr((inert, port in ports)).encode())
                os.read(go_in, 1)
            finally:
                os._exit(0)
        os.close(report)
        in_child, status = os.read(report_in, 1000), rank.get("/healthz").status
        rank.channel.close()
        while reader.recv(1000):
            pass
    socket.create_server(("127.0.0.1", port)).close()  # while the child is still running
    os.write(go, b"!")
    os.waitpid(child, 0)
    for end in (report_in, go_in, go):
        os.close(end)

    assert (b"(([-1], 0, None, None), False)", 200, []) == (in_child, status, rank.faults)


@pytest.fixture
def listening():
    servers = []

    def make(listen, **settings):
        config = ServeConfig(listen=listen, token="t", **settings)
        servers.append(open_server(config, lambda _: Answer(204), on_fault=lambda *_: None, meter=CpuMeter()))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def test_servers_share_a_port_range(listening, free_port):
    """Each server takes the first free port, and a released port is used again."""
    listen = f"127.0.0.1:{free_port}-{free_port + 30}"
    first, second, third = (listening(listen) for _ in range(3))
    second.stop()

    assert free_port <= first.port < second.port < third.port <= free_port + 30
    assert second.port == listening(listen).port


def test_full_port_range_is_reported(listening):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        with socket.socket() as two:
            try:
                two.bind(("127.0.0.1", port + 1))
                two.listen()
            except OSError:
                pytest.skip("another process uses the next port")
            one.listen()
            with pytest.raises(ServeError, match=f"127.0.0.1:{port}-{port + 1}: all 2 ports are in use; set a longer"):
                listening(f"127.0.0.1:{port}-{port + 1}")


REACHED_AT = {"[::1]": ["::1"], "0.0.0.0": ["127.0.0.1", "127.0.0.2"], "[::]": ["::1", "127.0.0.1"]}
REACHED_AT |= {"localhost": ["127.0.0.1"], "[::ffff:127.0.0.1]": ["127.0.0.1"]}


@pytest.mark.parametrize("listen", REACHED_AT)
def test_wildcard_address_accepts_ipv4_and_ipv6(listening, listen):
    server = listening(f"{listen}:0")
    server.start()
    for host in REACHED_AT[listen]:
        with socket.create_connection((host, server.port), timeout=10) as client:
            client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 204")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.1.2.3:9400", "[::]:0", "node-7:9400"])
def test_address_reachable_from_other_machines_needs_a_token(listen):
    with pytest.raises(ServeError, match=r"RANKSCOPE_TOKEN.*insecure"):
        ServeConfig(listen=listen)

    assert ServeConfig(listen=listen, token="secret").token
    assert ServeConfig(listen=listen, insecure=True).insecure


@pytest.mark.parametrize("listen", ["127.8.8.8:1", "[::1]:9400", "localhost:0", "[::ffff:127.0.0.1]:0"])
def test_loopback_address_needs_no_token(listen):
    assert ServeConfig(listen=listen).address.is_loopback


WRONG = [
    *(({"listen": "127.0.0.1"}, "127.0.0.1:0"), ({"listen": "127.0.0.1:99999"}, "0 to 65535")),
    *(({"listen": "127.0.0.1:http"}, "0 to 65535"), ({"listen": "http://127.0.0.1:0"}, "write host:port")),
    *(({"listen": ":9400"}, "write host:port"), ({"listen": "127.0.0.1 :0"}, "write host:port")),
    ({"listen": "127.0.0.1:9499-9400"}, "a port range must ascend"),
    ({"listen": "127.0.0.1:0-10"}, "a port range must ascend"),
    *(({"listen": "127.0.0.1:1-60000"}, "at most 1000 ports"), ({"listen": "::1:9400"}, "in brackets")),
    *(({"listen": "[::1"}, "listen"), ({"listen": "[fe80::1%eth0]:9400"}, "zone")),
    *(({"advertise": "http://node:1/x"}, "advertise"), ({"ingest_url": "node:8080"}, "http://host:port")),
    ({"ingest_url": "ftp://node:8080"}, "http://host:port"),
    ({"ingest_url": "http://node:port"}, "http://host:port"),
    *(({"ingest_url": "http://me:pass@node:1"}, "RANKSCOPE_TOKEN"), ({"ring_records": 255}, "at least 256")),
    *(({"ring_bytes": 0}, "at least 1"), ({"series_budget": 0}, "at least 1")),
    *(({"page_ops": "some"}, "'judged' or 'all'"), ({"token": ""}, "remove it")),
    *(({"token": "a b"}, "without spaces"), ({"token": "ü"}, "ASCII")),
    ({"token": "a", "token_file": "x"}, "both set"),
    ({"token_file": "nowhere"}, "token_file nowhere: No such file"),
    ({"cert_file": "nowhere"}, "cert_file nowhere: no such file"),
    ({"key_file": "nowhere"}, "key_file is set without cert_file"),
    ({"spool_sync": "yes"}, "spool_sync must be true or false"),
    ({"spool_bytes": 0}, "spool_bytes must be a whole number of at least 1, not 0"),
    ({"spool_dir": 5}, "spool_dir must be text"),
]


@pytest.mark.parametrize(("wrong", "fix"), WRONG)
def test_wrong_setting_is_refused_with_the_fix(wrong, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServeError, match=fix):
        ServeConfig(**wrong)


@pytest.mark.parametrize(("text", "fix"), [("", "is empty"), ("\n", "is empty"), ("two words", "without spaces")])
def test_content_of_the_token_file_is_checked(tmp_path, text, fix):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ServeError, match=f"token_file .*{fix}"):
        ServeConfig(token_file=str(path))


def test_each_environment_variable_sets_its_field_unless_it_is_empty(tmp_path):
    wanted = {"listen": "0.0.0.0:9400", "advertise": "node-3:9500", "token": "secret"}
    wanted |= {"ingest_url": "http://service:8080", "discovery_dir": "/somewhere", "spool_dir": str(tmp_path)}
    texts = {**wanted, "insecure": "yes", "spool_sync": "1"}
    given = MonitorConfig().with_environment({f"RANKSCOPE_{name.upper()}": text for name, text in texts.items()})
    empty = MonitorConfig().with_environment({f"RANKSCOPE_{name.upper()}": "" for name in texts if "spool" not in name})

    assert ServeConfig(**wanted, insecure=True, spool_sync=True) == given.serve
    assert ServeConfig() == empty.serve


def test_spool_folder_is_expanded_or_off():
    texts = ("~/spool", "off")
    found = [MonitorConfig().with_environment({"RANKSCOPE_SPOOL_DIR": text}).serve.spool_dir for text in texts]

    assert "rankscope-records" == ServeConfig().spool_dir
    assert [str(Path("~/spool").expanduser()), None] == found
    assert ServeConfig(spool_dir="off").spool_dir is ServeConfig(spool_dir=None).spool_dir is None


def test_environment_replaces_token_and_token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("from-file\n")
    by_file = MonitorConfig(serve=ServeConfig(listen="0.0.0.0:0", token_file=str(path)))
    direct = MonitorConfig(serve=ServeConfig(token="set-directly"))
    given = by_file.with_environment({"RANKSCOPE_TOKEN": "set-directly"})
    named = direct.with_environment({"RANKSCOPE_TOKEN_FILE": str(path)})

    assert ("from-file", "from-file") == (by_file.serve.secret, named.serve.secret)
    assert "set-directly" == given.serve.secret


@pytest.mark.parametrize(
    ("config", "advertised"),
    [
        *(({}, "127.0.0.1:4711"), ({"listen": "[::1]:0"}, "[::1]:4711"), ({"listen": "10.0.0.7:0"}, "10.0.0.7:4711")),
        ({"listen": "0.0.0.0:0", "advertise": "outside"}, "outside:4711"),
        ({"listen": "0.0.0.0:0", "advertise": "outside:80"}, "outside:80"),
        *(({"listen": "0.0.0.0:4700-4799"}, "node-1:4711"), ({"listen": "[::]:4700-4799"}, "node-1:4711")),
        ({"listen": "0.0.0.0:4700-4799", "advertise": "gateway"}, "gateway:4711"),
        ({"listen": "0.0.0.0:4700-4799", "advertise": "gateway:14700-14799"}, "gateway:14711"),
        ({"listen": "0.0.0.0:4711", "advertise": "gateway:80"}, "gateway:80"),
        ({"listen": "[::]:0", "advertise": "[fd00::2]"}, "[fd00::2]:4711"),
    ],
)
def test_advertised_address_is_paired_with_the_bound_port(config, advertised):
    assert advertised == str(ServeConfig(token="t", **config).advertised(4711, "node-1"))


@pytest.mark.parametrize("advertise", ["gateway:80", "gateway:14700-14710", "0.0.0.0", "[::]:9400"])
def test_advertise_with_another_number_of_ports_is_refused(advertise):
    with pytest.raises(ServeError, match=r"as many ports as listen has|is not a reachable address"):
        ServeConfig(listen="0.0.0.0:4700-4799", token="t", advertise=advertise)


def test_registration_contains_identity_url_and_token(new_rank, service, until, monkeypatch, free_port):
    """A proxy of the environment is not used."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port}")
    rank = new_rank(ingest_url=service.url, token="open-sesame")
    until(lambda: service.registrations)
    sent = Registration.from_json(json.dumps(service.registrations[0]))

    who = (sent.run, sent.rank, sent.world_size, sent.host, sent.incarnation, sent.launch_id)
    assert ("run-1", 0, 2, "node-1", "feedc0de", "launch-1") == who
    assert (rank.channel.url, "running", 100) == (sent.url, sent.state, sent.planned_steps)
    assert {"quantities": ["weights"]} == sent.config
    assert {"rankscope", "python", "pyarrow"} <= sent.versions.keys()
    assert {"Bearer open-sesame"} == set(service.authorizations)


@pytest.fixture
def leased_for(new_rank, service, until):
    """Return a function that creates a rank which the service double has registered, with this heartbeat interval."""

    def make(heartbeat_seconds):
        service.heartbeat_seconds = heartbeat_seconds
        rank = new_rank(ingest_url=service.url)
        until(lambda: rank.channel.lease)
        return rank

    return make


def test_heartbeat_contains_the_current_state(leased_for, service, until):
    leased_for(0.1).fill(1, begin=41)
    sent = until(lambda: [sent for sent in service.registrations if sent["head"] == 0])

    assert 41 == sent[0]["step"]


def test_notice_of_the_service_is_printed_once(leased_for, service, until, caplog):
    service.notice = "two trainings have the same run name"
    leased_for(0.05)
    until(lambda: len(service.registrations) > 3)

    assert 1 == caplog.text.count("two trainings have the same run name")


def test_polled_rank_sends_no_heartbeat(leased_for, service, until):
    rank = leased_for(0.6)
    until_time = time.monotonic() + 1.3
    while time.monotonic() < until_time:
        rank.records(-1, committed=-1, Rankscope_Lease=service.lease)
        time.sleep(0.05)
    while_polled = len(service.registrations)
    until(lambda: len(service.registrations) == 2)  # no more polls

    assert 1 == while_polled


def test_polled_rank_registers_immediately_for_a_notice(leased_for, service, until, caplog):
    """A poll postpones the next heartbeat by up to a minute."""
    rank = leased_for(60.0)
    service.notice = "two trainings have the same run name"
    rank.records(-1, committed=-1, Rankscope_Lease=service.lease, Rankscope_Notice="1")
    until(lambda: "two trainings have the same run name" in caplog.text)

    assert 2 == len(service.registrations)


def test_polls_without_the_lease_do_not_suppress_heartbeats(leased_for, service, until):
    rank = leased_for(0.2)

    until(lambda: rank.records(-1, committed=-1, Rankscope_Lease="lease-0") and len(service.registrations) >= 2)


def test_reply_with_committed_above_the_head_is_a_fault(new_rank, service, until):
    service.committed = 5
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.faults)

    assert -1 == rank.channel.ring.committed


def test_phase_is_registered_immediately_and_only_urgent_events_poke(leased, service, until):
    leased.fill(1, events=(Event(type=EventType.NOTE),))
    leased.channel.set_phase("evaluation")
    until(lambda: service.registrations[-1]["phase"] == "evaluation")
    leased.channel.set_phase(None)
    until(lambda: service.registrations[-1]["phase"] is None)
    assert (3, []) == (len(service.registrations), service.pokes)

    for number, kind in enumerate((EventType.ANOMALY, EventType.EXIT), start=1):
        leased.fill(1, events=(Event(type=kind),))
        until(lambda: len(service.pokes) == number)  # noqa: B023 - called at once
    assert [{"incarnation": "feedc0de"}] * 2 == service.pokes


def test_publish_does_not_wait_for_the_service(leased, service):
    """The service hangs during an answer; the publisher is not delayed."""
    service.hold.clear()
    begun = time.monotonic()
    for step in range(200):
        leased.fill(1, events=(Event(type=EventType.ANOMALY, rule="AnomalyNan"),))
        leased.channel.set_phase(str(step))
    spent = time.monotonic() - begun
    service.hold.set()

    assert spent < 5.0  # the service delays its answer for 10 s


def test_refusal_is_logged_once_until_the_service_accepts_the_rank(new_rank, service, until, caplog):
    service.refusal = (403, "10.0.0.7 is outside networks.allowed")
    rank = new_rank(ingest_url=service.url)
    until(lambda: len(service.registrations) >= 3)

    assert 1 == sum("outside networks.allowed" in message for message in caplog.messages)
    assert rank.channel.lease is None

    service.refusal = None
    until(lambda: rank.channel.lease)
    assert [] == rank.faults


def test_unreachable_service_is_logged_once_and_is_not_a_fault(new_rank, free_port, caplog, until):
    rank = new_rank(ingest_url=f"http://127.0.0.1:{free_port}")
    until(lambda: caplog.messages)
    (sent,) = caplog.messages

    assert "cannot be reached" in sent
    assert "refused" in sent.lower()
    assert [] == rank.faults


def test_redirect_is_not_followed(new_rank, service, until, caplog):
    """Otherwise a redirect could send the token to another server."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        service.redirect_to = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/api/v1/register"
        new_rank(ingest_url=service.url, token="secret")
        until(lambda: len(service.authorizations) >= 2)
        elsewhere.settimeout(0.05)
        with pytest.raises(TimeoutError):
            elsewhere.accept()

    assert "307" in caplog.text


@pytest.mark.parametrize("is_replaced", [False, True])
def test_rank_follows_its_service_and_returns_to_the_configured_one(
    new_rank, service, make_service, until, is_replaced
):
    """The service of the run is named with its shard. It ends, and its shard gets another service.

    Another program may have its port afterwards.
    """
    first, second = make_service(), make_service()
    first.heartbeat_seconds = second.heartbeat_seconds = 0.1
    second.lease = "lease-2"
    service.redirect_to, service.shard_of_redirect = f"{first.url}/api/v1/register", "1/2"
    rank = new_rank(ingest_url=service.url, token="secret")
    until(lambda: len(first.registrations) >= 3)
    rank.fill(1, events=(Event(type=EventType.ANOMALY, rule="AnomalyNan"),))
    until(lambda: first.pokes)
    asked = len(service.authorizations)
    service.redirect_to = f"{second.url}/api/v1/register"
    if is_replaced:
        first.refusal = (200, "<html>")
    else:
        first.stop()
    until(lambda: rank.channel.lease == "lease-2")

    assert 1 == asked  # later heartbeats go to the service of the run
    assert {"Bearer secret"} == set(first.authorizations)


@pytest.mark.parametrize("text", ["[]", "no json", '{"lease": 1, "attempt": 0, "heartbeat_seconds": 1}'])
def test_invalid_reply_is_not_a_lease(new_rank, service, until, caplog, text):
    service.refusal = (200, text)
    rank = new_rank(ingest_url=service.url)
    until(lambda: caplog.messages)

    assert rank.channel.lease is None
    assert "invalid registration reply" in caplog.text


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_retry_interval_has_a_limit_and_jitter_of_its_own_random_state(failures, jitter):
    state = random.getstate()
    wait = retry_seconds(failures, lambda: jitter)

    assert 0.125 <= wait <= MAX_RETRY_SECONDS
    assert wait <= retry_seconds(failures + 1, lambda: jitter)
    assert retry_seconds(failures) <= MAX_RETRY_SECONDS
    assert state == random.getstate()


def test_rank_without_service_writes_a_discovery_file(new_rank, tmp_path):
    rank = new_rank(run="a/b=ü", rank=3, discovery_dir=str(tmp_path / "sd"))
    (path,) = (tmp_path / "sd").iterdir()
    written = json.loads(path.read_text(encoding="utf-8"))
    rank.channel.close()

    assert path.name.startswith("rankscope-a_b_ü-3~")
    assert [{"targets": [f"127.0.0.1:{rank.port}"], "labels": {"job": "rankscope", "instance": "a/b=ü/3"}}] == written
    assert [] == list((tmp_path / "sd").iterdir())


def test_discovery_file_of_a_newer_process_or_another_run_is_kept(new_rank, tmp_path):
    old, new = (new_rank(discovery_dir=str(tmp_path)) for _ in range(2))
    old.channel.close()
    (path,) = tmp_path.iterdir()

    assert str(new.port) in path.read_text(encoding="utf-8")
    for length in (300, 301):
        new_rank(run="习" * length, discovery_dir=str(tmp_path))
    assert 3 == len(list(tmp_path.glob("*.json")))


def test_unwritable_discovery_folder_is_refused(new_rank, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    rank = new_rank(started=False, discovery_dir=str(tmp_path / "file"))
    with pytest.raises(ServeError, match="RANKSCOPE_DISCOVERY_DIR"):
        rank.channel.start()

    rank.channel.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", rank.port), timeout=1)


def test_rank_remains_registered_if_a_commit_fails(new_rank, service, until, plant):
    """The commit raises a disk error; the thread continues with its heartbeats."""
    service.heartbeat_seconds = 0.1
    rank = new_rank(started=False, ingest_url=service.url)
    plant(rank.channel.ring, "commit", OSError("no space left on device"))
    rank.channel.start()
    until(lambda: len(service.registrations) > 2)

    assert {"registration"} == {where for where, _ in rank.faults}


def test_heartbeats_continue_after_a_failed_poke(leased_for, service, until, plant):
    rank = leased_for(0.1)
    plant(ServiceClient, "poke", TypeError("not foreseen"))
    rank.fill(1, events=(Event(type=EventType.ANOMALY),))
    until(lambda: rank.faults)
    sent_before = len(service.registrations)
    until(lambda: len(service.registrations) > sent_before + 2)

    assert ["requesting an early poll"] == [where for where, _ in rank.faults]


def test_rank_registers_if_orphan_recovery_cannot_start(new_rank, service, until, plant, tmp_path, monkeypatch):
    plant(OrphanRecovery, "start", RuntimeError("can't start new thread"))
    monkeypatch.setattr(registration, "OLDER_LAUNCHES_SECONDS", 0.05)
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: rank.channel.lease)

    assert "serving spools of dead processes" in {where for where, _ in rank.faults}
