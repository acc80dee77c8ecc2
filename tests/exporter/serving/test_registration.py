"""How a rank makes itself known, keeps its lease, and bears a service that is away or says no."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.protocol.channel import Registration
from rankscope_exporter.serving import registration
from rankscope_exporter.serving.config import ServeError
from rankscope_exporter.serving.orphan_recovery import OrphanRecovery
from rankscope_exporter.serving.registration import MAX_RETRY_SECONDS, retry_seconds
from rankscope_exporter.serving.service_client import ServiceClient


@pytest.fixture
def registered(new_rank, service, until):
    """Return a rank that the service double has registered."""
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.state.lease)
    return rank


def test_a_rank_says_who_and_where_it_is(registered, service):
    said = Registration.from_json(json.dumps(service.registrations[0]))

    assert ("run-1", 0, 2, "node-1", "feedc0de", "launch-1") == (
        said.run, said.rank, said.world_size, said.host, said.incarnation, said.launch_id,
    )  # fmt: skip
    assert (registered.channel.url, "running", 100) == (said.url, said.state, said.planned_steps)
    assert {"quantities": ["weights"]} == said.config
    assert {"rankscope", "python", "pyarrow"} <= said.versions.keys()


def test_the_token_goes_to_the_service(new_rank, service, until):
    new_rank(ingest_url=service.url, token="open-sesame")
    until(lambda: service.registrations)

    assert {"Bearer open-sesame"} == set(service.authorizations)


def test_a_heartbeat_repeats_the_present_state(new_rank, service, record, until):
    service.heartbeat_seconds = 0.1
    rank = new_rank(ingest_url=service.url)
    until(lambda: service.registrations)
    rank.channel.publish(record(41))
    said = until(lambda: [said for said in service.registrations if said["head"] == 0])

    assert 41 == said[0]["step"]


def test_a_rank_that_is_polled_need_not_say_that_it_lives(new_rank, service, until):
    service.heartbeat_seconds = 1.0
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.state.lease)
    _polled_for(2.5, rank, Rankscope_Lease=service.lease)
    while_polled = len(service.registrations)
    until(lambda: len(service.registrations) == 2)  # nobody polls any more

    assert 1 == while_polled


@given(st.floats(0.0, 0.4))
def test_a_rank_that_is_polled_once_in_each_interval_is_silent_though_polls_come_late(lateness):
    """As calm ranks are: both take five seconds by default, and whoever is first must not be left to chance."""
    polls = itertools.accumulate([5.0 * (1.0 + lateness)] * 7)
    due = 5.0
    for before, polled_at in itertools.pairwise([0.0, *polls]):
        due = registration.next_heartbeat(due, sent_at=0.0, polled_at=before, interval_seconds=5.0)
        assert due > polled_at


def test_polls_of_others_are_no_reason_to_be_silent(new_rank, service, until):
    service.heartbeat_seconds = 0.5
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.state.lease)
    _polled_for(1.5, rank, Rankscope_Lease="lease-0")

    assert 2 <= len(service.registrations)


def test_a_rank_that_is_polled_without_end_speaks_once_in_a_while(new_rank, service, until, monkeypatch):
    monkeypatch.setattr(registration, "MAX_HEARTBEAT_SECONDS", 1.0)
    service.heartbeat_seconds = 0.9
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.state.lease)
    _polled_for(2.5, rank, Rankscope_Lease=service.lease)

    assert len(service.registrations) in {2, 3}


def _polled_for(seconds, rank, **headers):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rank.records(-1, committed=-1, **headers)
        time.sleep(0.05)


def test_the_reply_moves_committed(new_rank, service, record, until):
    service.heartbeat_seconds = 0.1
    rank = new_rank(ingest_url=service.url)
    rank.channel.publish(record(0))
    service.committed = 0
    until(lambda: rank.channel.ring.committed == 0)

    assert 0 == rank.channel.ring.uncommitted


def test_a_reply_that_commits_what_does_not_exist_is_a_fault(new_rank, service, until):
    service.committed = 5
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.faults)

    assert -1 == rank.channel.ring.committed


@pytest.mark.parametrize("type_", [EventType.ANOMALY, EventType.EXIT])
def test_an_urgent_event_pokes_the_service(registered, service, record, until, type_):
    registered.channel.publish(record(0, events=(Event(type=type_),)))
    until(lambda: service.pokes)

    assert [{"incarnation": "feedc0de"}] == service.pokes


def test_other_events_do_not(registered, service, record, until):
    registered.channel.publish(record(0, events=(Event(type=EventType.NOTE),)))
    registered.channel.set_phase("evaluation")
    until(lambda: service.registrations[-1]["phase"] == "evaluation")

    assert [] == service.pokes


def test_a_phase_is_told_at_once(registered, service, until):
    registered.channel.set_phase("evaluation")
    until(lambda: service.registrations[-1]["phase"] == "evaluation")
    registered.channel.set_phase(None)
    until(lambda: service.registrations[-1]["phase"] is None)

    assert 3 == len(service.registrations)


def test_publishing_never_waits_for_the_service(registered, service, record):
    """The service hangs in the middle of an answer; the publisher does not notice."""
    service.hold.clear()
    begun = time.monotonic()
    for step in range(200):
        registered.channel.publish(record(step, events=(Event(type=EventType.ANOMALY, rule="AnomalyNan"),)))
        registered.channel.set_phase(str(step))
    spent = time.monotonic() - begun
    service.hold.set()

    assert spent < 5.0  # the service holds its answer back for ten


def test_a_service_that_comes_later_is_found(new_rank, service, until):
    service.refusal = (503, "starting")
    rank = new_rank(ingest_url=service.url)
    until(lambda: service.registrations)
    service.refusal = None

    assert until(lambda: rank.channel.state.lease)
    assert [] == rank.faults


def test_a_refusal_is_logged_once_in_the_services_words(new_rank, service, until, caplog):
    service.refusal = (403, "10.0.0.7 is outside networks.allowed")
    with caplog.at_level(logging.WARNING):
        rank = new_rank(ingest_url=service.url)
        until(lambda: len(service.registrations) >= 3)
    said = [message for message in caplog.messages if "outside networks.allowed" in message]

    assert 1 == len(said)
    assert rank.channel.state.lease is None


def test_an_unreachable_service_is_logged_once_and_is_no_fault(new_rank, free_port, caplog, until):
    with caplog.at_level(logging.WARNING):
        rank = new_rank(ingest_url=f"http://127.0.0.1:{free_port}")
        until(lambda: caplog.messages)
    (said,) = caplog.messages

    assert "cannot be reached" in said
    assert "refused" in said.lower()
    assert [] == rank.faults


def test_no_redirect_is_followed(new_rank, service, until, caplog):
    """Else whoever answers for the service could have the token carried elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        service.redirect_to = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/api/v1/register"
        with caplog.at_level(logging.WARNING):
            new_rank(ingest_url=service.url, token="secret")
            until(lambda: len(service.authorizations) >= 2)
        elsewhere.settimeout(0.05)
        with pytest.raises(TimeoutError):
            elsewhere.accept()

    assert "307" in caplog.text


def test_a_proxy_of_the_environment_is_not_used(new_rank, service, until, monkeypatch, free_port):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port}")
    rank = new_rank(ingest_url=service.url)

    assert until(lambda: rank.channel.state.lease)


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"lease": 1, "attempt": 0, "heartbeat_seconds": 1}'])
def test_a_reply_in_another_language_is_no_lease(new_rank, service, until, caplog, text):
    service.refusal = (200, text)
    with caplog.at_level(logging.WARNING):
        rank = new_rank(ingest_url=service.url)
        until(lambda: caplog.messages)

    assert rank.channel.state.lease is None
    assert "invalid registration reply" in caplog.text


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_retries_are_spread_and_capped(failures, jitter):
    wait = retry_seconds(failures, lambda: jitter)

    assert 0.125 <= wait <= MAX_RETRY_SECONDS
    assert wait <= retry_seconds(failures + 1, lambda: jitter)


def test_waiting_leaves_the_shared_random_numbers_alone():
    import random

    state = random.getstate()
    retry_seconds(3)

    assert state == random.getstate()


def test_without_a_service_a_discovery_file_announces_the_rank(new_rank, tmp_path):
    rank = new_rank(run="a/b=ü", rank=3, discovery_dir=str(tmp_path / "sd"))
    (path,) = (tmp_path / "sd").iterdir()
    written = json.loads(path.read_text(encoding="utf-8"))
    rank.channel.close()

    assert "rankscope-a%2Fb%3D%C3%BC-3.json" == path.name
    assert [{"targets": [f"127.0.0.1:{rank.port}"], "labels": {"job": "rankscope", "instance": "a/b=ü/3"}}] == written
    assert [] == list((tmp_path / "sd").iterdir())


def test_a_run_name_of_any_length_has_a_discovery_file(new_rank, tmp_path):
    new_rank(run="习" * 300, discovery_dir=str(tmp_path))
    new_rank(run="习" * 301, discovery_dir=str(tmp_path))

    assert 2 == len(list(tmp_path.glob("*.json")))


def test_a_successors_discovery_file_is_left_alone(new_rank, tmp_path):
    old = new_rank(discovery_dir=str(tmp_path))
    new = new_rank(discovery_dir=str(tmp_path))
    old.channel.close()
    (path,) = tmp_path.iterdir()

    assert str(new.port) in path.read_text(encoding="utf-8")


def test_a_discovery_folder_that_cannot_be_written_is_a_clear_error(new_rank, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    rank = new_rank(started=False, discovery_dir=str(tmp_path / "file"))
    with pytest.raises(ServeError, match="RANKSCOPE_DISCOVERY_DIR"):
        rank.channel.start()

    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", rank.port), timeout=1)


def test_a_reply_that_cannot_be_noted_leaves_the_rank_registered(new_rank, service, until, monkeypatch):
    """The disk of the spool fails; the thread goes on with its heartbeats."""

    def fail(*_):
        raise OSError("no space left on device")

    service.heartbeat_seconds = 0.1
    rank = new_rank(started=False, ingest_url=service.url)
    monkeypatch.setattr(rank.channel.ring, "commit", fail)
    rank.channel.start()
    until(lambda: len(service.registrations) > 2)

    assert {"registration"} == {where for where, _ in rank.faults}


def test_a_poke_that_fails_leaves_the_heartbeats(new_rank, service, until, monkeypatch):
    def fail(*_):
        raise TypeError("not foreseen")

    service.heartbeat_seconds = 0.1
    rank = new_rank(started=False, ingest_url=service.url)
    monkeypatch.setattr(ServiceClient, "poke", fail)
    rank.channel.start()
    until(lambda: service.registrations)
    rank.channel._registration.poke()
    until(lambda: rank.faults)
    told = len(service.registrations)
    until(lambda: len(service.registrations) > told + 2)

    assert ["requesting an early poll"] == [where for where, _ in rank.faults]


def test_spools_of_others_that_cannot_be_served_leave_the_rank_registered(
    new_rank, service, until, monkeypatch, tmp_path
):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(OrphanRecovery, "start", fail)
    rank = new_rank(ingest_url=service.url, spool_dir=str(tmp_path))
    until(lambda: rank.channel.state.lease)

    assert "spools of dead processes" in {where for where, _ in rank.faults}
