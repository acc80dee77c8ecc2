"""`rankscope diff`: text output, JSON output and exit codes."""

import json
import math

import pytest
from tests.cli.conftest import START, common, table
from tests.cli.test_commands import assert_golden

from rankscope.output.diff_text import _growth
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.diff.diff import StepDifference

RUNS = ("good-run", "bad-run")
PARTED = 12


def rows(run, rank):
    """Return a store with two runs of 20 steps; from step 12, one layer of the bad run deviates increasingly."""
    found = {"tensor_stats": [], "scalars": [], "hashes": []}
    for step in range(1, 21):
        off = 1e-6 * 4.0 ** (step - PARTED) if run == "bad-run" and step >= PARTED and rank == 1 else 0.0
        place = common(rank, step, step - 1, run)
        for name in ("param_before 1.weight", "act_out 0", "act_out 1", "grad_reduced 1.weight"):
            kind, tensor = name.split()
            statistics = {"norm": 2.0 * (1 + off * (tensor != "0")), "nans": 0, "infs": 0, "numel": 6}
            found["tensor_stats"].append(place | {"kind": kind, "tensor": tensor} | statistics)
        if run == "bad-run" and step == 3:
            found["tensor_stats"].append(place | {"kind": "act_out", "tensor": "extra", "norm": 1.0})
        found["scalars"].append(place | {"name": "loss", "value": 5.0 / step + off})
        if step == 11:
            bits = 7 if off == 0 and not (run == "bad-run" and rank == 1) else -9
            found["hashes"].append(
                place | {"kind": "param_after", "tensor": "1.weight", "hash": bits, "norm": 2.0, "replicas": "0,1"}
            )
    return found


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diff") / "history"
    with Store.open(folder, create=True).claim(owner="test") as writer:
        for number, run in enumerate(RUNS):
            tables = {
                name: table(name, [row for rank in range(2) for row in rows(run, rank)[name]])
                for name in ("tensor_stats", "scalars", "hashes")
            }
            state = {"state": "completed", "started_at": START, "ordinal": number}
            tables["runs"] = table("runs", [common(None, 20, 0, run) | state])
            writer.append(Batch(tables=tables, watermarks={f"{run}-{rank}": 19 for rank in range(2)}))
    return folder


@pytest.fixture
def diff(in_process, two_runs):
    return lambda *arguments: in_process("diff", *arguments, "--store", two_runs)


@pytest.mark.parametrize(
    ("name", "code", "arguments"),
    [
        *(("diff", 1, [*RUNS, "--tolerance", "1e-9"]), ("diff_exact", 1, [*RUNS, "--top", "2"])),
        *(("diff_none", 0, [*RUNS, "--rank", "0"]), ("diff_of_ranks", 1, ["bad-run", "--ranks", "0", "1"])),
    ],
)
def test_golden_output(diff, name, code, arguments):
    done = diff(*arguments)

    assert "" == done.stderr
    assert code == done.returncode
    assert_golden(name, done.stdout)


def test_nan_has_the_longest_bar_and_times_are_left_out_in_words(diff):
    step = StepDifference(step=36, compared=2, apart=1, worst=math.nan)

    assert f"  36       NaN  {'#' * 24}  1 of 2 rows differ" == list(_growth([step]))[-1]
    assert diff(*RUNS, "--kind", "scalar").stdout.endswith(
        "\nleft out: times, and values of hosts and of Rankscope; --kind timing compares them\n"
    )


def test_json_contains_the_complete_result(diff):
    done = diff(*RUNS, "--tolerance", "1e-9", "--json", "--top", "1")
    found = json.loads(done.stdout)

    assert 1 == done.returncode
    assert (PARTED, "param_before", "1.weight", 1) == tuple(
        found["first"][name] for name in ("step", "kind", "tensor", "rank")
    )
    assert list(range(PARTED, 21)) == [step["step"] for step in found["steps"]]
    assert [["act_out", "extra"]] == found["tensors_only_in_b"]
    assert 2e-6 / 2.000002 == pytest.approx(found["first"]["relative"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["good-run", "bad-rum"], "run 'bad-rum' not found. Did you mean 'bad-run'?"),
        (["good-run"], "name two runs, or one run with --ranks A B or --attempts A B"),
        (["good-run", "good-run"], "both sides of the comparison are good-run"),
        ([*RUNS, "--steps", "5-9"], "--steps '5-9': write first:last"),
        ([*RUNS, "--kind", "act_ouT"], "good-run has no kind act_ouT; it has "),
        ([*RUNS, "--steps", "99999999999999999999"], "--steps '99999999999999999999': write first:last"),
        ([*RUNS, "--tolerance", "inf"], "--tolerance inf is not a finite number"),
        (["good-run", "--attempts", "0", "1"], "good-run has no attempt 1, only 0"),
        (["bad-run", "--ranks", "0", "7"], "bad-run has no rank 7, only 0-1"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(diff, arguments, message):
    done = diff(*arguments)

    assert 2 == done.returncode
    assert message in done.stderr
    assert 1 == done.stderr.count("\n")
