"""Hashes of replicas on two ranks: equal exactly if all bits are equal."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.exporter.measure.kernels.test_hashes import reference
from tests.programs import run_program

pytestmark = pytest.mark.timeout(400)  # the first test waits for all trainings
Found = Mapping[str, Mapping[str, Any]]
NAMES = {"enter.weight", "enter.bias", "norm.weight", "norm.bias", "leave.weight", "leave.bias"}
SAMPLED = (1, 3, 5)

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
from tests.exporter.measure.quantities.hash_runs import main
main(Path({folder!r}))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("replicas")
    done = run_program(PROGRAM.format(folder=str(folder)), seconds=300)

    assert 0 == done.returncode, done.stderr[-4000:]
    return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]


def hashes(found: Mapping[str, Any]) -> dict[tuple[int, str, str], int]:
    return {(row["step"], row["kind"], row["tensor"]): row["hash"] for row in found["rows"]}


def apart(ranks: list[Found], case: str) -> set[tuple[int, str, str]]:
    one, other = (hashes(found[case]) for found in ranks)
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


def really_apart(ranks: list[Found], case: str) -> set[tuple[int, str, str]]:
    """Return the expected rows, computed from the bits that the test reads after each step."""
    one, other = (found[case]["truth"] for found in ranks)
    pairs = {(step, name): (one[str(step)][name], other[str(step)][name]) for step in SAMPLED for name in NAMES}
    return {(step, "param_after", name) for (step, name), (a, b) in pairs.items() if a != b}


def test_hash_is_computed_from_the_bits_after_the_update(ranks: list[Found]) -> None:
    for case in ("equal", "disturbed", "two optimizers", "ZeRO"):
        for found in (rank[case] for rank in ranks):
            bits_of = {(step, name): bits for step in SAMPLED for name, bits in found["truth"][str(step)].items()}
            hashed = {key: reference(struct.pack(f"<{len(bits)}i", *bits)) for key, bits in bits_of.items()}
            expected = {(step, "param_after", name): value for (step, name), value in hashed.items()}

            assert expected == {key: value for key, value in hashes(found).items() if key[1] == "param_after"}
            assert 0 == found["faults"], found["notices"]


def test_norm_is_published_with_the_hash(ranks: list[Found]) -> None:
    for found in (rank["disturbed between samples"] for rank in ranks):
        for row in (row for row in found["rows"] if row["kind"] == "param_after"):
            bits = found["truth"][str(row["step"])][row["tensor"]]
            values = struct.unpack(f"<{len(bits)}f", struct.pack(f"<{len(bits)}i", *bits))

            assert row["norm"] == pytest.approx(math.sqrt(math.fsum(value * value for value in values)), rel=1e-6)
            assert (len(bits), "float32", "0,1") == (row["numel"], row["dtype"], row["replicas"])


def test_equal_replicas_always_have_equal_hashes(ranks: list[Found]) -> None:
    """Cases include BatchNorm with different buffers per rank, accumulation, a gradient scaler, ZeRO and wrappers."""
    for case in (name for name in ranks[0] if not name.startswith(("disturbed", "buffers", "bare", "sharded"))):
        assert set() == really_apart(ranks, case), case
        assert set() == apart(ranks, case), case
        assert SAMPLED == tuple(sorted({step for step, *_ in hashes(ranks[0][case])})), case


@pytest.mark.parametrize(
    ("case", "first", "disturbed"), [("disturbed", 3, "leave.weight"), ("disturbed between samples", 5, "enter.weight")]
)
def test_smallest_change_of_one_element_shows_at_the_next_sampled_step(
    ranks: list[Found], case: str, first: int, disturbed: str
) -> None:
    found = {key for key in apart(ranks, case) if key[1] == "param_after"}

    assert really_apart(ranks, case) == found
    assert first == min(step for step, *_ in found)
    assert {disturbed} == {name for step, _, name in found if step == first}


def test_every_rank_publishes_hashes_with_dp_group(ranks: list[Found]) -> None:
    one, other = (found["disturbed between samples"] for found in ranks)

    assert (True, False) == (one["measured"], other["measured"])
    assert hashes(one).keys() == hashes(other).keys()


def test_optimizer_state_is_hashed_if_every_rank_holds_all_of_it(ranks: list[Found]) -> None:
    kinds = {case: {key[1] for key in hashes(ranks[0][case])} for case in ("equal", "ZeRO", "by hand")}

    assert {"param_after", "exp_avg", "exp_avg_sq"} == kinds["equal"]
    assert {"param_after"} == kinds["ZeRO"] == kinds["by hand"]


def test_named_buffers_are_hashed(ranks: list[Found]) -> None:
    """BatchNorm's statistics differ between ranks after a forward pass, and so do their hashes."""
    assert {"norm.running_mean", "norm.running_var"} == {key[2] for key in apart(ranks, "buffers")}
    assert {"table"} == {key[2] for key in hashes(ranks[0]["a constant buffer"]) if key[1] == "buffer"}


def test_only_replicas_are_hashed(ranks: list[Found]) -> None:
    for case in ("bare", "sharded"):
        assert {} == hashes(ranks[0][case])
        assert 1 == sum("no parameter is known to have replicas" in text for text in ranks[0][case]["notices"])
    assert NAMES == {key[2] for key in hashes(ranks[0]["hybrid"])}


def test_option_all_hashes_every_tensor(ranks: list[Found]) -> None:
    found = ranks[0]["all of a bare one"]

    assert NAMES == {key[2] for key in hashes(found)}
    assert {None} == {row["replicas"] for row in found["rows"]}
    assert "rankscope_replica_hash{" not in found["page"]


def test_metrics_page_shows_one_combined_hash_and_its_step(ranks: list[Found]) -> None:
    lines = [dict(shown(found["equal"]["page"])) for found in ranks]
    different = [dict(shown(found["disturbed"]["page"])) for found in ranks]

    assert {"rankscope_replica_hash", "rankscope_replica_hash_step"} == lines[0].keys()
    assert lines[0] == lines[1]
    assert 5.0 == lines[0]["rankscope_replica_hash_step"] == different[0]["rankscope_replica_hash_step"]
    assert different[0]["rankscope_replica_hash"] != different[1]["rankscope_replica_hash"]
    assert all(0 <= page["rankscope_replica_hash"] < 2**48 for page in (*lines, *different))
    assert all(page["rankscope_replica_hash"] == int(page["rankscope_replica_hash"]) for page in (*lines, *different))


def shown(page: str) -> Iterator[tuple[str, float]]:
    for line in page.splitlines():
        if line.startswith("rankscope_replica_hash"):
            name, _, value = line.rpartition(" ")
            assert 'replicas="0,1"' in name
            yield name.partition("{")[0], float(value)
