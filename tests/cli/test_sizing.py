"""`rankscope sizing`: the figures of a load, the limits of one service, and the mark of an extrapolation."""

import json
import re

import pytest

from rankscope.shell.errors import CommandError
from rankscope.sizing.costs import Costs, Load, Service, lines


def sizes(**load):
    return {line.quantity: line for line in lines(Load(**load))}


def test_the_command_without_options_prints_an_example(rankscope):
    shown, document = rankscope("sizing"), json.loads(rankscope("sizing", "--json").stdout)

    assert "ranks per service" in shown.stdout
    assert 320_000 == document[0]["value"]  # 1,000 ranks x 2,500 x 6 in 50 s, and 10 scalars in 0.5 s
    assert all(line["quantity"] in shown.stdout for line in document)


def test_each_cost_names_the_command_that_measures_it(rankscope):
    costs = json.loads(rankscope("sizing", "--costs", "--json").stdout)

    assert {cost["cost"] for cost in costs} == set(Costs.__slots__)
    assert all(re.search("(python benchmarks/|pytest tests/)[a-z_/.]+py [-a-z_ ]+$", cost["source"]) for cost in costs)


@pytest.mark.parametrize(
    ("load", "marked"),
    [
        ({"ranks": 200}, False),
        ({"ranks": 1_000, "every": 1, "step_seconds": 5.0}, False),
        ({"ranks": 1_000, "every": 1, "step_seconds": 0.1, "cores": 64, "memory_gb": 64}, True),
        ({"ranks": 10_000}, True),
    ],
)
def test_a_load_beyond_the_measured_one_is_an_extrapolation(load, marked):
    found = sizes(**load)
    names = ("cores of a service", "stored", "commits", "requests to S3", "cost of the requests", "services")

    assert {marked} == {"extrapolation" in found[name].formula for name in names}


def test_services_share_a_load_beyond_the_limit_of_one():
    found = sizes(ranks=10_000, every=1)
    most, services = found["ranks per service"].value, found["services"].value

    assert 10_000 / services <= most < 10_000
    assert "limited by" in found["ranks per service"].formula


def test_one_rank_more_than_the_limit_exceeds_a_resource():
    load = Load(ranks=1, every=1)
    most, limit = Service(load=load, costs=Costs()).limit()

    assert Service(load=Load(ranks=most, every=1), costs=Costs()).used[limit] <= 1.0
    assert Service(load=Load(ranks=most + 1, every=1), costs=Costs()).used[limit] > 1.0


def test_retention_keeps_rollups_after_raw_days():
    kept, limited = (sizes(every=1, days=100.0, raw_days=raw_days)["store after 100 days"] for raw_days in (None, 10.0))

    assert limited.value < kept.value / 4


def test_one_service_maintains_the_rows_of_all():
    few, many = (sizes(ranks=ranks, every=10, raw_days=7.0)["cores of a service"] for ranks in (1_000, 10_000))
    kept = sizes(ranks=1_000, every=10)["cores of a service"]

    assert few.value > kept.value + 0.4  # 500,000 rows of tensors per second, 0.993 CPU s per million
    assert many.value > 5 > few.value
    assert "too much for its thread" in many.formula
    assert "too much" not in few.formula


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "--ranks must be above 0"),
        (("--step-seconds", "nan"), "--step-seconds must be above 0"),
        (("--flush-rows", "9000000"), "max_pending_rows"),
        (("--poll-seconds", "-1"), "--poll-seconds"),
        (("--raw-days", "0"), "--raw-days must be above 0"),
        (("--days", "inf"), "--days must be above 0 and finite"),
        (("--write-price", "nan"), "--write-price must be at least 0 and finite"),
    ],
)
def test_a_wrong_option_is_named(rankscope, arguments, message):
    done = rankscope("sizing", *arguments)

    assert 2 == done.returncode
    assert message in done.stderr
    assert 1 == done.stderr.count("\n")


def test_a_rank_that_no_service_can_hold_is_refused():
    with pytest.raises(CommandError, match="one rank exceeds"):
        sizes(tensors=10**9)
