"""Each operation on a store in S3, killed or disturbed at its requests: no row is lost or doubled.

`make test` meets the requests that decide, `make test-scale` all of them, and `make test-scale-edits` those of the
operations that a person calls.
"""

import itertools
import os
import re
from dataclasses import replace

import pytest
from tests.object_store.proxy import CHANGES, PHASES, Fault
from tests.storage.crashes.killing import Killer
from tests.storage.crashes.operations import UNREADABLE
from tests.storage.crashes.test_kill_points import check_outcome

CHANGE = "^(" + "|".join(CHANGES) + ")"

OPERATIONS = {
    "create": 50, "append": 120, "compact": 40, "roll up": 35, "maintain": 40, "rename": 60, "remove": 50, "join": 50,
    "copy": 40, "repair": 60, "import": 120, "upgrade": 100,
}  # fmt: skip
"""Operations, and the least number of their requests."""

REFUSED = ("AccessDenied", "ExpiredToken")  # The operation may end with an error; after all other faults, it succeeds.

SENTENCE = re.compile(r"^rankscope_storage\.base\.errors\.\w+Error: .+\Z", re.MULTILINE)
"""The last line of a traceback, if the error has one line and its type is one of the package."""


@pytest.fixture(scope="module")
def killer(tmp_path_factory, s3_server, _proxy_of_session):
    made = Killer(tmp_path_factory.mktemp("killer"), s3_server.environment(_proxy_of_session.url))
    yield made
    made.close()


@pytest.fixture(scope="module")
def before(killer, s3_server, _proxy_of_session):
    """Return the bucket before an operation, its rows, its rows after the operation, and the operation's requests."""
    made = {}

    def prepared(operation):
        if operation not in made:
            begun, done = (f"{state}-{operation.replace(' ', '-')}" for state in ("begun", "done"))
            s3_server.create_bucket(begun)
            killer.prepare(operation, url(begun))
            s3_server.copy(begun, done)
            _proxy_of_session.arm()
            killer.live(operation, url(done), 0)
            requests = list(_proxy_of_session.requests)
            old = {} if operation in UNREADABLE else killer.content(url(begun))
            made[operation] = begun, old, killer.content(url(done)), requests
        return made[operation]

    return prepared


@pytest.fixture(scope="module")
def checked():
    """Return the states that are checked. The same changes in the same order leave the same store."""
    return set()


@pytest.fixture
def meet(killer, before, checked, s3_server, s3_proxy):
    """Return a function that runs an operation with a fault, checks the store, and returns whether it met the fault."""

    def run(operation, fault):
        begun, old, new, _ = before(operation)
        s3_server.copy(begun, "work")
        s3_proxy.arm(fault)
        s3_proxy.victim, s3_proxy.aged = killer.victim, operation == "maintain"
        life = killer.live(operation, url("work"), 1, may_fail=True)
        s3_proxy.wait_until_idle()
        is_met, changes, where = fault.seen >= fault.nth, s3_proxy.changes, f"{operation}, {fault}, {s3_proxy.requests}"
        assert life.killed == (is_met and fault.kind in PHASES), where
        assert not life.error or (fault.kind in REFUSED and SENTENCE.search(life.error)), life.error
        state = (operation, *changes, max([0, *life.acknowledged]))
        if state not in checked:
            checked.add(state)
            s3_proxy.arm()
            s3_proxy.aged = True
            check_outcome(
                operation, old, new, max([0, *life.acknowledged]), killer.after(operation, url("work")), where
            )
        return is_met

    return run


def met_at_every_request(meet, operation, fault):
    """Meet the fault at the first such request, then at the second, and so on; return their number."""
    return len(list(itertools.takewhile(lambda n: meet(operation, replace(fault, nth=n)), itertools.count(1))))


def states(checked, operation):
    return f"{sum(state[0] == operation for state in checked)} different stores checked"


def url(bucket):
    return f"s3://{bucket}/store"


@pytest.mark.parametrize(
    ("operation", "request_name", "nth", "kind"),
    [
        *(("append", "PUT entry", 2, phase) for phase in PHASES),  # the first is that of the claim
        pytest.param("append", "PUT entry", 1, "lost answer", marks=pytest.mark.thorough),
        ("append", "PUT entry", 2, "lost answer"),
        ("append", "PUT entry", 2, "late"),
        ("append", "PUT entry", 2, "AccessDenied"),
        ("append", "PUT checkpoint", 1, "kill during"),
        ("compact", "PUT entry", 1, "kill after"),
        pytest.param("compact", "PUT entry", 1, "lost answer", marks=pytest.mark.thorough),
    ],
)
def test_fault_of_a_deciding_request_neither_loses_nor_doubles_rows(meet, operation, request_name, nth, kind):
    assert meet(operation, Fault(kind=kind, request=request_name, nth=nth))


def at_each_request(test):
    is_chosen = os.environ.get("RANKSCOPE_SCALE") in ("crashes-s3", "crashes-s3-edits")
    return pytest.mark.timeout(3000)(pytest.mark.skipif(not is_chosen, reason="make test-scale")(test))


@at_each_request
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kill_at_every_request_neither_loses_nor_doubles_rows(meet, before, checked, operation):
    points = sum(met_at_every_request(meet, operation, Fault(kind=phase)) for phase in PHASES)

    print(f"{operation}: {len(before(operation)[3])} requests, killed at {points} points, {states(checked, operation)}")
    assert points >= OPERATIONS[operation] * len(PHASES)


FAULTS = {
    "lost answer": Fault(kind="lost answer", request=CHANGE),
    "late": Fault(kind="late", request=CHANGE),
    "throttling": Fault(kind="SlowDown", request=CHANGE, count=3),
    "5xx burst": Fault(kind="InternalError", request=CHANGE, count=3),
    "5xx of a read": Fault(kind="InternalError", request="^(GET|HEAD|LIST)"),
    "expired": Fault(kind="ExpiredToken", request=CHANGE, count=10**6),
}


@at_each_request
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_fault_of_any_request_neither_loses_nor_doubles_rows(meet, checked, operation, fault):
    points = met_at_every_request(meet, operation, FAULTS[fault])

    print(f"{operation}, {fault}: {points} points, {states(checked, operation)}")
    assert points >= (2 if operation == "repair" else 3)  # changes of the store
