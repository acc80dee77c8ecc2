"""Tests of the search for the blocking rank: only sufficient evidence names a rank; missing data is no evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.model.stacks import Collective, FlightRecord, Frame, GroupProgress, StackDump, ThreadStack
from rankscope_ingest.runs.blame import Blame, RankFacts, WaitPlace, place_of, single_out

TORCH = "/env/lib/python3.11/site-packages/torch"
PYTHON = "/usr/lib/python3.11"
OWN = Frame("/job/train.py", 88, "main")
REDUCE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce")
BACKWARD = Frame(f"{TORCH}/autograd/graph.py", 841, "_engine_run_backward")
LOGGED = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
LOADER = Frame(f"{TORCH}/utils/data/dataloader.py", 701, "__next__")


def dump(*frames: Frame, calls: str | None = None, others: tuple[ThreadStack, ...] = ()) -> StackDump:
    thread = ThreadStack(ident=1, is_training=True, frames=frames, calls=calls)
    return StackDump(reason="hang", threads=(thread, *others))


DISTRIBUTED = f"{TORCH}/distributed"
WAITS = Frame(f"{PYTHON}/threading.py", 331, "wait")
PLACES = {
    WaitPlace.IN_COLLECTIVE: (
        dump(REDUCE, LOGGED, OWN, calls=".wait"),
        dump(Frame(REDUCE.file, 2799, "recv"), LOGGED, OWN),
        dump(Frame(REDUCE.file, 2169, "_new_process_group_helper"), OWN),
        dump(Frame(f"{DISTRIBUTED}/_functional_collectives.py", 161, "wait_tensor"), OWN),
    ),
    WaitPlace.MAY_WAIT: (
        dump(Frame(f"{DISTRIBUTED}/fsdp/_fully_shard/_fsdp_param_group.py", 5, "wait"), OWN),
        dump(BACKWARD, OWN),
        dump(Frame(f"{TORCH}/nn/parallel/distributed.py", 1775, "_pre_forward"), OWN),
        dump(OWN, calls=".wait"),
    ),
    WaitPlace.OUTSIDE: (
        *(dump(OWN, calls=calls) for calls in ("time.sleep", "posix.read", ".sleep", "")),
        dump(WAITS, OWN, calls=".acquire"),
        dump(WAITS, LOADER, OWN, calls=".acquire"),
        dump(Frame("/job/hooks.py", 3, "slow"), BACKWARD, OWN, calls="time.sleep"),
        dump(Frame("/job/data.py", 4, "__getitem__"), LOADER, OWN, calls=".decode"),
    ),
    WaitPlace.UNKNOWN: (
        # The line may only wait for the device, and the device may wait for another rank.
        *(dump(OWN, calls=calls) for calls in (".item", "builtins.float", "torch._C._cuda_synchronize")),
        dump(Frame(f"{PYTHON}/copy.py", 153, "deepcopy"), OWN),
        dump(Frame(f"{TORCH}/nn/modules/linear.py", 125, "forward"), OWN),
        # The rank writes its file of a checkpoint that all ranks write together.
        dump(Frame(f"{DISTRIBUTED}/checkpoint/filesystem.py", 9, "write_data"), OWN),
        *(dump(OWN), dump(), StackDump(reason="hang", threads=()), None),
    ),
}


@pytest.mark.parametrize(("place", "found"), [(place, found) for place, listed in PLACES.items() for found in listed])
def test_place_is_certain_only_if_the_innermost_call_shows_it(found, place):
    assert place is place_of(found)


@pytest.mark.parametrize(("is_ours", "place"), [(False, WaitPlace.UNKNOWN), (True, WaitPlace.OUTSIDE)])
def test_place_is_unknown_if_a_user_thread_is_in_a_collective(is_ours, place):
    saver = ThreadStack(ident=2, name="saver", frames=(REDUCE, LOGGED, OWN), is_ours=is_ours)

    assert place is place_of(dump(WAITS, OWN, calls=".acquire", others=(saver,)))


IN_REDUCE, IN_BACKWARD = dump(REDUCE, OWN), dump(BACKWARD, OWN)
IN_BARRIER, IN_RECV = (dump(Frame(REDUCE.file, 2799, name), OWN) for name in ("barrier", "recv"))
SLEEPS = dump(OWN, calls="time.sleep")
WAITS_FOR_DEVICE = dump(OWN, calls=".item")


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group: `done` is the last completed call of each rank; the ranks in `waits` are in the next one."""

    ranks: Sequence[int]
    name: str = "default_pg"
    done: Mapping[int, int] = field(default_factory=dict)
    waits: Mapping[int, str] = field(default_factory=dict)  # rank -> operation
    seconds: float = 300.0


def flights(*groups: Group) -> dict[int, FlightRecord]:
    """Return the flight records of all ranks of the groups."""
    found: dict[int, FlightRecord] = {}
    for rank in sorted({rank for group in groups for rank in group.ranks}):
        entries, progress = [], []
        for group in groups:
            if rank in group.ranks:
                done = group.done.get(rank, 40)
                entries += [entry(group, done, "all_reduce", is_pending=False)]
                if rank in group.waits:
                    entries += [entry(group, done + 1, group.waits[rank], is_pending=True)]
                latest = done + (rank in group.waits)
                progress.append(GroupProgress(id=group.name, ranks=",".join(map(str, group.ranks)), latest_seq=latest))
        found[rank] = FlightRecord(reason="x", collectives=tuple(entries), recorded=9, groups=tuple(progress))
    return found


def entry(group: Group, seq: int, op: str, *, is_pending: bool) -> Collective:
    return Collective(
        op=op, backend="gloo", group=group.name, group_id=group.name, seq=seq, is_pending=is_pending,
        age_seconds=group.seconds, dtypes=("Float",), sizes=((4,),),
    )  # fmt: skip


def facts(
    records: Mapping[int, FlightRecord], dumps: Mapping[int, StackDump] | None = None, **steps: int
) -> list[RankFacts]:
    given = dumps or {}
    return [
        RankFacts(rank=rank, flight=records.get(rank), stacks=given.get(rank), last_step=steps.get(f"r{rank}"))
        for rank in sorted({*records, *given})
    ]


def waiting(rank: int, world: int) -> Group:
    """Return a group of all ranks in which every rank except `rank` waits in the next call."""
    return Group(ranks=range(world), waits={one: "all_reduce" for one in range(world) if one != rank})


# Properties for any set of sources: three situations, with every source removed from any rank.

WORLDS = [(world, rank) for world in (2, 3, 8) for rank in sorted({0, 1, world - 1})]


def sleeping(world: int, rank: int) -> list[RankFacts]:
    return facts(flights(waiting(rank, world)), {one: SLEEPS if one == rank else IN_REDUCE for one in range(world)})


def in_an_earlier_call(world: int, rank: int) -> list[RankFacts]:
    group = Group(
        ranks=range(world),
        done={one: 39 if one == rank else 40 for one in range(world)},
        waits=dict.fromkeys(range(world), "all_reduce"),
    )
    return facts(flights(group), {one: IN_BARRIER if one == rank else IN_REDUCE for one in range(world)})


def dead(world: int, rank: int) -> list[RankFacts]:
    """Return the facts about the surviving ranks. No fact shows that the missing rank is dead."""
    return [fact for fact in sleeping(world, rank) if fact.rank != rank]


SITUATIONS = [sleeping, in_an_earlier_call, dead]


@pytest.mark.parametrize(("world", "rank"), WORLDS)
@pytest.mark.parametrize(
    ("situation", "sources", "evidence"),
    [
        (sleeping, ("flight", "stacks"), ("(flight records)", "(stacks)")),
        *((sleeping, ("flight",), ("(flight records)",)), (sleeping, ("stacks",), ("(stacks)",)), (sleeping, (), ())),
        (in_an_earlier_call, ("flight", "stacks"), ("(flight records)",)),
        *((in_an_earlier_call, ("flight",), ("(flight records)",)), (in_an_earlier_call, ("stacks",), ())),
        (in_an_earlier_call, (), ()),
        *((dead, sources, ()) for sources in (("flight", "stacks"), ("flight",), ("stacks",), ())),
    ],
)
def test_blocking_rank_is_named_if_a_source_singles_it_out(situation, sources, evidence, world, rank):
    known = [replace(fact, **{name: None for name in ("flight", "stacks") if name not in sources})
             for fact in situation(world, rank)]  # fmt: skip
    found = single_out(known, world)

    assert (rank if evidence else None) == found.rank
    assert evidence == tuple(source for source in ("(flight records)", "(stacks)") if source in found.evidence)


@given(data=st.data(), situation=st.sampled_from(SITUATIONS), place=st.sampled_from(WORLDS))
def test_missing_sources_never_cause_another_rank_to_be_named(data, situation, place):
    world, rank = place
    known = []
    for fact in situation(world, rank):
        kept = data.draw(st.sets(st.sampled_from(["flight", "stacks", "rank"])))
        if "rank" in kept:
            known.append(replace(fact, **{name: None for name in ("flight", "stacks") if name not in kept}))

    assert single_out(known, world).rank in {rank, None}


# Single situations.


def test_single_rank_of_a_world_of_one_is_named_and_of_two_is_not():
    (alone,) = facts(flights(Group(ranks=(0,), waits={0: "all_reduce"})))

    assert Blame(rank=0, evidence="it is the only rank of the job") == single_out([alone], 1)
    assert None is single_out([alone], 2).rank


def without_record(rank: int, records: dict[int, FlightRecord]) -> dict[int, FlightRecord]:
    return {one: record for one, record in records.items() if one != rank}


SUM = "all_reduce"
CROSSED = (Group(ranks=(0, 1), name="a", waits={0: SUM}), Group(ranks=(0, 1), name="b", waits={1: SUM}))
CHAIN = (Group(ranks=range(4), waits={1: SUM, 3: SUM}), Group(ranks=(0, 1), name="pair", waits={0: SUM}))
SAME_NAME = (Group(ranks=(0, 1), name="dp", waits={0: SUM}), Group(ranks=(2, 3), name="dp", done={2: 50, 3: 50}))


@pytest.mark.parametrize(
    ("known", "world", "rank"),
    [
        (facts(flights(Group(ranks=range(3), waits=dict.fromkeys(range(3), SUM)))), 3, None),
        (facts({}, dict.fromkeys(range(3), IN_REDUCE)), 3, None),
        # Two ranks are outside of the collective.
        (facts(flights(Group(ranks=range(3), waits={2: SUM}))), 3, None),
        (facts({}, {0: SLEEPS, 1: SLEEPS, 2: IN_REDUCE}), 3, None),
        # Rank 0 waits for rank 1 in a pair. Rank 1 waits in a call of all ranks, which rank 2 never entered.
        (facts(flights(*CHAIN)), 4, 2),
        # Two ranks have entered a call that the other has not entered. Meanwhile, rank 2 computes alone.
        (facts(flights(*CROSSED, Group(ranks=(2,), name="c")), {0: IN_REDUCE, 1: IN_REDUCE, 2: SLEEPS}), 3, None),
        # The other ranks disagree on the operation.
        (facts(flights(Group(ranks=range(2), waits={0: SUM, 1: "barrier"}))), 2, None),
        (facts(flights(Group(ranks=range(3), waits={0: SUM, 1: "barrier", 2: "broadcast"}))), 3, None),
        (facts(flights(Group(ranks=range(4), waits={0: SUM, 1: "barrier", 2: "barrier", 3: SUM}))), 4, None),
        # In a training without a fault, the other rank may enter the call at any moment.
        (facts(flights(replace(waiting(1, 3), seconds=0.2))), 3, None),
        # A rank without a flight record may be in the collective.
        ([*facts(without_record(2, flights(waiting(1, 3)))), RankFacts(rank=2)], 3, None),
        (facts(without_record(2, flights(waiting(1, 3))), {2: IN_REDUCE}), 3, 1),
        (facts(without_record(2, flights(waiting(1, 3))), {1: IN_BACKWARD, 2: SLEEPS}), 3, None),
        # Different groups have one name.
        (facts(flights(SAME_NAME[0]) | flights(SAME_NAME[1])), 4, None),
        # Gloo records neither point-to-point messages nor the creation of a group. Only the stack shows them.
        (facts(flights(waiting(1, 3)), {0: IN_REDUCE, 1: IN_RECV, 2: IN_REDUCE}), 3, None),
        (facts({}, {0: IN_REDUCE, 1: IN_RECV, 2: IN_REDUCE}), 3, None),
        # The others are in the backward pass, or the flight records show that they compute.
        (facts({}, {0: IN_BACKWARD, 1: SLEEPS, 2: IN_BACKWARD}), 3, 1),
        (facts(flights(Group(ranks=range(3))), {0: IN_BACKWARD, 1: SLEEPS, 2: IN_BACKWARD}), 3, None),
        # A rank may wait for its device.
        (facts({}, {0: IN_REDUCE, 1: WAITS_FOR_DEVICE, 2: IN_REDUCE}), 3, None),
        (facts({}, {0: IN_REDUCE, 1: SLEEPS, 2: WAITS_FOR_DEVICE}), 3, None),
    ],
)
def test_rank_is_named_only_with_sufficient_evidence(known, world, rank):
    assert rank == single_out(known, world).rank


def test_rank_with_a_different_operation_than_all_others_is_named():
    found = single_out(facts(flights(Group(ranks=range(3), waits={0: SUM, 1: "barrier", 2: SUM}))), 3)
    evidence = (
        "it called barrier (float32) as collective 41 of default_pg, ranks 0, 2 all_reduce (float32) (flight records)"
    )

    assert (1, evidence) == (found.rank, found.evidence)


@pytest.mark.parametrize(
    ("steps", "rank"),
    [
        *(((41, 60, 60), 0), ((60, 60, 41), 2), ((41, 43, 43), 0)),
        ((41, 42, 42), None),  # ranks that wait for each other may differ by one step
        *(((41, 41, 60), None), ((41, 50, 60), 0), ((41, 42, 60), None)),
    ],
)
def test_rank_that_hangs_while_all_others_make_steps_is_named(steps, rank):
    known = [RankFacts(rank=one, last_step=step, hangs=step == min(steps)) for one, step in enumerate(steps)]

    assert rank == single_out(known, 3).rank


def test_old_steps_of_an_unreachable_rank_are_no_evidence():
    known = [RankFacts(rank=0, last_step=41), RankFacts(rank=1, last_step=60), RankFacts(rank=2, last_step=60)]

    assert None is single_out(known, 3).rank
    assert None is single_out([replace(known[0], hangs=True), known[1]], 3).rank


def test_evidence_names_its_source_and_each_missing_source():
    named = single_out(sleeping(3, 1), 3)
    unknown = [single_out(known, 3) for known in ([], in_an_earlier_call(3, 1)[:2])]

    assert (
        "rank 1: it never entered all_reduce 41 (float32) of default_pg, in which ranks 0, 2 wait (flight records); "
        "it is in time.sleep, called at train.py:88 in main, and ranks 0, 2 wait in a collective (stacks)"
    ) == str(named)
    assert [
        "unknown: no rank sent stacks or a flight record",
        "unknown: the flight records of ranks 0-1 and the stacks of ranks 0-1 do not identify a single rank",
    ] == list(map(str, unknown))


def test_evidence_for_1000_ranks_has_less_than_500_characters():
    verdicts = [single_out(known, 1000) for known in (sleeping(1000, 17), in_an_earlier_call(1000, 17))]
    of_every_second = single_out([fact for fact in sleeping(1000, 17) if fact.rank % 2], 1000)

    assert [17, 17, None] == [found.rank for found in (*verdicts, of_every_second)]
    assert max(len(found.evidence) for found in (*verdicts, of_every_second)) < 500
