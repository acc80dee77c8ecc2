"""One cause is one incident: named by its first event, announced once, and over after a quiet time."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest import builders
from tests.ingest.builders import rank_of

from rankscope_contract.model.events import RunState, causal_key
from rankscope_contract.model.kinds import CAUSAL_STAGE
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.detect.incidents import MESSAGES_PER_HOUR, MOST_ENDED, IncidentTracker, symptoms
from rankscope_ingest.notify.announcer import incident_message
from rankscope_ingest.runs.incident import SEVERITIES, Symptom, run_incident, urgency
from rankscope_ingest.runs.text import Place
from rankscope_ingest.runs.tracker import RunTracker
from rankscope_storage.base.rule_names import RUN_FAILED, SLOW_RANK

ATTEMPT = ("r", 0)
DONE = RunState.COMPLETED


def symptom(
    step=60, *, rank=0, kind="grad_reduced", severity="critical", tensor="w", rule="AnomalyNan", run="r", attempt=0
):
    place = {"run": run, "attempt": attempt, "rank": rank, "step": step, "kind": kind, "tensor": tensor}
    key = causal_key(step=step, micro_step=None, kind=kind, vpp_stage=None, pp_stage=None, call_id=None)
    return Symptom(severity=severity, causal=key, rule=rule, **place)


def tracker(**changes):
    return IncidentTracker(**({"group_wait_seconds": 1.0, "quiet_steps": 20} | changes))


def live(**steps):
    return {ATTEMPT: {int(rank[1:]): step for rank, step in steps.items()}}


def attempt(number=0, state=RunState.RUNNING, *, every=1, first=None, **steps):
    """Return an attempt whose ranks are at `steps`; they are alive while it is running."""
    vanished = state is not RunState.RUNNING
    ranks = [rank_of(int(name[1:]), last_step=step, is_vanished=vanished) for name, step in steps.items()]
    last = max(filter(None, steps.values()), default=None)
    fields = {"first_step": first, "last_step": last, "config": {"every": every}}
    return builders.attempt(ranks, number=number, launch_id="", world_size=1, state=state, **fields)


def runs_with(*attempts):
    runs = RunTracker(RunsSection())
    for one in attempts:
        runs.restore(one)
    return runs


def at(**steps):
    return runs_with(attempt(**steps))


def opened(*symptoms):
    incidents = tracker()
    for one in symptoms:
        incidents.observe(one, 0.0)
    incidents.settle(1.0, {})
    return incidents


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.FAILED])
def test_slow_rank_is_no_longer_open_at_the_end_of_the_run(state):
    slow = symptom(150, rule=SLOW_RANK)

    assert [] == opened(slow).resolve(at(r0=150, r1=150))
    assert [slow] == [one.first for one in opened(slow).resolve(runs_with(attempt(state=state, r0=150, r1=150)))]


def test_rank_that_is_slow_now_and_then_has_one_incident():
    """The rank is held as slow between, also in another phase. One poll brings more than `quiet_steps` steps."""
    incidents, running = opened(symptom(63, rank=1, rule=SLOW_RANK, tensor=None)), at(r0=150, r1=150)

    assert [] == incidents.resolve(running, {(ATTEMPT, 1)})
    assert None is incidents.observe(dataclasses.replace(symptom(150, rank=1, rule=SLOW_RANK, tensor="x"), events=0), 0)
    (slow,) = incidents.resolve(at(r0=171, r1=171), {(ATTEMPT, 0)})
    assert (63, 150, 1) == (slow.first.step, slow.last_step, slow.events)


NAN_TO_THE_END = (symptom(60), *(symptom(step) for step in range(61, 161)))


@pytest.mark.parametrize(
    ("symptoms", "run", "is_resolved"),
    [
        pytest.param(NAN_TO_THE_END, attempt(state=RunState.COMPLETED, r0=160), False, id="to the end"),
        pytest.param(NAN_TO_THE_END, attempt(state=RunState.FAILED, r0=160, r1=None), False, id="to the crash"),
        pytest.param(NAN_TO_THE_END[:90], attempt(state=DONE, r0=160), True, id="11 steps before the end"),
        pytest.param(NAN_TO_THE_END, attempt(state=DONE, r0=160, r1=170), False, id="one rank trained on"),
        pytest.param([symptom(150)], attempt(state=DONE, every=10, r0=159), False, id="in the last sample"),
        pytest.param([symptom(140)], attempt(state=RunState.COMPLETED, every=10, r0=159), True, id="a sample follows"),
        pytest.param([symptom(None)], attempt(state=RunState.COMPLETED, r0=160), False, id="without a step"),
    ],
)
def test_incident_whose_cause_lasted_to_the_end_of_the_run_remains_open(symptoms, run, is_resolved):
    incidents = opened(*symptoms)

    assert is_resolved == bool(incidents.resolve(runs_with(run)))
    assert not incidents.resolve(runs_with(run))


@pytest.mark.parametrize(
    ("later", "again", "is_resolved"),
    [
        pytest.param(attempt(1, first=30, r0=60, r1=80), [], False, id="one rank is at its step"),
        pytest.param(attempt(1, first=30, r0=61, r1=61), [], True, id="it has passed the step"),
        pytest.param(attempt(1, first=30, r0=70), [symptom(60, attempt=1)], False, id="with the same cause"),
        pytest.param(attempt(1, first=30, r0=70), [symptom(60, attempt=1, tensor="v")], True, id="with another cause"),
        pytest.param(attempt(1, first=101, every=10, r0=105), [], False, id="no sample since its start"),
        pytest.param(attempt(1, state=RunState.FAILED, r0=50), [], False, id="it failed before the step"),
        pytest.param(attempt(1, state=RunState.COMPLETED, r0=160), [], True, id="it has completed"),
    ],
)
def test_later_attempt_that_passes_the_step_resolves_an_incident(later, again, is_resolved):
    incidents = opened(*NAN_TO_THE_END, *again)
    runs = runs_with(attempt(state=RunState.FAILED, r0=160), later)

    assert is_resolved == any(one.first.attempt == 0 for one in incidents.resolve(runs))


@pytest.mark.parametrize(
    ("later", "is_resolved"),
    [
        pytest.param(attempt(1, r0=60), False, id="at the step"),
        pytest.param(attempt(1, first=50, r0=61), True, id="past the step"),
        pytest.param(attempt(1, state=RunState.FAILED, r0=40), False, id="failed earlier"),
        pytest.param(attempt(1, state=RunState.COMPLETED, r0=40), True, id="completed with fewer steps"),
    ],
)
def test_failure_is_open_until_a_later_attempt_passes_its_step_or_completes(later, is_resolved):
    failed = attempt(state=RunState.FAILED, r0=60)
    incidents = tracker()
    incidents.restore(run_incident(RUN_FAILED, failed, rank=0, reason="disk full", cause="", opened_at=0.0))

    assert [] == incidents.resolve(runs_with(failed))
    assert is_resolved == bool(incidents.resolve(runs_with(failed, later)))


def test_failure_of_a_later_attempt_replaces_that_of_an_earlier_one():
    """Also at the same step, and also if the earlier one is known from the store only."""
    first, second = attempt(state=RunState.FAILED, r0=60), attempt(1, state=RunState.FAILED, r0=60)
    incidents = tracker()
    for failed in (first, second):
        incidents.restore(run_incident(RUN_FAILED, failed, rank=0, reason="disk full", cause="", opened_at=0.0))

    assert [0] == [one.first.attempt for one in incidents.resolve(runs_with(first, second))]
    assert [1] == [one.first.attempt for one in incidents.open()]


@pytest.mark.parametrize(("diverged", "count"), [({ATTEMPT}, 0), ((), 1)])
@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.COMPLETED])
def test_replica_divergence_is_open_until_the_replicas_are_equal(diverged, count, state):
    incidents = opened(symptom(60, rule="ReplicaDesync"))

    assert count == len(incidents.resolve(runs_with(attempt(state=state, r0=160)), diverged))


def test_memory_of_open_incidents_of_ended_runs_is_bounded():
    incidents = tracker()
    for number in range(MOST_ENDED + 20):
        incidents.observe(symptom(60, run=f"r{number}"), float(number))
    incidents.settle(1000.0, {})

    assert [] == incidents.resolve(runs_with())
    assert MOST_ENDED == len(incidents.open())
    assert "r20" == incidents.open()[0].first.run


def test_anomalies_of_a_step_are_one_incident_named_by_the_first_cause():
    """The gradient of rank 1 is bad before the reduction; the other events are consequences."""
    incidents = tracker()
    incidents.observe(symptom(rank=0, kind="grad_reduced"), 0.0)
    incidents.observe(symptom(rank=0, kind="exp_avg"), 0.0)
    incidents.observe(symptom(rank=1, kind="grad_unreduced", tensor="blocks.3"), 0.1)
    incidents.observe(symptom(rank=1, kind="exp_avg", severity="warning"), 0.1)
    settled = incidents.settle(0.1, live(r0=60, r1=60))

    assert [("grad_unreduced", "blocks.3", 1)] == [(i.first.kind, i.first.tensor, i.first.rank) for i in settled]
    assert ({0, 1}, "critical") == (settled[0].ranks, settled[0].severity)
    assert [] == incidents.settle(9.0, {})


def test_incident_waits_for_slower_ranks_up_to_the_group_wait():
    """After a restart of the service, the first rank to answer is rarely the cause."""
    incidents, restarted = tracker(), tracker()
    incidents.observe(symptom(), 10.0)
    restarted.observe(symptom(rank=0), 0.0)
    early = restarted.settle(5.0, live(r0=60, r1=None), {ATTEMPT})
    restarted.observe(symptom(rank=1, kind="grad_unreduced"), 5.1)

    assert [] == incidents.settle(10.9, live(r0=60, r1=59))
    assert [] == incidents.settle(10.9, live(r0=60, r1=None))
    assert 1 == len(incidents.settle(11.0, live(r0=60, r1=59)))
    assert ([], [1]) == (early, [one.first.rank for one in restarted.settle(5.1, live(r0=60, r1=60))])


def test_later_steps_join_and_a_quiet_time_resolves_the_incident():
    incidents = tracker()
    incidents.observe(symptom(120, severity="warning"), 0.0)
    (incident,) = incidents.settle(1.0, {})
    opened = [incidents.observe(symptom(step, severity="warning"), 2.0) for step in range(121, 160)]

    assert [None] * 39 == opened
    assert (159, 40) == (incident.last_step, incident.events)
    assert [] == incidents.resolve(at(r0=200, r1=179))
    assert [incident] == incidents.resolve(at(r0=200, r1=180))
    assert incidents.observe(symptom(181), 3.0) is not None


@pytest.mark.parametrize(
    ("rule", "step", "is_past"),
    [
        *(("ReplicaDesync", 196, True), ("AnomalyNan", 215, False), ("ReplicaDesync", 216, False)),
        *(("AnomalyNan", 216, True), ("ReplicaDesync", 217, True), ("AnomalyNan", 236, False)),
    ],
)
def test_late_critical_event_is_not_absorbed_by_a_settled_warning(rule, step, is_past):
    incidents = opened(symptom(216, severity="warning", rule="AnomalyTurbulence", tensor="v"))
    if is_past:
        incidents.resolve(at(r0=300))

    assert incidents.observe(symptom(step, rule=rule), 2.0) is not None
    assert [(rule, step)] == [(i.first.rule, i.first.step) for i in incidents.settle(3.5, {})]


def spike(step, tensor="w", *, value=100.0, **changes):
    """Return a warning about a norm whose baseline is 1, so that the largest allowed value is 26."""
    made = symptom(step, severity="warning", rule="AnomalyTurbulence", tensor=tensor, **changes)
    return dataclasses.replace(made, op="norm", value=value, baseline=1.0, threshold=25.0)


@pytest.mark.parametrize(
    ("symptoms", "expected"),
    [
        pytest.param([symptom(step) for step in (60, 61, 120, 125)], [(60, 2), (120, 2)], id="distant steps"),
        pytest.param([spike(60), spike(65, "v"), spike(70)], [(60, 2), (65, 1)], id="different tensors"),
        pytest.param([symptom(60, run="a"), symptom(60, run="b")], [(60, 1), (60, 1)], id="runs"),
        pytest.param(
            [symptom(201, severity="warning", rule="AnomalyTurbulence"), symptom(201, rule="ReplicaDesync")],
            [(201, 1), (201, 1)],
            id="divergence of replicas",
        ),
    ],
)
def test_separate_causes_that_arrive_together_are_separate_incidents(symptoms, expected):
    """This happens after an outage of the service, when a backlog is read."""
    incidents = tracker()
    for one in symptoms:
        incidents.observe(one, 0.0)

    assert expected == [(one.first.step, one.events) for one in incidents.settle(1.0, {})]


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(spike(65, "v"), id="another tensor"),
        pytest.param(spike(64, "v"), id="another tensor after three steps"),
        pytest.param(spike(56, "v"), id="another tensor at an earlier step"),
        pytest.param(spike(65, value=1300.0), id="a larger spike of the same tensor"),
        pytest.param(dataclasses.replace(spike(61), rule="Other"), id="another rule"),
        pytest.param(dataclasses.replace(spike(61, "v"), severity="critical"), id="a higher severity"),
    ],
)
def test_false_alarm_does_not_hide_later_anomalies(later):
    incidents = opened(spike(60, value=27.0))
    incidents.observe(later, 2.0)

    assert [later] == [incident.first for incident in incidents.unsettled()]


def nans(step, tensor, value=9.0, **changes):
    return dataclasses.replace(symptom(step, tensor=tensor, **changes), op="nans", value=value)


def growing(number):
    subjects = frozenset(("AnomalyTurbulence", f"t{n}") for n in range(number))
    return dataclasses.replace(spike(60 + number, value=27.0 * 2**number), further_subjects=subjects)


TEMPERATURE = dataclasses.replace(symptom(None, tensor=None), op="temperature")
LATER = {
    "warning, then critical steps": (spike(60), False, [symptom(step) for step in (61, 62, 63)], [True, False, False]),
    "growing divergence": (spike(60, value=27.0), False, [growing(n) for n in range(1, 20)], [False] * 19),
    "NaN that spreads": (
        *(nans(60, "w", 1.0, rank=1), False),
        *([*(nans(step, f"t{step}") for step in range(61, 90)), nans(100, "u")], [False] * 29 + [True]),
    ),
    "late rank with its first cause": (*(symptom(60), False, [symptom(60, rank=1, kind="grad_unreduced")], [False]),),
    "fault that moves over the tensors": (
        *(spike(60), False, [spike(60 + 3 * n, f"t{n}", rank=n % 2) for n in range(1, 40)], [False] * 39),
    ),
    "other rules at the step": (
        *(spike(60, rank=1), False),
        *([dataclasses.replace(spike(60 + n), rule="Other") for n in range(2)], [False, False]),
    ),
    "anomaly without a step": (TEMPERATURE, False, [symptom(60)], [True]),
    "late rank of a past one": (
        *(symptom(60, rank=1, kind="grad_unreduced"), True),
        *([symptom(step) for step in (58, 60, 80, 81)], [False, False, False, True]),
    ),
    "higher severity than a past one": (symptom(60, severity="warning"), True, [symptom(61)], [True]),
}


@pytest.mark.parametrize("name", LATER)
def test_later_anomaly_joins_an_announced_incident_or_opens_another(name):
    first, is_past, later, opens = LATER[name]
    incidents = opened(first)
    if is_past:
        incidents.resolve(at(r1=90))

    assert opens == [incidents.observe(one, 2.0) is not None for one in later]


def test_pause_of_an_incident_is_counted_in_sampled_steps():
    incidents = tracker()
    later = ((60, "a"), (90, "b"), (130, "c"))

    assert [True, False, True] == [incidents.observe(spike(*one), 0.0, stride=10) is not None for one in later]


def test_hardware_of_each_rank_and_each_slow_rank_has_its_own_incident():
    incidents = tracker()
    found = [
        incidents.observe(symptom(step, rank=rank, rule=rule, kind=None, tensor=None), 0.0) is not None
        for rule, step in ((SLOW_RANK, 60), ("GpuXid", None))
        for rank in (0, 1, 0)
    ]

    assert [True, True, False] * 2 == found


@pytest.mark.parametrize("order", [((0, 40), (0, 50), (1, 40), (1, 50)), ((1, 50), (0, 40), (0, 50), (1, 40))])
def test_critical_step_has_its_own_incident_also_if_records_arrive_together(order):
    """The spools of an ended run, or the steps of a fast training between two polls."""
    incidents = tracker()
    for rank, step in order:
        severity, rule = ("warning", "LossSpike") if step == 40 else ("critical", "AnomalyNan")
        incidents.observe(symptom(step, rank=rank, severity=severity, rule=rule), 0.0)
    found = sorted((one.first.step, one.severity, one.ranks) for one in incidents.settle(1.0, {}))

    assert [(40, "warning", {0, 1}), (50, "critical", {0, 1})] == found


def test_restored_incident_absorbs_replayed_records():
    """After a restart, the records above the watermark are polled again. They must not be announced again."""
    (incident,) = opened(symptom(60, rank=1, kind="grad_unreduced")).open()
    open_one, past_one = tracker(), tracker()
    open_one.restore(dataclasses.replace(incident, first=dataclasses.replace(incident.first, causal=())))
    past_one.remember(incident)

    assert open_one.observe(symptom(60), 0.0) is None
    assert [] == open_one.settle(100.0, {})
    assert [False, True] == [past_one.observe(symptom(step), 30.0) is not None for step in (80, 81)]


def test_incidents_above_the_limit_of_an_hour_are_listed():
    """Warnings do not delay critical incidents."""
    incidents = tracker()
    for number in range(MESSAGES_PER_HOUR + 5):
        incidents.observe(symptom(100 * number, severity="warning"), 0.0)
    settled = incidents.settle(1.0, {})
    incidents.observe(symptom(100_000), 2.0)
    settled += incidents.settle(3.0, {})
    incidents.observe(symptom(200_000, severity="warning"), 3700.0)
    settled += incidents.settle(3702.0, {})

    assert [*[False] * MESSAGES_PER_HOUR, *[True] * 5, False, False] == [one.is_listed for one in settled]


def test_message_contains_run_rank_tensor_kind_and_step_and_the_page():
    (incident,) = opened(symptom(60, run="a b/c", rank=1, kind="grad_unreduced", tensor="blocks.3.weight")).open()
    text = incident_message(incident, place=Place(store="/data/my store", url="http://h:9470/x"))

    assert "[critical] a b/c: AnomalyNan in grad_unreduced of blocks.3.weight, rank 1, step 60" == text.title
    for line in (
        *("run: a b/c (attempt 0)", "rank: 1", "step: 60", "tensor: blocks.3.weight", f"incident: {incident.key}"),
        "details: rankscope anomalies 'a b/c' --store '/data/my store'",
        f"page: http://h:9470/x/runs/a%20b%2Fc/incidents/{incident.key}",
    ):
        assert line in text.body.splitlines()


SLOW = {"rule": "SlowSteps", "op": "tokens_per_second", "value": 2301.0, "baseline": 7000.0}
SLOW_WAIT = {
    "rule": "SlowRank",
    "op": "data_wait",
    "value": 0.2,
    "message": "rank 1 is slow in data wait: … 0.2 s a step",
}


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ({"op": "loss", "value": 9.7, "baseline": 1.2}, "loss 9.7, 8.1 times its average"),
        (SLOW, "tokens per second 2,301, 0.33 times its median"),
        ({"op": "nans", "value": 64.0}, "64 elements are NaN"),
        ({"op": "loss", "value": float("nan")}, "loss became NaN"),
        ({"op": "norm", "value": 2e6, "threshold": 1e4}, "norm 2e+06"),
        (SLOW_WAIT, "is slow in data wait: … 0.2 s a step"),
        ({"rule": "RunFailed", "message": "rank 1: OSError: disk full"}, "OSError: disk full"),
    ],
)
def test_title_of_a_message_names_the_wrong_values(columns, wrong):
    (incident,) = opened(dataclasses.replace(symptom(60, rank=1), **columns)).open()

    assert f", rank 1, step 60: {wrong}" in incident_message(incident).title


def rule_fired(rule, *, step=216, micro_step=None, **columns):
    place = {"run": "r", "attempt": 0, "rank": 0, "step": step, "micro_step": micro_step}
    return {"type": "anomaly", "severity": "warning", "rule": rule, **place, **columns}


SPIKE = {"op": "loss", "value": 108.9, "baseline": 0.25}
GRADIENT = {"kind": "grad_unreduced", "tensor": "5.bias", "op": "norm", "value": 80.0, "baseline": 1.0}
ACTIVATION = {"kind": "act_out", "tensor": "3", "op": "norm", "value": 80.0, "baseline": 1.0}


NANS = {**GRADIENT, "op": "nans"}
LOSS_NAN = {"op": "loss", "value": float("nan")}
OF_NANS = "AnomalyNan in {} of 5.bias, rank 0, step 216: 80 elements are NaN"
FIRINGS = {  # Rows of the same cause by the title of their message
    "LossSpike in loss, rank 0, step 216: loss 109, 436 times its median": [
        *(rule_fired("AnomalyTurbulence", **GRADIENT, micro_step=0), rule_fired("LossSpike", **SPIKE)),
    ],
    "AnomalyTurbulence in act_out of 3, rank 0, step 216: norm 80, 80 times its average": [
        *(rule_fired("LossSpike", **SPIKE), rule_fired("AnomalyTurbulence", **ACTIVATION, micro_step=0)),
    ],
    OF_NANS.format("grad_unreduced"): [
        *(rule_fired("AnomalyNan", **NANS), rule_fired("LossNan", **LOSS_NAN, step=217)),
    ],
    OF_NANS.format("grad_reduced"): [
        rule_fired("AnomalyNan", **LOSS_NAN | {"op": "grad_norm"}),
        rule_fired("AnomalyNan", **NANS | {"kind": "grad_reduced"}),
    ],
    "AnomalyNan in loss, rank 0, step 216: loss became NaN": [
        *(rule_fired("AnomalyNan", **NANS, micro_step=0), rule_fired("AnomalyNan", **LOSS_NAN)),
    ],
}


@pytest.mark.parametrize("title", FIRINGS)
def test_first_cause_of_gradients_and_a_spike_of_the_loss_is_the_loss(title):
    """The forward pass computes the loss before the gradients of the step."""
    incidents = tracker()
    for one in symptoms(row | {"message": ""} for row in FIRINGS[title]):
        incidents.observe(one, 0.0)

    assert f"[warning] r: {title}" in [incident_message(one).title for one in incidents.open()]


SMALL = st.none() | st.integers(0, 3)
events = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["anomaly", "anomaly", "anomaly", "note"]),
            "severity": st.sampled_from([*map(str, SEVERITIES), "odd", None]),
            "step": SMALL,
            "micro_step": SMALL,
            "kind": st.none() | st.sampled_from([*map(str, CAUSAL_STAGE), "unknown_kind"]),
            "vpp_stage": SMALL,
            "pp_stage": SMALL,
            "call_id": SMALL,
            "op": st.sampled_from(["loss", "eval_loss", "norm", None]),
            "value": st.sampled_from([1.0, float("nan"), None]),
        }
    ),
    max_size=12,
)


@settings(deadline=None)
@given(events)
def test_first_cause_is_that_of_the_contract(rows):
    """The first of equal causes is the earlier row."""
    full = [row | {"run": "r", "attempt": 0, "rank": 0, "message": str(n)} for n, row in enumerate(rows)]
    found = symptoms(full)
    anomalies = [row for row in full if row["type"] == "anomaly"]
    fields = ("step", "micro_step", "kind", "vpp_stage", "pp_stage", "call_id", "op")
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
