"""Messages about incidents, as real receivers get them: GPUs, lost records, lists, reminders, silences, ends."""

import itertools
import re

import pytest
from aiosmtpd.controller import Controller
from tests.end_to_end.alerting import Postbox
from tests.ingest.detect.test_run_monitor import Host, body_of, live, process, take_body
from tests.ingest.servers import Receiver

from rankscope_ingest.detect.incidents import MESSAGES_PER_HOUR, QUIET_SECONDS
from rankscope_ingest.notify.announcer import resolved_message
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.runs.silences import silence

SPIKE = {"type": "anomaly", "severity": "warning", "rule": "AnomalyTurbulence", "kind": "grad_reduced", "op": "norm"}
SPIKE |= {"value": 50.0}
STATES = """\
SELECT list(details->>'$.state' ORDER BY ordinal) AS states FROM events
WHERE type = 'incident' GROUP BY details->>'$.key' ORDER BY min(ordinal)"""


def states_of(service):
    return [[state for state in row["states"] if state != "resolved"] for row in service.rows(STATES)]


def fact(kind, severity, message, value, rule=None):
    return {"type": kind, "severity": severity, "rule": rule, "value": value, "message": message}


LOST = "XID 79 on GPU-1: the GPU has fallen off the bus"
ERROR = "1 new memory error that ECC could not correct on GPU-1"
SLOW = "GPU-1 has reduced its clocks for {} min because of heat or power supply (hw_thermal)"
FACTS = {
    f"[critical] r: GpuXid, rank 2: {LOST}": [fact("xid", "critical", LOST, 79.0)] * 2,
    f"[critical] r: GpuEccUncorrected, rank 2: {ERROR}": [fact("gpu", "critical", ERROR, 1.0, "GpuEccUncorrected")],
    f"[warning] r: GpuThrottled, rank 2: {SLOW.format(5)}": [
        fact("gpu", "warning", SLOW.format(n), 60.0 * n, "GpuThrottled") for n in (5, 6, 7)
    ],
    "[warning] r: IngestLosing, rank 2: 7 records lost: slow disk": [
        fact("gap", "warning", "7 records lost: slow disk", 7.0),
        fact("gap", "info", "5 records have arrived", -5.0),
    ],
}


@pytest.fixture
def mail(free_port):
    postbox = Postbox()
    controller = Controller(postbox, hostname="127.0.0.1", port=free_port)
    controller.start()
    yield f"mailto://127.0.0.1:{free_port}?from=a@b.example&to=c@d.example", postbox
    controller.stop()


async def test_gpus_and_lost_records_cause_one_message_with_rank_and_value(start_service, fake_rank, eventually, mail):
    url, postbox = mail
    async with (
        Receiver() as receiver,
        fake_rank(rank=2, world_size=4) as rank,
        start_service(**{"notify.urls": [receiver.url, url]}) as service,
    ):
        await rank.deliver(service, 2)
        for one in itertools.chain(*FACTS.values()):
            rank.publish(step=None, events=[one])
        await eventually(lambda: len(receiver.messages) >= len(FACTS))
    bodies = [message["message"].splitlines() for message in receiver.messages]
    details = f"details: rankscope events r --store {service.store}"

    assert sorted(FACTS) == sorted(receiver.titles) == sorted(postbox.subjects())
    assert {"1", "7", "79", "300"} == {line[7:] for body in bodies for line in body if line.startswith("value: ")}
    assert all({"rank: 2", details} <= {*body} for body in bodies)
    assert [["opened", "notified"]] * 4 == states_of(service)


async def test_records_that_the_ring_has_overwritten_cause_a_message(start_service, fake_rank, eventually):
    async with Receiver() as receiver, fake_rank() as rank:
        rank.ring = 3
        rank.publish_steps(2)
        async with start_service(**{"notify.urls": [receiver.url]}) as service:
            await rank.deliver(service)
            rank.publish_steps(5)
            await eventually(lambda: receiver.messages)

    assert ["[warning] r: IngestLosing, rank 0: 2 records lost (seq 2 to 3): the ring had overwritten them"] == (
        receiver.titles
    )


def publish_spikes(rank, count):
    for number in range(count):
        rank.publish(step=100 * number, events=[{**SPIKE, "tensor": f"t{number}"}])


async def test_incidents_above_the_limit_of_messages_are_one_message(start_service, fake_rank, eventually):
    async with (
        Receiver() as receiver,
        fake_rank() as rank,
        start_service(**{"notify.urls": [receiver.url]}) as service,
    ):
        publish_spikes(rank, MESSAGES_PER_HOUR + 3)
        await rank.register(service.url)
        await eventually(lambda: len(receiver.messages) == MESSAGES_PER_HOUR)
    listed = receiver.messages[MESSAGES_PER_HOUR:]
    lines = [line for message in listed for line in message["message"].splitlines()]

    assert ["[warning] r: 3 more incidents"] == [message["title"] for message in listed]
    assert [f"AnomalyTurbulence in grad_reduced of t{n}, rank 0, step {n}00: norm 50" for n in (30, 31, 32)] == [
        line for line in lines if line.startswith("Anomaly")
    ]
    assert [["opened", "notified"]] * (MESSAGES_PER_HOUR + 3) == states_of(service)


async def test_open_incident_is_sent_again_until_it_is_over(start_service, fake_rank, eventually):
    async with Receiver() as receiver, fake_rank() as rank:
        settings = {"notify.urls": [receiver.url], "notify.repeat_seconds": 0.5}
        async with start_service(**settings) as service:
            rank.publish(step=60, events=[{**SPIKE, "tensor": "w"}])
            await rank.register(service.url)
            await eventually(lambda: len(receiver.messages) >= 3)
            rank.publish(step=90, scalars=[{"name": "loss", "value": 1.0}])
            await eventually(lambda: service.rows(f"{STATES} DESC")[0]["states"][-1] == "resolved")
            count = len(receiver.messages)
    titles = [re.sub(r"[\d.]+ s:", "… s:", title) for title in receiver.titles]
    place = "AnomalyTurbulence in grad_reduced of w, rank 0, step 60: norm 50"

    assert [f"[warning] r: {place}", *[f"[warning] r: still open after … s: {place}"] * (len(titles) - 1)] == titles
    assert count == len(titles)


async def test_silenced_incidents_are_stored_and_not_sent(start_service, fake_rank, eventually):
    """A silence survives a restart of the service. One of other runs or rules, and an ended one, silence nothing."""
    hour, silences = 3600.0, [("x*", "*"), ("r*", "Loss*"), ("r*", "*Turb*")]
    async with Receiver() as receiver:
        for number, ended in enumerate((False, True)):
            async with fake_rank(run=f"r{number}") as rank, start_service(**{"notify.urls": [receiver.url]}) as service:
                await rank.deliver(service, 1)
                for run, rule in silences:
                    silence(service.store, run, rule, seconds=0 if ended else hour, note="known", sync=sync_to_disk)
                rank.publish(step=60, events=[{**SPIKE, "tensor": "w"}])
                await eventually(lambda number=number, service=service: len(states_of(service)) == number + 1)

    assert [["opened", "muted"], ["opened", "notified"]] == states_of(service)
    assert ["[warning] r1: AnomalyTurbulence in grad_reduced of w, rank 0, step 60: norm 50"] == receiver.titles


ENDS = {
    "AnomalyTurbulence in grad_reduced of w, rank 0, over after 1 min 39 s, steps 1 to 100": SPIKE | {"tensor": "w"},
    "GpuThrottled, rank 0, over after 1 min 39 s": fact("gpu", "warning", SLOW.format(5), 300.0, "GpuThrottled"),
}


@pytest.mark.parametrize("title", ENDS)
def test_end_of_a_long_incident_is_sent_with_its_length(title):
    host = Host()
    monitor = host.monitor()
    target = monitor.accept(process("i"), ()).target
    ends = []
    for seq in range(1, 451):
        has_step = ENDS[title]["type"] == "anomaly"
        body = body_of(target, seq, events=[ENDS[title]] if seq <= 100 else (), step=seq if has_step else None)
        take_body(monitor, target, body)
        live(host, monitor, "i", 1)
        monitor.due_incidents()
        ends += [(seq, one) for one in monitor.resolve_incidents()]
    ((seq, incident),) = ends
    message = resolved_message(incident, has_continued=True, ended_at=incident.seen_at)

    assert f"[resolved] r: {title}" == message.title
    assert (121 if incident.last_step else 100 + QUIET_SECONDS) == pytest.approx(seq, abs=2)
    assert "It ended at 20" in message.body
