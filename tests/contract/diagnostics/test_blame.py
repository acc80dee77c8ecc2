"""Tests of the search for the blocking rank: only sufficient evidence names a rank; missing data is no evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.diagnostics.blame import RankFacts, Verdict, single_out
from rankscope_contract.diagnostics.stacks import Collective, FlightRecord, Frame, GroupProgress, StackDump, ThreadStack

C10D = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
BACKWARD = Frame("/env/lib/python3.11/site-packages/torch/autograd/graph.py", 841, "_engine_run_backward")


def stacks(*frames: Frame, calls: str | None = None) -> StackDump:
    thread = ThreadStack(ident=1, is_training=True, frames=(*frames, Frame("/job/train.py", 88, "main")), calls=calls)
    return StackDump(reason="hang", threads=(thread,))


IN_REDUCE = stacks(Frame(C10D, 3252, "all_reduce"))
IN_BARRIER = stacks(Frame(C10D, 5356, "barrier"))
IN_RECV = stacks(Frame(C10D, 2799, "recv"))
IN_BACKWARD = stacks(BACKWARD)
SLEEPS = stacks(calls="time.sleep")
WAITS_FOR_DEVICE = stacks(calls=".item")


@dataclass(frozen=True, kw_only=True)
class Group:
    """One process group and its progress.

    `done` is the last completed call of each rank; the ranks in `waits` are in the next call.
    """

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
                progress.append(
                    GroupProgress(
                        id=group.name, ranks=",".join(map(str, group.ranks)), latest_seq=done + (rank in group.waits)
                    )
                )
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
    others = {one: "all_reduce" for one in range(world) if one != rank}
    return Group(ranks=range(world), waits=others)


# Properties for any set of sources: three situations, with every source removed from any rank.

WORLDS = [(world, rank) for world in (2, 3, 8) for rank in sorted({0, 1, world - 1})]


def sleeping(world: int, rank: int) -> list[RankFacts]:
    dumps = {one: SLEEPS if one == rank else IN_REDUCE for one in range(world)}
    return facts(flights(waiting(rank, world)), dumps)


def in_an_earlier_call(world: int, rank: int) -> list[RankFacts]:
    group = Group(
        ranks=range(world),
        done={one: 39 if one == rank else 40 for one in range(world)},
        waits=dict.fromkeys(range(world), "all_reduce"),
    )
    dumps = {one: IN_BARRIER if one == rank else IN_REDUCE for one in range(world)}
    return facts(flights(group), dumps)


def dead(world: int, rank: int) -> list[RankFacts]:
    """Return the facts about the surviving ranks. No fact shows that the missing rank is dead."""
    return [fact for fact in sleeping(world, rank) if fact.rank != rank]


SITUATIONS = [sleeping, in_an_earlier_call, dead]


@pytest.mark.parametrize(("world", "rank"), WORLDS)
@pytest.mark.parametrize(
    ("situation", "sources", "evidence"),
    [
        (sleeping, ("flight", "stacks"), ("(flight records)", "(stacks)")),
        (sleeping, ("flight",), ("(flight records)",)),
        (sleeping, ("stacks",), ("(stacks)",)),
        (sleeping, (), ()),
        (in_an_earlier_call, ("flight", "stacks"), ("(flight records)",)),
        (in_an_earlier_call, ("flight",), ("(flight records)",)),
        (in_an_earlier_call, ("stacks",), ()),
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


def verdict(known: Iterable[RankFacts], world: int = 3) -> int | None:
    return single_out(known, world).rank


def test_single_rank_of_a_world_of_one_is_named_and_of_two_is_not():
    (alone,) = facts(flights(Group(ranks=(0,), waits={0: "all_reduce"})))

    assert Verdict(rank=0, evidence="it is the only rank of the job") == single_out([alone], 1)
    assert None is verdict([alone], world=2)


def test_no_rank_is_named_if_all_are_in_the_same_collective():
    everyone = Group(ranks=range(3), waits=dict.fromkeys(range(3), "all_reduce"))

    assert None is verdict(facts(flights(everyone), dict.fromkeys(range(3), IN_REDUCE)))


def test_no_rank_is_named_if_two_are_outside_the_collective():
    records = flights(Group(ranks=range(3), waits={2: "all_reduce"}))

    assert None is verdict(facts(records))
    assert None is verdict(facts({}, {0: SLEEPS, 1: SLEEPS, 2: IN_REDUCE}))


def test_chain_of_waits_is_followed_across_groups():
    """Rank 0 waits for rank 1 in a pair. Rank 1 waits in a call of all ranks, which rank 2 never entered."""
    world = Group(ranks=range(4), waits={1: "all_reduce", 3: "all_reduce"})
    pair = Group(ranks=(0, 1), name="pair", waits={0: "all_reduce"})

    assert 2 == verdict(facts(flights(world, pair)), world=4)


def test_ranks_that_wait_for_each_other_do_not_implicate_a_third_rank():
    """Each of the two has entered a call that the other has not entered. Meanwhile, rank 2 computes alone."""
    first = Group(ranks=(0, 1), name="a", waits={0: "all_reduce"})
    second = Group(ranks=(0, 1), name="b", waits={1: "all_reduce"})
    alone = Group(ranks=(2,), name="c")
    dumps = {0: IN_REDUCE, 1: IN_REDUCE, 2: SLEEPS}

    assert None is verdict(facts(flights(first, second, alone), dumps))


def test_rank_with_a_different_operation_than_all_others_is_named():
    differ = Group(ranks=range(3), waits={0: "all_reduce", 1: "barrier", 2: "all_reduce"})
    found = single_out(facts(flights(differ)), 3)

    assert 1 == found.rank
    assert (
        "it called barrier (float32) as collective 41 of default_pg, ranks 0, 2 all_reduce (float32) (flight records)"
        == found.evidence
    )


@pytest.mark.parametrize(
    "waits",
    [
        {0: "all_reduce", 1: "barrier"},
        {0: "all_reduce", 1: "barrier", 2: "broadcast"},
        {0: "all_reduce", 1: "barrier", 2: "barrier", 3: "all_reduce"},
    ],
)
def test_no_rank_is_named_if_the_other_ranks_disagree_on_the_operation(waits):
    assert None is verdict(facts(flights(Group(ranks=range(len(waits)), waits=waits))), world=len(waits))


def test_collective_that_has_just_begun_is_no_evidence():
    """In a training without a fault, the other rank may enter the call at any moment."""
    assert None is verdict(facts(flights(replace(waiting(1, 3), seconds=0.2))))


def test_rank_without_flight_record_may_be_in_the_collective():
    records = flights(waiting(1, 3))
    del records[2]

    assert None is verdict([*facts(records), RankFacts(rank=2)])
    assert 1 == verdict(facts(records, {2: IN_REDUCE}))


def test_different_groups_with_one_name_are_no_evidence():
    left = Group(ranks=(0, 1), name="dp", waits={0: "all_reduce"})
    right = Group(ranks=(2, 3), name="dp", done={2: 50, 3: 50})

    assert None is verdict(facts(flights(left) | flights(right)), world=4)


def test_rank_that_waits_in_an_unrecorded_operation_is_not_named():
    """Gloo records neither point-to-point messages nor the creation of a group. Only the stack shows them."""
    dumps = {0: IN_REDUCE, 1: IN_RECV, 2: IN_REDUCE}

    assert None is verdict(facts(flights(waiting(1, 3)), dumps))
    assert None is verdict(facts({}, dumps))


def test_rank_outside_is_named_if_others_are_in_the_backward_pass():
    dumps = {0: IN_BACKWARD, 1: SLEEPS, 2: IN_BACKWARD}

    assert 1 == verdict(facts({}, dumps))
    # The flight records show that the other ranks compute.
    idle = flights(Group(ranks=range(3)))
    assert None is verdict(facts(idle, dumps))


def test_rank_that_may_wait_for_its_device_is_no_evidence():
    assert None is verdict(facts({}, {0: IN_REDUCE, 1: WAITS_FOR_DEVICE, 2: IN_REDUCE}))
    assert None is verdict(facts({}, {0: IN_REDUCE, 1: SLEEPS, 2: WAITS_FOR_DEVICE}))


def test_ranks_outside_by_stack_and_by_flight_record_both_count():
    records = flights(waiting(1, 3))
    del records[2]

    assert None is verdict(facts(records, {1: IN_BACKWARD, 2: SLEEPS}))


@pytest.mark.parametrize(
    ("steps", "rank"),
    [
        ((41, 60, 60), 0),
        ((60, 60, 41), 2),
        ((41, 43, 43), 0),
        ((41, 42, 42), None),  # ranks that wait for each other may differ by one step
        ((41, 41, 60), None),
        ((41, 50, 60), 0),
        ((41, 42, 60), None),
    ],
)
def test_rank_that_hangs_while_all_others_make_steps_is_named(steps, rank):
    known = [RankFacts(rank=one, last_step=step, hangs=step == min(steps)) for one, step in enumerate(steps)]

    assert rank == verdict(known)


def test_old_steps_of_an_unreachable_rank_are_no_evidence():
    known = [RankFacts(rank=0, last_step=41), RankFacts(rank=1, last_step=60), RankFacts(rank=2, last_step=60)]

    assert None is verdict(known)
    assert None is verdict([replace(known[0], hangs=True), known[1]])


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
