"""The registry: accepted registrations, attempt numbers, and two processes with one identity."""

import dataclasses
import ipaddress
import json

import pytest
from tests.ingest import builders

from rankscope_ingest.base.errors import RegistrationError
from rankscope_ingest.network.http_client import AllowedResolver, parse_target_url
from rankscope_ingest.runs.models import Health
from rankscope_ingest.targets.registry import AttemptNumbers, Registry, parse_registration

LOOPBACK = [ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")]
HOME = [ipaddress.ip_address("127.0.0.1")]


def registration(**changes):
    return builders.registration(**({"world_size": 2, "pid": 11, "incarnation": "i0", "launch_id": "l0"} | changes))


def registry(**changes):
    return Registry(**{"networks": LOOPBACK, "heartbeat_seconds": 5, "ttl_seconds": 15} | changes)


def test_heartbeat_keeps_lease_and_attempt_and_moves_the_head():
    book = registry()
    first = book.register(registration(), HOME, 0.0)
    again = book.register(registration(head=7), HOME, 5.0)

    assert (True, False) == (first.is_new_target, again.is_new_target)
    assert book.reply(first.target) == book.reply(again.target)
    assert (7, 5.0) == (again.target.head, again.target.liveness.last_sign)


def test_each_launch_is_the_next_attempt_also_after_those_in_the_store():
    book, later = registry(), registry(attempts=AttemptNumbers([("r", "old", 4)]))
    launches = [("r", "l0"), ("r", "l1"), ("s", "l1"), ("r", "l0"), ("r", "l2")]
    attempts = [
        book.register(registration(incarnation=f"i{n}", launch_id=launch, run=run), HOME, 100.0 * n).target.attempt
        for n, (run, launch) in enumerate(launches)
    ]

    assert [0, 1, 0, 0, 2] == attempts
    assert 4 == later.register(registration(launch_id="old"), HOME, 0.0).target.attempt
    assert 5 == later.register(registration(launch_id="new", incarnation="i1"), HOME, 0.0).target.attempt


def test_repeated_launch_id_after_the_end_starts_a_new_attempt():
    """Restarted ranks without a process group derive an equal id."""
    numbers, over = AttemptNumbers([("r", "launch", 3)]), set()
    found = [numbers.number("r", "launch", over.__contains__)]
    over.add(3)
    found += [numbers.number("r", "launch", over.__contains__) for _ in range(2)]

    assert [(3, False), (4, True), (4, False)] == found


def test_second_live_process_of_a_rank_is_rejected_with_the_first_one():
    """Another rank serves the spool of a process only when it is dead."""
    book = registry()
    book.register(registration(host="node7", pid=4242), HOME, 0.0)
    for other, words in (
        (registration(incarnation="twin"), "process 4242 on node7"),
        (registration(served_by="successor"), "process i0 is still alive"),
    ):
        with pytest.raises(RegistrationError, match=words) as error:
            book.register(other, HOME, 14.0)
        assert 409 == error.value.status

    assert not book.register(registration(host="node7", pid=4242, served_by="successor"), HOME, 60.0).is_new_target


def test_second_process_is_accepted_if_the_first_is_silent_refused_or_gone():
    silent, refused, gone = registry(), registry(), registry()
    for book in (silent, refused, gone):
        target = book.register(registration(), HOME, 0.0).target
    refused.get("i0").liveness.note_refusal(1.0)
    target.health = Health.GONE

    assert silent.register(registration(incarnation="i1"), HOME, 15.0).is_new_target
    assert refused.register(registration(incarnation="i1"), HOME, 2.0).is_new_target
    assert gone.register(registration(incarnation="i1"), HOME, 2.0).is_new_target


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:9400", "ftp://h:1", "http://h", "http://h:99999", "http://u:p@h:1", "http://h:1/path"),
        *("http://h:1?x", "http://[::1", "http://:80", "http://fd00::7:9400"),
    ],
)
def test_url_with_more_than_host_and_port_is_rejected(url):
    with pytest.raises(RegistrationError, match="http://host:port") as error:
        parse_target_url(url)

    assert 400 == error.value.status


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        *(("{", "not a registration"), ("[]", "must be a JSON object"), ("{}", "missing")),
        *(({"rank": "0"}, "rank must be an integer"), ({"rank": True}, "rank must be an integer")),
        *(({"rank": 2}, "rank 2 does not fit world_size 2"), ({"rank": -1}, "does not fit")),
        *(({"run": ""}, "run must not be empty"), ({"run": 7}, "run must be text")),
        ({"run": "r" * 1001}, "run must have at most 1000 characters"),
        *(({"incarnation": "a\nb"}, "incarnation must be printable ASCII"), ({"run": "\udc80"}, "valid Unicode")),
        ({"config": {"path": "\udc80"}}, "valid Unicode"),
        ({"started_at": 1 << 62}, "started_at must be UTC microseconds"),
        *(({"head": 1 << 70}, "head must be an integer"), ({"config": []}, "config must be an object")),
        *(({"planned_steps": 1.5}, "planned_steps must be an integer"), ({"url": "http://h"}, "http://host:port")),
    ],
)
def test_malformed_registration_is_rejected_with_the_reason(document, complaint):
    if isinstance(document, dict):
        document = json.dumps(dataclasses.asdict(registration()) | document)
    with pytest.raises(RegistrationError, match=complaint) as error:
        parse_registration(document.encode())

    assert 400 == error.value.status


@pytest.mark.parametrize("change", [{"run": "other"}, {"rank": 1}, {"launch_id": "l1"}])
def test_process_with_a_changed_identity_is_rejected(change):
    book = registry()
    book.register(registration(), HOME, 0.0)
    with pytest.raises(RegistrationError, match="'i0' is registered as rank 0 of run 'r', process 11 on h") as caught:
        book.register(registration(url="http://127.0.0.1:9999", **change), HOME, 1.0)

    assert 409 == caught.value.status
    assert [registration()] == [target.registration for target in book.targets]


async def test_name_that_resolves_to_a_forbidden_address_is_not_connected_to():
    """The name was allowed at registration; a later DNS response must not lead out of the allowed networks."""
    elsewhere = AllowedResolver([ipaddress.ip_network("192.0.2.0/24")])
    with pytest.raises(OSError, match=r"outside .* allowed_networks"):
        await elsewhere.resolve("localhost", 80)

    assert {"127.0.0.1"} == {found["host"] for found in await AllowedResolver(LOOPBACK[:1]).resolve("localhost", 80)}
