"""Services that share one store: shards of runs, addresses, the lease of the maintenance, and their number N."""

import contextlib
import time
from dataclasses import replace

import pytest

from rankscope_storage.api.store import Batch
from rankscope_storage.base.errors import RepeatedError, ServicesError, ShardLockError, ShardLostError, StoreError
from rankscope_storage.base.fsync import sync_to_disk
from rankscope_storage.base.shards import Shard
from rankscope_storage.log.delta import Log
from rankscope_storage.log.services import LEASE_SECONDS, RENEW_SECONDS, Services, service_owners
from rankscope_storage.writer.writer import RECEIPTS


def test_shard_of_a_run_is_that_of_hashmod_of_prometheus():
    """The value is that of a test of Prometheus: `baz` with the modulus 1000."""
    assert Shard(976, 1000) == Shard(0, 1000).of("baz")
    assert [True, False] == [Shard(number, 2).owns("baz") for number in range(2)]
    assert Shard(0, 1).owns("baz")


def test_service_without_a_commit_for_one_lease_is_dead_and_replaced():
    now = [100.0]
    services = Services(Shard(0, 2), lambda: now[0])
    services.see([{"rankscopeShard": f"{n}/2", "rankscopeService": f"http://{n}"} for n in range(2)])
    holder = services.next_maintainer(None) + 1  # the first number of the other shard
    found = []
    for seconds in (0, RENEW_SECONDS, LEASE_SECONDS - RENEW_SECONDS, 0.1):
        now[0] += seconds
        renewing = services.must_renew("http://0")
        found.append((renewing, sorted(services.addresses()), services.next_maintainer(holder) is not None))

    assert [(False, [0, 1], False), (True, [0, 1], False), (True, [0, 1], False), (True, [], True)] == found
    assert [True, False] == [services.maintains(one) for one in (services.next_maintainer(holder), holder)]
    assert services.must_renew("http://new")


def test_each_service_sees_the_addresses_and_one_of_them_maintains(store, batch):
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(store.claim(f"{n}/2", owner=f"pid {n}", is_service=True)) for n in range(2)]
        for number, writer in enumerate(writers):
            writer.join(f"http://{number}")
            writer.renew()
        version = writers[0].renew().version
        found = [writer.renew() for writer in writers]
        writers[1].append(batch(range(3)))
        writers[1].maintain()
        owners = service_owners(Log.open(store.root, sync_to_disk))

    assert 2 * [{0: "http://0", 1: "http://1"}] == [one.addresses for one in found]
    assert ([True, False], 2 * [version]) == ([one.is_maintaining for one in found], [one.version for one in found])
    assert [("0/2", "pid 0", "http://0", True), ("1/2", "pid 1", "http://1", False)] == [
        (str(one.shard), one.owner, one.url, one.is_maintaining) for one in owners
    ]


def test_import_that_uses_a_shard_as_its_name_is_no_service(store, batch):
    with store.claim("1/2", owner="an import") as writer:
        writer.join("http://import")
        writer.append(batch(range(3)))

    assert {Shard(0, 1): None} == store.owners()


def test_shard_has_one_owner_however_its_numbers_are_written(store, batch):
    """An import of `01/02` took the shard 1/2 from a running service."""
    (store.root / "_shards").mkdir(exist_ok=True)
    (store.root / "_shards" / "12345%2F20000.lock").touch()  # of an earlier release, whose names could be longer
    with store.claim("01/02", owner="pid 1", is_service=True) as writer:
        writer.append(batch(range(2)))
        for shard in ("1/2", "01/2"):
            with pytest.raises(ShardLockError, match=r"shard 1/2 of .* is locked by pid 1, which is running"):
                store.claim(shard, owner="an import")
        with pytest.raises(ServicesError, match="N = 2, and this one has the shard 0/1"):
            store.claim("0/1", owner="pid 2", is_service=True)
        writer.append(batch(range(3)))


def no_locks(*arguments):
    raise OSError(37, "No locks available")


@pytest.mark.parametrize("are_locked", [True, False])
@pytest.mark.parametrize(("running", "started"), [("1/2", "0/1"), ("0/1", "0/2"), ("0/1", "1/2"), ("0/4", "0/2")])
def test_service_with_another_number_of_services_is_refused(store, batch, monkeypatch, running, started, are_locked):
    """Without file locks, a service runs if its last commit is recent; later, the new number ends it.

    An idle service therefore commits without locks, also a single one. An import takes its shard only later.
    """
    if not are_locked:
        monkeypatch.setattr("rankscope_storage.log.shard_lock.fcntl.flock", no_locks)
    counts = [Shard.parse(shard).count for shard in (running, started)]
    with store.claim(running, owner="pid 1", is_service=True) as old:
        store.claim("0/3", owner="an import").close()
        old.join("http://1")
        old.renew()
        monkeypatch.setattr("rankscope_storage.log.services.RENEW_SECONDS", 0.0)
        versions = [Log.open(store.root, sync_to_disk).version for _ in range(2) if old.renew().is_maintaining]
        assert (counts[0] > 1 or not are_locked) == versions[1] - versions[0]
        reason = f"N = {counts[0]}, and this one has the shard {started}: a service of the shard {running}, pid 1"
        reason += ".* first$" if are_locked else ".* first, and wait 30 s$"
        with pytest.raises(ServicesError, match=reason):
            store.claim(started, owner="pid 2", is_service=True)
        with pytest.raises(ShardLockError, match=f"--shard {counts[0]}/{counts[0] + 1}"):
            store.claim(running, owner="an import")
        old.append(batch(range(2)))
        for lock in (store.root / "_shards").iterdir():  # as from another machine, after one lease
            lock.unlink()
        monkeypatch.setattr("rankscope_storage.log.services.LEASE_SECONDS", 0.0)
        store.claim(started, owner="pid 2", is_service=True).close()
        with pytest.raises(
            ShardLostError, match=f"were started with N = {counts[1]}, and this one with N = {counts[0]}"
        ):
            old.append(batch(range(3)))
    store.claim(running, owner="an import").close()


def test_renewal_that_cannot_read_the_log_is_tried_again(store, batch, monkeypatch):
    """A service ends after any error but StoreError."""

    def fail(_):
        raise OSError(5, "Input/output error")

    with (
        store.claim("0/2", owner="pid 0", is_service=True) as first,
        store.claim("1/2", owner="pid 1", is_service=True) as second,
    ):
        second.join("http://1")
        second.append(batch(range(2)))
        with monkeypatch.context() as broken:
            broken.setattr("rankscope_storage.log.delta.read_entry", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                first.renew()

        assert {1: "http://1"} == first.renew().addresses


def test_clock_that_is_ahead_of_that_of_a_new_service_is_reported(store, monkeypatch):
    with store.claim("1/2", owner="pid 1", is_service=True):
        pass
    monkeypatch.setattr("rankscope_storage.log.shard_lock.fcntl.flock", no_locks)
    now = time.time() - 3600
    monkeypatch.setattr("rankscope_storage.log.services.time.time", lambda: now)
    with pytest.raises(ServicesError, match=r"last commit 36\d\d s in the future: correct the clocks of the machines"):
        store.claim("0/1", owner="pid 2", is_service=True)


def test_request_that_another_service_stored_is_refused(store, batch):
    requests = [replace(batch([n], incarnation=f"i{n}"), info={RECEIPTS: f"{n}a {n}b:7"}) for n in range(2)]
    with (
        store.claim("0/2", owner="pid 0", is_service=True) as first,
        store.claim("1/2", owner="pid 1", is_service=True) as second,
    ):
        first.append(requests[0])
        second.append(requests[1])
        for repeated in ("0a:3", "1b"):
            with pytest.raises(RepeatedError):
                second.append(Batch(tables={}, watermarks={}, info={RECEIPTS: f"new {repeated}"}))
