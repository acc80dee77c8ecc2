"""Ranks that a service does not know from their start: a second process of one rank, and a service that starts late."""

from pathlib import Path

from tests.end_to_end.lives import until

from rankscope_storage.connection import connect

TRAINING = Path(__file__).with_name("small_training.py")


def last_printed(tmp_path, rank):
    lines = [line for line in (tmp_path / f"rank-{rank}.log").read_text().split() if line.isdecimal()]
    return int(lines[-1]) if lines else 0


def test_second_process_of_one_rank_is_rejected(service, start_ranks, tmp_path):
    """The second process still trains. The rows contain nothing of it."""
    service.start()
    (first,) = start_ranks(TRAINING, tmp_path, 0, 0.05, run="lost", count=1, log="rank", WORLD_SIZE="2")
    service.wait_for(lambda: service.runs() and service.runs()[0]["step"])
    (tmp_path / "other").mkdir()
    (second,) = start_ranks(TRAINING, tmp_path / "other", 0, 0.05, run="lost", count=1, log="second", WORLD_SIZE="2")
    refused = tmp_path / "second-0.log"
    service.wait_for(lambda: any(word in refused.read_text() for word in ("409", "identity")))
    (tmp_path / "other" / "stop").touch()

    assert 0 == second.wait(60)
    (tmp_path / "stop").touch()
    assert 0 == first.wait(60)
    assert 0 == service.stop(), service.log()
    with connect(service.store) as connection:
        ((incarnations, steps),) = connection.sql(
            "select count(distinct incarnation), count(distinct step) from scalars where name = 'loss'"
        ).fetchall()
    assert (1, last_printed(tmp_path, 0)) == (incarnations, steps)


def test_service_that_starts_late_stores_all_steps(service, start_ranks, tmp_path):
    ranks = start_ranks(TRAINING, tmp_path, 0, 0.05, run="lost", log="rank")
    until(lambda: min(last_printed(tmp_path, rank) for rank in range(2)) >= 10)
    service.start()
    service.wait_for(lambda: service.runs() and service.runs()[0]["ranks_alive"] == 2)
    (tmp_path / "stop").touch()

    assert [0, 0] == [rank.wait(90) for rank in ranks]
    assert 0 == service.stop(), service.log()
    with connect(service.store) as connection:
        rows = connection.sql(
            "select rank, min(step), max(step), count(*) from scalars where name = 'loss' group by rank order by rank"
        ).fetchall()
    ends = [last_printed(tmp_path, rank) for rank in range(2)]
    assert [(rank, 1, end, end) for rank, end in enumerate(ends)] == rows
