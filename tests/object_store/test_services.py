"""Services that share a store in a bucket, where no lock exists: their addresses, their number N, and fencing."""

import asyncio

import pytest
from tests.end_to_end.lives import until
from tests.ingest.conftest import running_service
from tests.ingest.pipeline.test_exactly_once import TENSORS
from tests.ingest.remote_read.test_with_prometheus import series_of
from tests.ingest.remote_write.messages import post, write_request
from tests.ingest.service.test_several_services import RUNS, end, ranks, start, train

from rankscope_ingest.base.protobuf import packed
from rankscope_storage.api.store import Store
from rankscope_storage.base.errors import ServicesError, ShardLostError
from rankscope_storage.base.shards import Shard

ranks, start = ranks, start  # noqa: PLW0127 - fixtures


def test_services_of_a_bucket_know_each_other_and_are_fenced(bucket, s3_proxy):
    store = Store.open(f"s3://{bucket}/history", create=True)
    with (
        store.claim("0/2", owner="pid 0", is_service=True) as first,
        store.claim("1/2", owner="pid 1", is_service=True) as second,
    ):
        for number, writer in enumerate((first, second)):
            writer.join(f"http://{number}")
            writer.renew()
        found = [writer.renew() for writer in (first, second)]
        first.renew()
        s3_proxy.arm()
        first.renew()
        requests = list(s3_proxy.requests)
        with pytest.raises(ServicesError, match="is shared by services with N = 2, and this one has the shard 0/1"):
            store.claim("0/1", owner="pid 2", is_service=True)
        successor = store.claim("1/2", owner="pid 3", is_service=True)
        with pytest.raises(ShardLostError, match="taken over by pid 3"):
            second.renew()
        successor.close()

    assert [{0: "http://0", 1: "http://1"}] * 2 == [one.addresses for one in found]
    assert [True, False] == [one.is_maintaining for one in found]
    assert {Shard(0, 2): "pid 0", Shard(1, 2): "pid 3"} == {one: owner.owner for one, owner in store.owners().items()}
    assert ["HEAD entry"] == requests  # while no service commits


def test_single_service_of_a_bucket_is_seen_while_it_is_idle(bucket):
    store = Store.open(f"s3://{bucket}/history", create=True)
    with store.claim(owner="pid 1", is_service=True) as single:
        single.join("http://1")
        single.renew()
        with pytest.raises(
            ServicesError, match=r"N = 1, and this one has the shard 1/2: .* 0/1, pid 1, last commit 0 s"
        ):
            store.claim("1/2", owner="pid 2", is_service=True)
        store.claim(owner="pid 3", is_service=True).close()
        with pytest.raises(ShardLostError, match=r"shard 0/1 of .* was taken over by pid 3"):
            single.renew()


@pytest.mark.thorough  # test_number_of_services_changes_and_one_is_killed, and the kills in test_requests.py
def test_killed_service_continues_in_a_bucket(bucket, start, ranks):
    services = start(2, store=f"s3://{bucket}/history")
    channels = ranks(services[0])
    train(channels, range(20))
    until(lambda: all(channel.ring.committed >= 19 for channel in channels.values()))
    services[1].kill()
    train(channels, range(20, 40))
    services[1].start()
    left = end(channels, services, 40)
    found = services[0].rows(
        "SELECT run, count(*) AS n, count(DISTINCT (seq, tensor)) AS keys FROM tensor_stats GROUP BY 1"
    )

    assert [0] * 8 == left
    assert dict.fromkeys(RUNS, (41 * TENSORS,) * 2) == {row["run"]: (row["n"], row["keys"]) for row in found}


async def test_remote_write_and_remote_read_at_both_services_of_a_bucket(bucket):
    """Both services get each request; the second one at the same time."""
    store, now = f"s3://{bucket}/history", 1_770_000_000_000
    labels = {"__name__": "m", "instance": "a"}
    first, second = (packed(write_request((labels, [(now + ms, 0.0)]))) for ms in range(2))
    async with (
        running_service(store, **{"store.shard": "0/2"}) as one,
        running_service(store, **{"store.shard": "1/2"}) as other,
    ):
        answers = [await post(service, first) for service in (one, other)]
        answers += await asyncio.gather(*(post(service, second) for service in (one, other)))
        found = [await series_of(service.url, "m", now, now + 9) for service in (one, other)]
        rows = one.rows("SELECT value FROM samples")

    assert [204] * 4 == [status for status, *_ in answers]
    assert 2 == len(rows)
    zero = bytes(8)
    assert 2 * [[[(now, zero), (now + 1, zero)]]] == [list(plain.values()) for plain, _ in found]
    assert [1, 1] == [len(streamed) for _, streamed in found]
