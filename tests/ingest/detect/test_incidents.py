"""One bad cause is one incident: named by what came first, told once, over after a quiet stretch."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope_contract.model.events import causal_key
from rankscope_contract.model.fields import arrow_schema
from rankscope_contract.model.kinds import CAUSAL_STAGE
from rankscope_contract.model.schema import DATASETS
from rankscope_ingest.detect.incidents import ANNOUNCED_PER_HOUR, IncidentTracker
from rankscope_ingest.detect.symptoms import symptoms
from rankscope_ingest.notify.incident import SEVERITIES, Symptom, incident_key, urgency
from rankscope_ingest.notify.text import MUTE_FOLLOWS, message

ATTEMPT = ("r", 0)


def symptom(step=60, *, rank=0, kind="grad_reduced", severity="critical", tensor="w", rule="AnomalyNan", run="r"):
    key = causal_key(step=step, micro_step=None, kind=kind, vpp_stage=None, pp_stage=None, call_id=None)
    return Symptom(
        run=run, attempt=0, rank=rank, step=step, severity=severity, causal=key, rule=rule, kind=kind, tensor=tensor
    )


def book(**changes):
    return IncidentTracker(**({"group_wait_seconds": 1.0, "quiet_steps": 20} | changes))


def live(**steps):
    return {ATTEMPT: {int(rank[1:]): step for rank, step in steps.items()}}


def test_all_anomalies_of_a_step_are_one_incident_named_by_the_first_cause():
    """The gradient of rank 1 is bad before any reduction; all others only show it."""
    incidents = book()
    incidents.observe(symptom(rank=0, kind="grad_reduced"), 0.0)
    incidents.observe(symptom(rank=0, kind="exp_avg"), 0.0)
    incidents.observe(symptom(rank=1, kind="grad_unreduced", tensor="blocks.3"), 0.1)
    settled = incidents.settle(0.1, live(r0=60, r1=60))

    assert [("grad_unreduced", "blocks.3", 1)] == [(i.first.kind, i.first.tensor, i.first.rank) for i in settled]
    assert {0, 1} == settled[0].ranks
    assert [] == incidents.settle(9.0, {})


def test_incident_waits_for_the_slower_ranks_but_no_longer_than_the_group_wait():
    incidents = book()
    incidents.observe(symptom(), 10.0)

    assert [] == incidents.settle(10.9, live(r0=60, r1=59))
    assert [] == incidents.settle(10.9, live(r0=60, r1=None))
    assert 1 == len(incidents.settle(11.0, live(r0=60, r1=59)))


def test_incident_waits_for_ranks_that_are_not_back_yet():
    """After a restart of the service, the rank that came back first is seldom the one that began it."""
    incidents = book()
    incidents.observe(symptom(rank=0), 0.0)
    early = incidents.settle(5.0, live(r0=60, r1=None), {ATTEMPT})
    incidents.observe(symptom(rank=1, kind="grad_unreduced"), 5.1)
    (incident,) = incidents.settle(5.1, live(r0=60, r1=60))

    assert ([], 1) == (early, incident.first.rank)


def test_echoes_join_and_a_quiet_stretch_ends_the_incident():
    incidents = book()
    incidents.observe(symptom(120, severity="warning"), 0.0)
    (incident,) = incidents.settle(1.0, {})
    opened = [incidents.observe(symptom(step, severity="warning"), 2.0) for step in range(121, 160)]

    assert [None] * 39 == opened
    assert (159, 40) == (incident.last_step, incident.events)
    assert [] == incidents.resolve(live(r0=200, r1=179))
    assert [incident] == incidents.resolve(live(r0=200, r1=180))
    assert incidents.observe(symptom(181), 3.0) is not None


def test_causes_far_apart_are_two_incidents_even_when_they_arrive_together():
    """As after an outage of the service, when a backlog is read at once."""
    incidents = book()
    for step in (60, 61, 120, 125):
        incidents.observe(symptom(step), 0.0)

    assert [60, 120] == [incident.first.step for incident in incidents.settle(1.0, {})]


def test_critical_after_an_announced_warning_is_news_once():
    incidents = book()
    incidents.observe(symptom(60, severity="warning", rule="AnomalyTurbulence"), 0.0)
    incidents.settle(1.0, {})
    opened = [incidents.observe(symptom(step), 2.0) is not None for step in (61, 62, 63)]

    assert [True, False, False] == opened


def test_critical_before_the_announcement_is_part_of_it():
    incidents = book()
    incidents.observe(symptom(60, severity="warning", rule="AnomalyTurbulence"), 0.0)
    incidents.observe(symptom(61), 0.0)
    (incident,) = incidents.settle(1.0, {})

    assert ("AnomalyTurbulence", "critical") == (incident.first.rule, incident.severity)


def test_late_rank_at_the_same_step_joins_what_was_announced_and_keeps_its_name():
    incidents = book()
    incidents.observe(symptom(60, severity="warning"), 0.0)
    (incident,) = incidents.settle(1.0, {})
    late = incidents.observe(symptom(60, rank=1, kind="grad_unreduced"), 5.0)

    assert late is None
    assert ("grad_reduced", incident_key(incident.first)) == (incident.first.kind, incident.key)


def test_a_rank_that_could_not_be_read_until_the_incident_was_over_brings_no_news_of_it():
    """As when its records come from a spool, or it was out of reach for minutes."""
    incidents = book()
    incidents.observe(symptom(60, rank=1, kind="grad_unreduced"), 0.0)
    (incident,) = incidents.settle(1.0, {})
    incidents.resolve(live(r1=90))
    after = book()
    after.remember(incident)
    for known in (incidents, after):
        late = [known.observe(symptom(step), 30.0) for step in (58, 60, 80)]
        news = known.observe(symptom(81), 30.0)

        assert [None] * 3 == late
        assert news is not None


def test_what_is_worse_than_an_incident_that_is_over_is_news():
    incidents = book()
    incidents.observe(symptom(60, severity="warning"), 0.0)
    incidents.settle(1.0, {})
    incidents.resolve(live(r1=90))

    assert incidents.observe(symptom(61), 30.0) is not None


def test_restored_incident_takes_up_a_replay():
    """After a restart the records above the watermark come again: they must not be told again."""
    before = book()
    before.observe(symptom(60), 0.0)
    (incident,) = before.settle(1.0, {})
    after = book()
    after.restore(dataclasses.replace(incident, first=dataclasses.replace(incident.first, causal=())))

    assert after.observe(symptom(60, rank=1, kind="grad_unreduced"), 0.0) is None
    assert [] == after.settle(100.0, {})


def test_key_depends_on_the_first_cause_alone():
    assert incident_key(symptom(60)) == incident_key(symptom(60))
    assert 4 == len({incident_key(s) for s in (symptom(60), symptom(61), symptom(60, rank=1), symptom(60, tensor="v"))})


def test_runs_do_not_mix():
    incidents = book()
    incidents.observe(symptom(60, run="a"), 0.0)
    incidents.observe(symptom(60, run="b"), 0.0)

    assert ["a", "b"] == [incident.first.run for incident in incidents.settle(1.0, {})]


def test_flood_is_muted_but_kept_and_the_last_message_says_so():
    incidents = book()
    for number in range(ANNOUNCED_PER_HOUR + 5):
        incidents.observe(symptom(100 * number), 0.0)
    settled = incidents.settle(1.0, {})
    incidents.observe(symptom(100_000), 3700.0)
    (later,) = incidents.settle(3702.0, {})

    assert [False] * ANNOUNCED_PER_HOUR + [True] * 5 == [incident.is_muted for incident in settled]
    assert not later.is_muted
    assert [ANNOUNCED_PER_HOUR - 1] == [n for n, i in enumerate(settled) if MUTE_FOLLOWS in message(i).body]


def test_message_names_run_rank_tensor_kind_and_step():
    incidents = book()
    incidents.observe(symptom(60, rank=1, kind="grad_unreduced", tensor="blocks.3.weight"), 0.0)
    (incident,) = incidents.settle(1.0, {})
    text = message(incident)

    assert "[critical] r: AnomalyNan in grad_unreduced of blocks.3.weight, rank 1, step 60" == text.title
    for line in ("run: r (attempt 0)", "rank: 1", "step: 60", "tensor: blocks.3.weight", f"incident: {incident.key}"):
        assert line in text.body.splitlines()


SMALL = st.none() | st.integers(0, 3)
events = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["anomaly", "anomaly", "anomaly", "note"]),
            "severity": st.sampled_from([*map(str, SEVERITIES), "odd", None]),
            "step": SMALL,
            "micro_step": SMALL,
            "kind": st.none() | st.sampled_from([*map(str, CAUSAL_STAGE), "unheard_of"]),
            "vpp_stage": SMALL,
            "pp_stage": SMALL,
            "call_id": SMALL,
        }
    ),
    max_size=12,
)


@settings(deadline=None)
@given(events)
def test_vectorised_first_cause_is_that_of_the_contract(rows):
    """Ties go to the earlier row."""
    schema = arrow_schema(pa, DATASETS["events"])
    full = [row | {"run": "r", "attempt": 0, "rank": 0, "message": str(n)} for n, row in enumerate(rows)]
    found = symptoms(pa.Table.from_pylist(full, schema=schema))
    anomalies = [row for row in full if row["type"] == "anomaly"]
    fields = ("step", "micro_step", "kind", "vpp_stage", "pp_stage", "call_id")
    expected = {}
    for row in anomalies:
        key = causal_key(**{name: row[name] for name in fields})
        if row["step"] not in expected or key < expected[row["step"]][0]:
            expected[row["step"]] = (key, row["message"])

    assert {step: (key, text) for step, (key, text) in expected.items()} == {
        s.step: (s.causal, s.message) for s in found
    }
    for one in found:
        same = [row for row in anomalies if row["step"] == one.step]
        assert (len(same), max(urgency(row["severity"]) for row in same)) == (one.events, one.urgency)
