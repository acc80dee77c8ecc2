"""The proxy names and counts the requests of a real client, and each fault has the effect that its name states."""

import contextlib
import datetime as dt
import signal
import subprocess
import sys
import threading
import time

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
from obstore.store import S3Store
from tests.object_store.fixtures import RADOSGW_FOLDER
from tests.object_store.proxy import PHASES, Fault

ENTRY, DATA, HINT = (
    "s/_delta_log/00000000000000000000.json",
    "s/dataset=a/part=b/c.parquet",
    "s/_delta_log/_last_checkpoint",
)

RACES = 20 if RADOSGW_FOLDER else 3

WRITER = f"""
import sys
import obstore
for key in ({ENTRY!r}, {DATA!r}, {HINT!r}):
    obstore.put(obstore.store.S3Store(sys.argv[1]), key, b"body" * 1000, use_multipart=False)
"""


@pytest.fixture
def client(bucket):
    """Return a client that sends a failed request once more."""
    pause = dt.timedelta(seconds=0.01)
    return S3Store(
        bucket, retry_config={"max_retries": 1, "backoff": {"init_backoff": pause, "max_backoff": pause, "base": 2}}
    )


def create(client, key=ENTRY, body=b"body"):
    client.put(key, body, mode="create", use_multipart=False)


def test_requests_have_names_and_counts(client, s3_proxy):
    for key in (ENTRY, DATA, HINT):
        create(client, key)
    client.get(DATA).bytes()
    client.head(ENTRY)
    list(client.list("s/_delta_log/"))
    client.delete([DATA])

    changes = ["PUT entry", "PUT data", "PUT checkpoint", "POST delete"]
    assert changes == s3_proxy.changes
    assert dict.fromkeys([*changes, "GET data", "HEAD entry", "LIST log"], 1) == s3_proxy.counts


@pytest.mark.parametrize(
    ("kind", "count", "error"),
    [
        # The request that is sent again meets the object that the first one has stored.
        ("lost answer", 1, AlreadyExistsError),
        ("timeout after", 1, AlreadyExistsError),
        ("timeout before", 1, None),
        ("late", 1, None),
        ("SlowDown", 1, None),
        ("InternalError", 1, None),
        ("timeout before", 2, BaseError),
        ("ServiceUnavailable", 2, BaseError),
        ("AccessDenied", 1, PermissionDeniedError),
        ("RequestTimeTooSkewed", 1, PermissionDeniedError),
        ("ExpiredToken", 1, BaseError),
        ("NoSuchBucket", 1, FileNotFoundError),
    ],
)
def test_creation_of_an_object_meets_a_fault(client, s3_server, s3_proxy, bucket, kind, count, error):
    s3_proxy.arm(Fault(kind=kind, request="PUT entry", count=count))
    with pytest.raises(error) if error else contextlib.nullcontext():
        create(client)
    s3_proxy.wait_until_idle()

    is_stored = error in (None, AlreadyExistsError)
    assert ["PUT entry"] * is_stored == s3_proxy.changes
    assert {ENTRY: 4} == s3_server.objects(bucket) if is_stored else not s3_server.objects(bucket)


def test_only_requests_that_a_fault_names_meet_it(client, s3_proxy):
    s3_proxy.arm(Fault(kind="AccessDenied", request="PUT data", nth=2))
    for key in (ENTRY, DATA, "s/dataset=a/part=b/d.parquet"):
        with pytest.raises(PermissionDeniedError) if key.endswith("d.parquet") else contextlib.nullcontext():
            create(client, key)


def test_server_without_conditions_accepts_the_second_creation(client, s3_proxy):
    create(client)
    with pytest.raises(AlreadyExistsError):
        create(client)
    s3_proxy.arm(Fault(kind="unconditional"))
    create(client)


def test_slow_link_delivers_the_whole_object(client, s3_proxy):
    create(client, DATA, bytes(20_000))
    s3_proxy.arm(Fault(kind="slow", bytes_per_second=100_000))
    started = time.monotonic()

    assert bytes(20_000) == client.get(DATA).bytes()
    assert time.monotonic() - started > 0.2


@pytest.mark.parametrize(("phase", "stored"), [(PHASES[0], 1), (PHASES[1], 1), (PHASES[2], 2)])
def test_writer_is_killed_at_its_second_request(bucket, s3_server, s3_proxy, phase, stored):
    with subprocess.Popen([sys.executable, "-c", WRITER, bucket]) as writer:
        s3_proxy.victim = lambda: writer.pid
        s3_proxy.arm(Fault(kind=phase, nth=2))

        assert -signal.SIGKILL == writer.wait(timeout=60)
    s3_proxy.wait_until_idle()

    assert dict.fromkeys([ENTRY, DATA][:stored], 4000) == s3_server.objects(bucket)


def test_one_of_many_concurrent_creations_succeeds(bucket, s3_server):
    """The server of the tests has conditional PUT, on which the log relies."""
    client = S3Store(bucket)

    assert [1] * RACES == [race(client, f"s/{number}", 16) for number in range(RACES)]


def race(client, key, rivals):
    """Let threads create one key; return how many of them succeeded."""
    start, won = threading.Barrier(rivals), []

    def attempt(number):
        start.wait()
        with contextlib.suppress(AlreadyExistsError):
            obstore.put(client, key, f"{number}".encode(), mode="create", use_multipart=False)
            won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(rivals)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(won)


def test_aged_objects_seem_old(client, s3_proxy):
    create(client)
    s3_proxy.aged = True

    assert {2023} == {
        client.head(ENTRY)["last_modified"].year,
        *(o["last_modified"].year for o in client.list().collect()),
    }
