"""The page of all ranks of a launch on a host: valid, complete, and only with live ranks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rankscope_contract.model.identity import Identity
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.base.errors import ServeError
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.serving.node_exposition import NodePeers, joined, merged

ENTRY = PlanEntry(kind="grad_reduced", tensor='a "quoted"\\name', dtype="float32", shape=(2,))


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Set a separate temporary folder for the test, short enough for sockets."""
    folder = tempfile.mkdtemp(prefix="rs-")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def new_peer(node):
    """Return a function that starts another rank with its own page."""
    started = []

    def make(rank, page=None, launch="launch-1", run="run-1"):
        identity = Identity(run=run, launch_id=launch, rank=rank, host="node-1", incarnation=f"{launch}-{rank}")
        shown = page or f"page of {rank}".encode
        peer = NodePeers(identity, shown, on_fault=lambda *_: None, meter=CpuMeter())
        peer.start()
        started.append(peer)
        return peer

    yield make
    for peer in started:
        peer.close()


def samples(name, rank, values):
    return "".join(f'{name}{{rank="{rank}",i="{i}"}} {value}\n' for i, value in enumerate(values))


def folder(node):
    return Path(node) / f"rankscope-{os.geteuid()}"


def open_to_all(path):
    path.mkdir()
    path.chmod(0o777)


def families_of(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


# Merging.


def test_merged_family_has_one_head_and_all_samples():
    one = b'# HELP a First.\n# TYPE a gauge\na{rank="0"} 1\n# HELP b Second.\n# TYPE b counter\nb{rank="0"} 2\n'
    two = b'# HELP b Second.\n# TYPE b counter\nb{rank="1"} 4\n# HELP c Third.\n# TYPE c gauge\nc{rank="1"} 5\n'

    wanted = (
        b'# HELP a First.\n# TYPE a gauge\na{rank="0"} 1\n'
        b'# HELP b Second.\n# TYPE b counter\nb{rank="0"} 2\nb{rank="1"} 4\n'
        b'# HELP c Third.\n# TYPE c gauge\nc{rank="1"} 5\n'
    )
    assert wanted == joined(merged([one, two]))


@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.lists(st.integers(0, 9), max_size=3)), max_size=4))
def test_merging_keeps_each_sample_and_each_family_once(pages):
    texts = [
        "".join(f"# HELP {name} H.\n# TYPE {name} gauge\n{samples(name, rank, some)}" for name, some in page.items())
        for rank, page in enumerate(pages)
    ]  # fmt: skip
    together = joined(merged(text.encode() for text in texts)).decode()
    wanted = sorted(line for text in texts for line in text.splitlines() if not line.startswith("#"))

    assert wanted == sorted(line for line in together.splitlines() if not line.startswith("#"))
    heads = [line for line in together.splitlines() if line.startswith("# HELP")]
    assert sorted({f"# HELP {name} H." for page in pages for name in page}) == sorted(heads)


def test_escaped_help_text_in_a_label_is_not_a_head():
    page = b'# HELP a First.\n# TYPE a gauge\na{x="\\n# HELP b no\\n"} 1\n'

    assert page == joined(merged([page]))


# Ranks that find each other.


def test_node_page_contains_the_pages_of_its_ranks(node, new_rank, record):
    ranks = [new_rank(rank=number, node_page=True) for number in range(3)]
    for number, rank in enumerate(ranks):
        rank.channel.publish(record(7, [ENTRY], [{"norm": float(number), "mean": 0.5}]))
    page = families_of(ranks[1].get("/node/metrics").text)
    own = [families_of(rank.get("/metrics").text) for rank in ranks]

    assert {sample.value for sample in page["rankscope_node_ranks"].samples} == {3.0, 0.0}
    for name in own[0].keys() - {"rankscope_overhead_seconds"}:
        together = [(sample.name, sample.labels, str(sample.value)) for sample in page[name].samples]
        wanted = [(sample.name, sample.labels, str(sample.value)) for one in own for sample in one[name].samples]
        assert wanted == together


def test_node_page_passes_promtool_check(node, new_rank, record, require_server):
    program = require_server("promtool", "prometheus")
    ranks = [new_rank(rank=number, node_page=True) for number in range(2)]
    for rank in ranks:
        rank.channel.publish(record(7, [ENTRY], [{"norm": 1.0, "nans": 3}]))
    page = ranks[0].get("/node/metrics").body
    checked = subprocess.run([program, "check", "metrics"], input=page, capture_output=True, check=False)

    assert (0, b"") == (checked.returncode, checked.stderr)


def test_node_page_is_compressed_if_the_client_accepts_gzip(node, new_rank):
    import gzip

    answer = new_rank(node_page=True).get("/node/metrics", Accept_Encoding="gzip")

    assert "gzip" == answer.headers["Content-Encoding"]
    assert b"rankscope_node_ranks" in gzip.decompress(answer.body)


def test_node_page_needs_the_token_and_the_setting(node, new_rank):
    guarded = new_rank(node_page=True, token="t")
    assert [401, 200] == [
        guarded.get("/node/metrics").status,
        guarded.get("/node/metrics", Authorization="Bearer t").status,
    ]

    answer = new_rank().get("/node/metrics")
    assert (404, True) == (answer.status, "RANKSCOPE_NODE_PAGE=1" in answer.text)


def test_ranks_of_a_launch_register_the_same_node(node, new_rank, service, until):
    ranks = [new_rank(rank=n, node_page=True, ingest_url=service.url) for n in range(2)]
    until(lambda: len({sent["rank"] for sent in service.registrations}) == len(ranks))

    assert 1 == len({sent["node"] for sent in service.registrations} - {""})
    assert all(sent["node"] for sent in service.registrations)


def test_node_page_without_its_folder_shows_its_own_rank(node, new_rank):
    rank = new_rank(node_page=True)
    shutil.rmtree(folder(node))

    assert 'state="shown"} 1' in rank.get("/node/metrics").text


def test_rank_with_two_processes_is_shown_once(node, new_rank, new_peer):
    new_peer(0, page=lambda: b"# HELP a First.\n# TYPE a gauge\na 1\n")
    page = new_rank(node_page=True).get("/node/metrics").text

    assert 'state="shown"} 1' in page
    assert "\na 1\n" not in page


def test_node_page_contains_only_its_own_launch(new_peer):
    ours = [new_peer(rank) for rank in range(2)]
    new_peer(0, launch="launch-2")
    new_peer(0, run="run-2", launch="launch-3")

    assert [(1, b"page of 1")] == ours[0].gather().pages


def test_closed_rank_leaves_the_node_page(new_peer):
    first, second = (new_peer(rank) for rank in range(2))
    second.close()

    assert ([], 0) == (first.gather().pages, first.gather().silent)


def test_pages_are_requested_in_parallel_and_sorted_by_rank(new_peer):
    """Each page waits until all pages were requested; rank 10 is listed after rank 2."""
    first, together = new_peer(0), threading.Barrier(3, timeout=2.0)
    for rank in (10, 2, 1):
        new_peer(rank, page=lambda rank=rank: together.wait() * b"" or bytes([rank]) * 2_000_000)
    pages = first.gather().pages

    assert [(1, 2_000_000), (2, 2_000_000), (10, 2_000_000)] == [(rank, len(page)) for rank, page in pages]


def test_silent_rank_is_counted_and_omitted(new_peer):
    first = new_peer(0)
    new_peer(1, page=lambda: time.sleep(1.0) or b"late")
    new_peer(2)
    gathered = first.gather(0.2)

    assert ([(2, b"page of 2")], 1) == (gathered.pages, gathered.silent)


def test_failed_page_is_omitted_and_the_next_one_is_shown(new_peer):
    pages = iter([ValueError("planted"), b"whole"])

    def page():
        found = next(pages)
        if isinstance(found, Exception):
            raise found
        return found

    first = new_peer(0)
    new_peer(1, page=page)

    failed = first.gather()

    assert ([], 1) == (failed.pages, failed.silent)
    assert [(1, b"whole")] == first.gather().pages


CHILD = """
import os, time
from rankscope_contract.model.identity import Identity
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.serving.node_exposition import NodePeers
who = Identity(run="run-1", launch_id="launch-1", rank=7, host="node-1", incarnation="child")
peer = NodePeers(who, lambda: b"page of 7", on_fault=print, meter=CpuMeter())
peer.start()
if os.fork():
    print("ready", flush=True)
else:
    peer.abandon()
time.sleep(60)
"""


def test_killed_rank_is_omitted_and_stopped_rank_is_silent(node, new_peer):
    """Also if a forked child of the killed rank still runs, such as a data loader worker."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": node}, start_new_session=True
    )
    try:
        assert b"ready\n" == child.stdout.readline()
        first = new_peer(0)
        seen = [first.gather(2.0).pages]
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        stopped = first.gather(0.2)
        child.kill()
        child.wait(10)
        left = first.gather(0.2)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.stdout.close()

    assert [[(7, b"page of 7")]] == seen
    assert ([], 1) == (stopped.pages, stopped.silent)
    assert ([], 0) == (left.pages, left.silent)
    assert 1 == len(list(folder(node).iterdir()))  # its socket file was deleted


# The folder.


def test_node_folder_is_private(new_peer, node):
    new_peer(0)

    assert 0o700 == folder(node).stat().st_mode & 0o777


@pytest.mark.parametrize("spoil", [open_to_all, lambda path: path.symlink_to("/")])
def test_folder_accessible_by_other_users_is_refused(node, new_peer, spoil):
    spoil(folder(node))
    with pytest.raises(ServeError, match="only this user can enter: remove it, or set TMPDIR"):
        new_peer(0)


def test_too_long_socket_path_is_refused_with_the_fix(node, monkeypatch, new_peer):
    deep = Path(node) / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ServeError, match="too long for a socket: set TMPDIR to a shorter folder"):
        new_peer(0)


def test_rank_without_node_folder_serves_its_own_page(node, new_rank):
    folder(node).symlink_to("/")
    rank = new_rank(node_page=True)

    assert ["node page"] == [where for where, _ in rank.faults]
    assert 200 == rank.get("/metrics").status


def test_error_of_other_ranks_leaves_the_own_page(node, new_rank, monkeypatch):
    def fail(*_):
        raise PermissionError("the folder was locked")

    rank = new_rank(node_page=True)
    monkeypatch.setattr(NodePeers, "gather", fail)
    got = rank.get("/node/metrics")

    assert 200 == got.status
    assert 'rank="0"' in next(line for line in got.text.splitlines() if line.startswith("rankscope_run_info{"))
    assert ["reading the pages of the other ranks"] == [where for where, _ in rank.faults]


def test_failed_node_page_does_not_stop_the_server(node, new_rank, monkeypatch):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(NodePeers, "start", fail)
    rank = new_rank(node_page=True)

    assert ["node page"] == [where for where, _ in rank.faults]
    assert 200 == rank.get("/metrics").status


def test_failed_connection_to_a_rank_leaves_the_others(new_peer, monkeypatch):
    """The process has no file descriptor left for the last connection."""
    first = new_peer(0)
    new_peer(1)
    new_peer(2)
    free = [1]

    class Scarce(socket.socket):
        def __init__(self, *args, **options):
            if (
                threading.current_thread() is threading.main_thread()
            ):  # the other ranks accept connections on separate threads
                if not free:
                    raise OSError(errno.EMFILE, "Too many open files")
                free.pop()
            super().__init__(*args, **options)

    monkeypatch.setattr("rankscope_exporter.serving.node_exposition.socket.socket", Scarce)

    assert [(1, b"page of 1")] == first.gather().pages
