"""Registration of a rank: heartbeats, lease, and a service that is unreachable or refuses."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.protocol.channel import Registration
from rankscope_exporter.serving import persistence, registration
from rankscope_exporter.serving.config import ServeError
from rankscope_exporter.serving.orphan_recovery import OrphanRecovery
from rankscope_exporter.serving.registration import MAX_RETRY_SECONDS, ServiceClient, retry_seconds


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
        until(lambda: rank.channel.state.lease)
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


@given(st.floats(0.0, 0.4))
def test_late_poll_in_each_interval_still_suppresses_heartbeats(lateness):
    """Polls and heartbeats both have an interval of 5 s by default; the result must not depend on their order."""
    polls = itertools.accumulate([5.0 * (1.0 + lateness)] * 7)
    due = 5.0
    for before, polled_at in itertools.pairwise([0.0, *polls]):
        due = registration.next_heartbeat(due, sent_at=0.0, polled_at=before, interval_seconds=5.0)
        assert due > polled_at


def test_polls_without_the_lease_do_not_suppress_heartbeats(leased_for, service, until):
    rank = leased_for(0.2)

    until(lambda: rank.records(-1, committed=-1, Rankscope_Lease="lease-0") and len(service.registrations) >= 2)


def test_polled_rank_sends_a_heartbeat_at_the_longest_interval(leased_for, service, until, monkeypatch):
    monkeypatch.setattr(registration, "MAX_HEARTBEAT_SECONDS", 0.4)
    began = time.monotonic()
    rank = leased_for(0.3)
    until(lambda: rank.records(-1, committed=-1, Rankscope_Lease=service.lease) and len(service.registrations) == 4)

    assert time.monotonic() - began >= 3 * 0.4


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
    assert rank.channel.state.lease is None

    service.refusal = None
    until(lambda: rank.channel.state.lease)
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


@pytest.mark.parametrize("text", ["[]", "no json", '{"lease": 1, "attempt": 0, "heartbeat_seconds": 1}'])
def test_invalid_reply_is_not_a_lease(new_rank, service, until, caplog, text):
    service.refusal = (200, text)
    rank = new_rank(ingest_url=service.url)
    until(lambda: caplog.messages)

    assert rank.channel.state.lease is None
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
    monkeypatch.setattr(persistence, "OLDER_LAUNCHES_SECONDS", 0.05)
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: rank.channel.state.lease)

    assert "serving spools of dead processes" in {where for where, _ in rank.faults}
