"""Tests of the causal order of anomalies: the first cause comes first."""

from __future__ import annotations

import json
import pathlib
import random

from rankscope_contract.model.events import causal_key

RECORDED = json.loads((pathlib.Path(__file__).parent / "data" / "msprobe_anomalies.json").read_text())

KIND_OF_TASK = {
    "param_origin": "param_before",
    "actv": "act_out",
    "actv_grad": "act_grad_out",
    "acc_grad": "grad_unreduced",
    "post_grad": "grad_reduced",
    "param_updated": "param_after",
}

# The first five anomalies in msprobe's own analysis of this file.
FIRST_CAUSES = [
    "0:.input:0/rank0/actv_grad",
    "0:embedding.input:0/rank0/actv_grad",
    "0:.input:1/rank0/actv_grad",
    "0:embedding.input:1/rank0/actv_grad",
    "0:layers.0.ln1.bias/rank0/param_origin",
]


def key(**parts):
    whole = {"step": 1, "micro_step": None, "kind": "act_out", "vpp_stage": 0, "pp_stage": 0, "call_id": 0}
    return causal_key(**{**whole, **parts})


def recorded_key(record):
    return causal_key(
        step=record["step"],
        micro_step=record["micro_step"],
        kind=KIND_OF_TASK[record["tag_name"].rsplit("/", 1)[-1]],
        vpp_stage=record["vpp_stage"],
        pp_stage=record["pp_stage"],
        call_id=None if record["call_id"] < 0 else record["call_id"],
    )


def test_recorded_anomalies_have_the_order_of_msprobe():
    """A deliberate difference: msprobe sorts parameters after the update before the forward pass of the same step."""
    tags = [record["tag_name"] for record in sorted(RECORDED.values(), key=recorded_key)]

    assert FIRST_CAUSES == tags[:5]
    assert all(tag.endswith("/param_updated") for tag in tags[-4:])


def test_causal_stages_follow_the_flow_of_a_step():
    flow = ["param_before", "act_in", "act_grad_in", "grad_unreduced", "comm_in", "comm_out"]
    flow += ["grad_reduced", None, "grad_clipped", "exp_avg", "param_after"]
    shuffled = random.Random(0).sample(flow, len(flow))

    assert flow == sorted(shuffled, key=lambda kind: key(kind=kind))
    assert key(kind="param_after") < key(kind=None, op="val/loss") < key(step=2, kind="param_before")


def test_pipeline_stages_ascend_in_forward_and_descend_in_backward():
    assert key(kind="act_out", pp_stage=0) < key(kind="act_out", pp_stage=1)
    assert key(kind="act_grad_out", pp_stage=1) < key(kind="act_grad_out", pp_stage=0)
    assert key(kind="grad_reduced", vpp_stage=1, pp_stage=0) < key(kind="grad_reduced", vpp_stage=0, pp_stage=1)
    assert key(kind="act_out", vpp_stage=0, pp_stage=1) < key(kind="act_out", vpp_stage=1, pp_stage=0)


def test_step_and_micro_step_come_first_and_unknown_values_last():
    assert key(step=1, kind="param_after") < key(step=2, kind="param_before")
    assert key(micro_step=0, kind="grad_reduced") < key(micro_step=1, kind="act_in")
    assert key(step=10**12) < key(step=None)
    assert key(call_id=10**12) < key(call_id=None)
    assert key(kind=None) == key(kind="attention_entropy")  # of a newer rank


def test_events_of_the_whole_step_enclose_those_of_its_micro_batches():
    """A NaN that occurs first in an activation is in every gradient of the step."""
    parameters, activations, gradients = (key(kind=kind) for kind in ("param_before", "act_in", "grad_unreduced"))

    assert parameters < key(kind="act_in", micro_step=0) < key(kind="act_grad_in", micro_step=0)
    assert key(kind="act_grad_in", micro_step=0) < key(kind="act_in", micro_step=1) < activations < gradients
    assert key(kind="grad_unreduced", micro_step=3) < gradients
