"""Tests of the detection of waiting ranks from their stacks. It is certain only if the innermost call shows it."""

from __future__ import annotations

import pytest

from rankscope_contract.diagnostics.blame import Place, place_of
from rankscope_contract.diagnostics.stacks import Frame, StackDump, ThreadStack

TORCH = "/env/lib/python3.11/site-packages/torch"
PYTHON = "/usr/lib/python3.11"
OWN = Frame("/job/train.py", 88, "main")
REDUCE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce")
LOGGED = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
LOADER = Frame(f"{TORCH}/utils/data/dataloader.py", 701, "__next__")


def dump(*frames: Frame, calls: str | None = None, others: tuple[ThreadStack, ...] = ()) -> StackDump:
    thread = ThreadStack(ident=1, is_training=True, frames=frames, calls=calls)
    return StackDump(reason="hang", threads=(thread, *others))


@pytest.mark.parametrize(
    ("found", "place"),
    [
        (dump(REDUCE, LOGGED, OWN, calls=".wait"), Place.IN_COLLECTIVE),
        (dump(Frame(REDUCE.file, 2799, "recv"), LOGGED, OWN), Place.IN_COLLECTIVE),
        (dump(Frame(REDUCE.file, 2169, "_new_process_group_helper"), OWN), Place.IN_COLLECTIVE),
        (dump(Frame(f"{TORCH}/distributed/_functional_collectives.py", 161, "wait_tensor"), OWN), Place.IN_COLLECTIVE),
        (dump(Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 5, "wait"), OWN), Place.MAY_WAIT),
        (dump(Frame(f"{TORCH}/autograd/graph.py", 841, "_engine_run_backward"), OWN), Place.MAY_WAIT),
        (dump(Frame(f"{TORCH}/nn/parallel/distributed.py", 1775, "_pre_forward"), OWN), Place.MAY_WAIT),
        (dump(OWN, calls=".wait"), Place.MAY_WAIT),
        (dump(OWN, calls="time.sleep"), Place.OUTSIDE),
        (dump(OWN, calls="posix.read"), Place.OUTSIDE),
        (dump(OWN, calls=".sleep"), Place.OUTSIDE),
        (dump(OWN, calls=""), Place.OUTSIDE),
        (dump(Frame(f"{PYTHON}/threading.py", 331, "wait"), OWN, calls=".acquire"), Place.OUTSIDE),
        (dump(Frame(f"{PYTHON}/threading.py", 331, "wait"), LOADER, OWN, calls=".acquire"), Place.OUTSIDE),
        (dump(Frame("/job/data.py", 4, "__getitem__"), LOADER, OWN, calls=".decode"), Place.OUTSIDE),
        # The line may only wait for the device, and the device may wait for another rank.
        (dump(OWN, calls=".item"), Place.UNKNOWN),
        (dump(OWN, calls="builtins.float"), Place.UNKNOWN),
        (dump(OWN, calls="torch._C._cuda_synchronize"), Place.UNKNOWN),
        (dump(Frame(f"{PYTHON}/copy.py", 153, "deepcopy"), OWN), Place.UNKNOWN),
        (dump(Frame(f"{TORCH}/nn/modules/linear.py", 125, "forward"), OWN), Place.UNKNOWN),
        # The rank writes its file of a checkpoint that all ranks write together.
        (dump(Frame(f"{TORCH}/distributed/checkpoint/filesystem.py", 9, "write_data"), OWN), Place.UNKNOWN),
        (dump(OWN), Place.UNKNOWN),
        (dump(), Place.UNKNOWN),
        (StackDump(reason="hang", threads=()), Place.UNKNOWN),
        (None, Place.UNKNOWN),
    ],
)
def test_place_is_certain_only_if_the_innermost_call_shows_it(found, place):
    assert place is place_of(found)


def test_sleeping_hook_in_a_backward_pass_is_outside_of_the_pass():
    hook = Frame("/job/hooks.py", 3, "slow")

    assert Place.OUTSIDE is place_of(dump(hook, Frame(f"{TORCH}/autograd/graph.py", 841, "_engine_run_backward"), OWN,
                                          calls="time.sleep"))  # fmt: skip


@pytest.mark.parametrize(("is_ours", "place"), [(False, Place.UNKNOWN), (True, Place.OUTSIDE)])
def test_place_is_unknown_if_a_user_thread_is_in_a_collective(is_ours, place):
    saver = ThreadStack(ident=2, name="saver", frames=(REDUCE, LOGGED, OWN), is_ours=is_ours)
    waits = Frame(f"{PYTHON}/threading.py", 331, "wait")

    assert place is place_of(dump(waits, OWN, calls=".acquire", others=(saver,)))
