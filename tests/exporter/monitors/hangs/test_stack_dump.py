"""Stacks of all threads: with names, limited in size, and taken while other threads hold locks."""

from __future__ import annotations

import threading

from rankscope_contract.diagnostics.stacks import MAX_DETAILS_BYTES, Frame, StackDump, ThreadStack
from rankscope_exporter.monitors.hangs.diagnosis import read_stacks, take_stacks, within

RECORDED = """\
Fatal Python error: none of our lines

Thread 0x00000000000000ff (most recent call first):
  File "/job/data.py", line 12 in fetch
  File "/job/a \\u20ac.py", line ??? in ???

Thread 0x0000000000000010 [worker] (most recent call first):

Current thread 0x0000000000000001 (most recent call first):
  File "/job/train.py", line 88 in step
  File "/job/train.py", line 12 in <module>

Extension modules: torch._C (total: 1)
"""


def test_output_of_faulthandler_is_parsed():
    dump = read_stacks(RECORDED, "signal", 0xFF, {0xFF: "MainThread", 1: "rankscope-http"})

    assert (
        StackDump(
            reason="signal",
            threads=(
                ThreadStack(
                    ident=0xFF,
                    name="MainThread",
                    is_training=True,
                    frames=(Frame("/job/data.py", 12, "fetch"), Frame("/job/a \\u20ac.py", 0, "???")),
                ),
                ThreadStack(ident=0x10, frames=()),
                ThreadStack(
                    ident=1,
                    name="rankscope-http",
                    is_ours=True,
                    frames=(Frame("/job/train.py", 88, "step"), Frame("/job/train.py", 12, "<module>")),
                ),
            ),
        )
        == dump
    )


def test_waiting_threads_are_shown_with_their_frames():
    lock, waiting = threading.Lock(), threading.Event()

    def wait_for_the_lock():
        waiting.set()
        with lock:
            pass

    with lock:
        thread = threading.Thread(target=wait_for_the_lock, name="blocked-worker", daemon=True)
        thread.start()
        waiting.wait(10)
        dump = take_stacks("call", threading.get_ident())
    thread.join(10)
    by_name = {stack.name: stack for stack in dump.threads}

    assert "wait_for_the_lock" in {frame.function for frame in by_name["blocked-worker"].frames}
    assert dump.threads[0].is_training
    assert __name__.rpartition(".")[2] in dump.training[0].file  # without the frames that take the stacks
    assert "test_waiting_threads_are_shown_with_their_frames" == dump.training[0].function


def test_dump_fits_its_limit_and_keeps_the_training_thread():
    frames = tuple(Frame(f"/a/very/long/path/to/some/module_{i}.py", i, "function") for i in range(100))
    threads = [ThreadStack(ident=i, frames=frames, name=f"worker-{i}", is_training=i == 0) for i in range(100)]
    cut = within(StackDump(reason="hang", threads=tuple(threads)), MAX_DETAILS_BYTES)

    assert len(cut.to_json().encode()) <= MAX_DETAILS_BYTES
    assert frames == cut.training
    assert 100 == len(cut.threads) + cut.left_out
    assert len(cut.threads) > 50


def test_dump_of_long_frames_fits_its_limit():
    monster = ThreadStack(ident=1, is_training=True, frames=tuple(Frame("x" * 2000, i, "y" * 400) for i in range(100)))
    cut = within(StackDump(reason="hang", threads=(monster,)), MAX_DETAILS_BYTES)

    assert monster.frames[:5] == cut.training
    assert len(cut.to_json().encode()) <= MAX_DETAILS_BYTES
