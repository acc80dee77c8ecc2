"""The page of all ranks of a launch on a host: valid, complete, and only with live ranks."""

import gzip
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
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
        peer = NodePeers(identity, page or f"page of {rank}".encode, on_fault=lambda *_: None, meter=CpuMeter())
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


def families_of(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_merged_family_has_one_head_and_all_samples():
    first, second, third = (f"# HELP {name} {name}.\n# TYPE {name} gauge\n" for name in "abc")
    one = first + samples("a", 0, [1]) + second + samples("b", 0, [2])
    two = second + samples("b", 1, [4]) + third + samples("c", 1, [5])
    merged_b = second + samples("b", 0, [2]) + samples("b", 1, [4])
    wanted = first + samples("a", 0, [1]) + merged_b + third + samples("c", 1, [5])

    assert wanted.encode() == joined(merged([one.encode(), two.encode()]))
    escaped = first + 'a{x="\\n# HELP b no\\n"} 1\n'  # in a label, this is no head
    assert escaped.encode() == joined(merged([escaped.encode()]))


def test_node_page_contains_the_pages_of_its_ranks_and_passes_promtool(node, new_rank, record, require_server):
    ranks = [new_rank(rank=number, node_page=True) for number in range(3)]
    for number, rank in enumerate(ranks):
        rank.channel.publish(record(7, [ENTRY], [{"norm": float(number), "mean": 0.5}]))
    text = ranks[1].get("/node/metrics").text
    page = families_of(text)
    own = [families_of(rank.get("/metrics").text) for rank in ranks]

    assert {sample.value for sample in page["rankscope_node_ranks"].samples} == {3.0, 0.0}
    for name in own[0].keys() - {"rankscope_overhead_seconds"}:
        together = [(sample.name, sample.labels, str(sample.value)) for sample in page[name].samples]
        wanted = [(sample.name, sample.labels, str(sample.value)) for one in own for sample in one[name].samples]
        assert wanted == together

    check = [require_server("promtool", "prometheus"), "check", "metrics"]
    checked = subprocess.run(check, input=text.encode(), capture_output=True, check=False)
    assert (0, b"") == (checked.returncode, checked.stderr)


def test_node_page_needs_the_token_and_the_setting_and_is_compressed(node, new_rank):
    path, right = "/node/metrics", {"Authorization": "Bearer t", "Accept_Encoding": "gzip"}
    guarded, other = new_rank(node_page=True, token="t"), new_rank().get(path)
    packed = guarded.get(path, **right)

    assert (401, 200) == (guarded.get(path).status, packed.status)
    assert (404, True) == (other.status, "RANKSCOPE_NODE_PAGE=1" in other.text)
    assert "gzip" == packed.headers["Content-Encoding"]
    assert b"rankscope_node_ranks" in gzip.decompress(packed.body)


def test_ranks_of_a_launch_register_the_same_node(node, new_rank, service, until):
    ranks = [new_rank(rank=n, node_page=True, ingest_url=service.url) for n in range(2)]
    until(lambda: len({sent["rank"] for sent in service.registrations}) == len(ranks))

    assert 1 == len({sent["node"] for sent in service.registrations} - {""})
    assert all(sent["node"] for sent in service.registrations)


def test_rank_with_two_processes_or_without_the_folder_is_shown_once(node, new_rank, new_peer):
    new_peer(0, page=lambda: b"# HELP a First.\n# TYPE a gauge\na 1\n")
    rank = new_rank(node_page=True)
    pages = [rank.get("/node/metrics").text]
    assert 0o700 == folder(node).stat().st_mode & 0o777
    shutil.rmtree(folder(node))
    pages.append(rank.get("/node/metrics").text)

    for page in pages:
        assert 'state="shown"} 1' in page
        assert "\na 1\n" not in page


def test_node_page_has_only_running_ranks_of_its_own_launch(new_peer):
    ours = [new_peer(rank) for rank in range(2)]
    new_peer(0, launch="launch-2")
    new_peer(0, run="run-2", launch="launch-3")

    assert [(1, b"page of 1")] == ours[0].gather().pages
    ours[1].close()
    assert ([], 0) == (ours[0].gather().pages, ours[0].gather().silent)


def test_pages_are_requested_in_parallel_and_sorted_by_rank(new_peer):
    """Each page waits until all pages were requested; rank 10 is listed after rank 2."""
    first, together = new_peer(0), threading.Barrier(3, timeout=2.0)
    for rank in (10, 2, 1):
        new_peer(rank, page=lambda rank=rank: together.wait() * b"" or bytes([rank]) * 2_000_000)
    pages = first.gather().pages

    assert [(1, 2_000_000), (2, 2_000_000), (10, 2_000_000)] == [(rank, len(page)) for rank, page in pages]


def test_silent_rank_is_counted_and_omitted(new_peer):
    first = new_peer(0)
    new_peer(1, page=lambda: time.sleep(0.5) or b"late")
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


def _serve_with_a_worker(ready):
    """Serve as rank 7 in a forked process that has a child, such as a data loader worker."""
    try:
        os.setsid()
        who = Identity(run="run-1", launch_id="launch-1", rank=7, host="node-1", incarnation="child")
        peer = NodePeers(who, lambda: b"page of 7", on_fault=print, meter=CpuMeter())
        peer.start()
        if os.fork():
            os.write(ready, b"!")
        else:
            peer.abandon()
        time.sleep(60)
    finally:
        os._exit(1)


def test_killed_rank_is_omitted_and_stopped_rank_is_silent(node, new_peer):
    """Also if a forked child of the killed rank still runs."""
    reading, ready = os.pipe()
    child = os.fork()
    if child == 0:
        _serve_with_a_worker(ready)
    os.close(ready)
    try:
        assert b"!" == os.read(reading, 1)
        first = new_peer(0)
        seen = first.gather(2.0).pages
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        stopped = first.gather(0.2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = first.gather(0.2)
    finally:
        os.killpg(child, signal.SIGKILL)
        os.close(reading)

    assert [(7, b"page of 7")] == seen
    assert ([], 1) == (stopped.pages, stopped.silent)
    assert ([], 0) == (left.pages, left.silent)
    assert 1 == len(list(folder(node).iterdir()))  # its socket file was deleted


def test_folder_of_others_and_too_long_path_are_refused_with_the_fix(node, new_peer, monkeypatch):
    for spoil in (lambda path: path.mkdir() or path.chmod(0o777), lambda path: path.symlink_to("/")):
        spoil(folder(node))
        with pytest.raises(ServeError, match="only this user can enter: remove it, or set TMPDIR"):
            new_peer(0)
        folder(node).rename(f"{node}/{len(list(Path(node).iterdir()))}")

    deep = Path(node) / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ServeError, match="too long for a socket: set TMPDIR to a shorter folder"):
        new_peer(0)


def test_error_of_other_ranks_leaves_the_own_page(node, new_rank, plant):
    rank = new_rank(node_page=True)
    plant(NodePeers, "gather", PermissionError("the folder was locked"))
    got = rank.get("/node/metrics")

    assert 200 == got.status
    assert 'rank="0"' in next(line for line in got.text.splitlines() if line.startswith("rankscope_run_info{"))
    assert ["reading the pages of the other ranks"] == [where for where, _ in rank.faults]


@pytest.mark.parametrize("cause", ["folder", "thread"])
def test_rank_without_node_page_serves_its_own_page(node, new_rank, plant, cause):
    if cause == "folder":
        folder(node).symlink_to("/")
    else:
        plant(NodePeers, "start", RuntimeError("can't start new thread"))
    rank = new_rank(node_page=True)

    assert ["node page"] == [where for where, _ in rank.faults]
    assert 200 == rank.get("/metrics").status
