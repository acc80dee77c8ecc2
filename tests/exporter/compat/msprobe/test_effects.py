"""Tests of the effect of each key of msprobe's configuration on the training of a small model.

Steps are those of Rankscope, from 1; msprobe's step s is step s + 1.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.exporter.compat.msprobe.monitored_runs import Net, Run, batch, model

from rankscope_contract.msprobe.csv_layout import parse_folder
from rankscope_exporter.compat.msprobe.config_translation import KEYS
from rankscope_exporter.statistics.selection import ALL_OPS

GRADIENTS = {"grad_unreduced", "grad_reduced"}
ACTIVATIONS = {"act_in", "act_out", "act_grad_in", "act_grad_out"}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_test_in_this_module(key):
    assert [name for name in globals() if name.startswith(f"test_{key}_")]


# Quantities.


def test_wg_distribution_measures_gradients(trained):
    run = trained(wg_distribution=True)

    assert GRADIENTS == run.kinds()
    assert 12 == len(run.names("grad_reduced"))
    assert [1, 2] == run.steps("grad_reduced")


def test_param_distribution_measures_parameters_before_and_after(trained):
    assert {"param_before", "param_after"} == trained(param_distribution=True).kinds()


def test_mv_distribution_measures_adams_moments(trained):
    assert {"exp_avg", "exp_avg_sq"} == trained(mv_distribution=True).kinds()


def test_ur_distribution_counts_update_and_ratio(trained):
    rows = trained(ur_distribution=True, format="tensorboard").dataset("histograms")

    assert {"adam_update", "adam_ratio"} == {row["kind"] for row in rows}
    assert {30} == {len(row["counts"]) for row in rows}


def test_ur_distribution_writes_histograms_to_event_files(trained, output):
    trained(ur_distribution=True, format="tensorboard")
    accumulator = EventAccumulator(str(output / "rank0" / "adam_update"), size_guidance={"histograms": 0})
    accumulator.Reload()

    assert [0, 1] == [found.step for found in accumulator.Histograms("0:head.weight/rank0/adam_update")]


def test_mg_direction_measures_agreement_of_gradient_and_moment(trained):
    run = trained(mg_direction=True)

    assert ("direction_agreement", "head.weight") in run.features()


def test_monitor_mbs_grad_measures_each_micro_batch(trained):
    run = trained({"micro_batches": 2}, wg_distribution=True, monitor_mbs_grad=True)
    alone = trained({"micro_batches": 2}, wg_distribution=True)
    micro = [row.entry.micro_step for row in run.rows if row.entry.tensor == "head.bias" and row.step == 1]

    assert {None, 0, 1} == set(micro)
    assert {None} == {row.entry.micro_step for row in alone.rows}


def test_monitor_mbs_grad_alone_is_reported_as_ineffective(trained):
    run = trained(monitor_mbs_grad=True, param_distribution=True)

    assert ["monitor_mbs_grad has no effect without wg_distribution"] == run.said()
    assert not GRADIENTS & run.kinds()


def test_xy_distribution_measures_all_modules_without_targets(trained):
    run = trained(xy_distribution=True)

    assert ACTIVATIONS == run.kinds()
    assert {"", "layers.0", "layers.0.core", "layers.1.second", "gate", "head"} <= run.names("act_in")
    assert set() == trained(xy_distribution=False, wg_distribution=True).kinds() & ACTIVATIONS


def test_forward_only_omits_gradients(trained):
    assert {"act_in", "act_out"} == trained(xy_distribution=True, forward_only=True).kinds()


def test_backward_only_omits_activations(trained):
    assert {"act_grad_in", "act_grad_out"} == trained(xy_distribution=True, backward_only=True).kinds()


def test_backward_only_with_forward_only_measures_nothing(trained):
    run = trained(xy_distribution=True, forward_only=True, backward_only=True)

    assert set() == run.kinds()
    assert 1 == len([said for said in run.said() if "forward_only and backward_only exclude each other" in said])


def test_all_xy_measures_the_modules_without_a_target(trained):
    targets = {"layers.0": {"output": "tuple[2]:1"}}
    some = trained(xy_distribution=True, targets=targets)
    every = trained(xy_distribution=True, targets=targets, all_xy=True)

    assert {("layers.0", 1)} == some.slots("act_out")
    assert {("layers.0", 1), ("layers.1", 0), ("layers.1", 1), ("head", None)} <= every.slots("act_out")
    assert ("layers.0", 0) not in every.slots("act_out")


# Targets.


def test_targets_select_parameters_by_module(trained):
    run = trained(wg_distribution=True, targets={"0:module.layers.1": {}, "head.bias": {}})

    assert {"layers.1.first.weight", "layers.1.first.bias", "layers.1.second.weight", "layers.1.second.bias",
            "head.bias"} == run.names("grad_reduced")  # fmt: skip


def test_targets_select_tensors_in_a_modules_objects(trained):
    spec = {"input": "tensor", "output": "tuple[2]:0", "input_grad": "tensor", "output_grad": "tuple[2]:1"}
    run = trained(xy_distribution=True, targets={"layers.1": spec})

    assert {"layers.1"} == run.names(*ACTIVATIONS)
    assert {("layers.1", None)} == run.slots("act_in") == run.slots("act_grad_in")
    assert {("layers.1", 0)} == run.slots("act_out")
    assert {("layers.1", 1)} == run.slots("act_grad_out")


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ({"input": "tensor"}, {"act_in"}),
        ({"output": "tuple[2]:0"}, {"act_out"}),
        ({"input_grad": "tensor"}, {"act_grad_in"}),
        ({"output_grad": "tuple[2]:0"}, {"act_grad_out"}),
        ({}, ACTIVATIONS),
    ],
)
def test_targets_measure_only_the_named_objects(trained, spec, kinds):
    assert kinds == trained(xy_distribution=True, targets={"layers.1": spec}).kinds()


def test_target_without_a_match_names_the_nearest(trained):
    said = trained(wg_distribution=True, xy_distribution=True, targets={"layers.7": {}}).said()

    assert any("layers.7" in sentence and "layers.1" in sentence for sentence in said)


def test_module_ranks_excludes_other_ranks(trained, monkeypatch):
    assert [1, 2] == trained(wg_distribution=True, module_ranks=[0]).steps()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")

    assert [] == trained(wg_distribution=True, xy_distribution=True, module_ranks=[0]).steps()
    assert [1, 2] == trained(wg_distribution=True, module_ranks=[]).steps()


# Schedule.


def test_start_step_is_the_first_step_counted_from_0(trained):
    assert [3, 4] == trained({"steps": 4}, wg_distribution=True, xy_distribution=True, start_step=2).steps()


def test_step_interval_measures_every_nth_step_from_start_step_on(trained):
    assert [2, 5] == trained({"steps": 6}, wg_distribution=True, start_step=1, step_interval=3).steps()


def test_collect_times_limits_the_number_of_measured_steps(trained):
    assert [2, 3] == trained({"steps": 5}, wg_distribution=True, start_step=1, collect_times=2).steps()
    assert [] == trained(wg_distribution=True, collect_times=0).steps()
    assert [] == trained(stack_info=True, collect_times=0).dataset("modules")
    assert [1, 2] == trained(wg_distribution=True, collect_times=100_000_000).steps()


def test_dynamic_on_has_no_effect_without_the_variable(trained):
    assert [1, 2] == trained(wg_distribution=True, dynamic_on=False).steps()


# Features and structure.


def test_recording_l2_features_is_required_by_l2_targets(trained):
    on = trained(recording_l2_features=True, l2_targets={"linear_hook": ["head"]})
    off = trained(l2_targets={"linear_hook": ["head"]}, wg_distribution=True)

    assert {("spectral_norm", "head"), ("stable_rank", "head")} == on.features()
    assert set() == off.features()
    assert ["l2_targets has no effect without recording_l2_features"] == off.said()


def test_l2_targets_select_attention_linear_and_router_modules(trained):
    run = trained(
        recording_l2_features=True,
        l2_targets={
            "attention_hook": ["0:layers.1.core"],
            "linear_hook": ["0:layers.0.first", "head"],
            "moe_router_weight_hook": ["gate"],
            "moe_router_logit_hook": ["gate"],
        },
    )

    assert {
        ("attention_entropy", "layers.1.core"),
        ("softmax_max", "layers.1.core"),
        ("spectral_norm", "layers.0.first"),
        ("stable_rank", "layers.0.first"),
        ("spectral_norm", "head"),
        ("stable_rank", "head"),
        ("router_entropy", "gate"),
        ("router_load", "gate"),
        ("router_similarity", "gate"),
    } == run.features()


def test_empty_l2_targets_mean_all_linear_layers_and_no_attention(trained):
    run = trained(recording_l2_features=True, l2_targets={"attention_hook": [], "linear_hook": []})

    assert {"spectral_norm", "stable_rank"} == {kind for kind, _ in run.features()}
    assert {"gate", "head", "layers.0.first", "layers.0.second", "layers.1.first", "layers.1.second"} == {
        module for _, module in run.features()
    }
    assert [] == run.said()


def causal_entropy(length: int, scores: torch.Tensor) -> float:
    hidden = torch.ones(length, length).triu(1).bool()
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return float(-(weights * weights.clamp_min(1e-38).log()).sum(-1).mean())


@pytest.mark.parametrize(("order", "equation"), [("s,b,h,d", "sbhd,tbhd->bhst"), ("b,s,h,d", "bshd,bthd->bhst")])
def test_sa_order_gives_the_layout_of_query_and_key(trained, order, equation):
    run = trained(recording_l2_features=True, l2_targets={"attention_hook": ["layers.0.core"]}, sa_order=order)
    heads = batch(1).view(5, 3, 2, 2)
    scores = torch.einsum(equation, heads, heads) / math.sqrt(2)
    expected = [causal_entropy(scores.shape[-1], scores[:, head]) for head in range(2)]
    found = {
        row["index"]: row["value"]
        for record in run.records
        if record.step == 1
        for row in record.features
        if row["kind"] == "attention_entropy"
    }

    assert expected == pytest.approx([found[0], found[1]], rel=1e-5)


def test_stack_info_stores_the_call_stacks_of_modules(trained):
    rows = {row["module"]: row for row in trained(stack_info=True).dataset("modules")}

    assert {"", "layers.0.core", "head"} <= set(rows)
    assert "monitored_runs.py" in rows["head"]["stack"]


def test_print_struct_writes_the_structure_and_training_continues(trained, output):
    run = trained({"steps": 3}, print_struct=True)
    document = json.loads((output / "module_struct/rank0/module_struct.json").read_text())

    assert {"config": "tuple[2]", "0": "size=(5, 3, 4), dtype=torch.float32",
            "1": "size=(5, 3, 6), dtype=torch.float32"} == document["0:layers.0"]["output"]  # fmt: skip
    assert {1, 2, 3} <= {record.step for record in run.records}
    assert ["print_struct: training continues after the structure is printed"] == run.said()


def test_cc_distribution_hooks_collectives_at_measured_steps(trained):
    """The effect of each of its keys on two ranks is tested in test_ranks.py."""
    original, listened = dist.all_reduce, []
    document = {"cc_distribution": {"enable": True}, "wg_distribution": True, "collect_times": 1}
    during = {"during": lambda *_: listened.append(dist.all_reduce is not original)}
    (sentence,) = trained(during, **document).said()
    off = trained(during, **{**document, "cc_distribution": {"enable": False, "cc_pre_hook": True}})

    assert [True, False, False, False] == listened
    assert "collectives: no call of the script was seen in a sampled step" in sentence
    assert [] == off.said()
    assert dist.all_reduce is original


# Alerts.


def spoiled(step: int) -> torch.Tensor:
    """Return a batch whose gradients are 1,000 times as large in step 3 and NaN in step 4."""
    return batch() * (1000.0 if step == 3 else math.nan if step == 4 else 1.0)


def test_alert_rules_fire_as_in_msprobe(trained):
    how = {"steps": 4, "inputs": spoiled, "net": torch.nn.Linear(4, 2)}
    rules = [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}, {"rule_name": "AnomalyNan"}]
    run = trained(how, wg_distribution=True, ops=["norm"], alert={"rules": rules})
    found = set(run.anomalies())

    assert {(3, "AnomalyTurbulence", "norm"), (4, "AnomalyNan", "nans")} <= found
    assert {3, 4} == {step for step, _, _ in found}


def test_alert_without_rules_fires_nothing(trained):
    how = {"steps": 4, "inputs": spoiled, "net": torch.nn.Linear(4, 2)}

    assert [] == trained(how, wg_distribution=True).anomalies()


def test_anomaly_nan_fires_for_inf_only_above_its_threshold(trained):
    net = torch.nn.Linear(4, 2)
    torch.nn.init.ones_(net.weight)  # all products have one sign, so infinities do not add up to NaN
    how = {"net": net, "inputs": lambda step: torch.ones(5, 3, 4) * (1e25 if step == 2 else 1.0)}
    args = {"threshold": 1e10}
    plain = trained(how, wg_distribution=True, alert={"rules": [{"rule_name": "AnomalyNan"}]}, ops=["infs"])
    torch.nn.init.ones_(net.weight)
    limited = trained(how, wg_distribution=True, alert={"rules": [{"rule_name": "AnomalyNan", "args": args}]})

    assert any(row.numbers["infs"] for row in plain.rows)
    assert [] == [found for found in plain.anomalies() if found[2] == "infs"]
    assert {2} == {step for step, _, _ in limited.anomalies()}


def test_alert_dump_writes_anomaly_json(trained, output):
    how = {"steps": 4, "inputs": spoiled, "net": torch.nn.Linear(4, 2)}
    trained(how, wg_distribution=True, alert={"rules": [{"rule_name": "AnomalyNan"}], "dump": True})
    document = json.loads((output / "anomaly_detected/rank0/anomaly.json").read_text())

    assert {3} == {entry["step"] for entry in document.values()}
    assert {"0:weight/rank0/acc_grad", "0:weight/rank0/post_grad"} <= {e["tag_name"] for e in document.values()}


def test_alert_without_dump_writes_nothing(trained, output):
    how = {"steps": 4, "inputs": spoiled, "net": torch.nn.Linear(4, 2)}
    trained(how, wg_distribution=True, alert={"rules": [{"rule_name": "AnomalyNan"}], "dump": False})

    assert not output.exists()


# Published statistics and output formats.


def published(run: Run) -> set[str]:
    """Return the names of all published statistics."""
    return {op for row in run.rows for op in ALL_OPS if row.numbers.get(op) is not None}


def test_ops_select_the_published_statistics(trained):
    run = trained(wg_distribution=True, ops=["norm", "nans", "shape", "dtype"])

    assert {"norm", "nans", "numel"} == published(run)


@pytest.mark.parametrize("document", [{}, {"ops": []}, {"ops": ["median"]}])
def test_ops_without_a_valid_name_are_norm(trained, document):
    run = trained(wg_distribution=True, **document)

    assert {"norm", "numel"} == published(run)


def test_eps_is_the_limit_below_which_an_element_is_zero(trained):
    inputs = {"inputs": lambda _step: torch.full((5, 3, 4), 1e-3), "net": Net()}
    counts = {
        eps: {row.numbers["zeros"] for row in trained(inputs, ops=["zeros"], xy_distribution=True, eps=eps).rows
              if (row.entry.kind, row.entry.tensor) == ("act_in", "")}
        for eps in (1e-8, 1e-2)
    }  # fmt: skip

    assert {1e-8: {0}, 1e-2: {60}} == counts


def files(output: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each CSV file by its name."""
    return {path.name: list(csv.DictReader(path.open())) for path in output.rglob("*.csv")}


def test_format_csv_writes_msprobes_files(trained, output):
    trained(wg_distribution=True, format="csv", ops=["min", "norm"])
    found = files(output)

    assert {f"grad_{side}_{step}-{step}.csv" for side in ("reduced", "unreduced") for step in (0, 1)} == set(found)
    assert ["vpp_stage", "name", "step", "min", "norm", "shape", "dtype"] == list(found["grad_reduced_0-0.csv"][0])


def test_format_tensorboard_writes_event_files(trained, output):
    trained(wg_distribution=True, format="tensorboard")

    assert [path for path in output.rglob("*tfevents*") if path.stat().st_size]
    assert {} == files(output)


def test_format_api_writes_nothing(trained, output):
    trained(wg_distribution=True, xy_distribution=True, format="api")

    assert not output.exists()


def test_ndigits_is_the_number_of_decimals_in_csv(trained, output):
    trained(param_distribution=True, format="csv", ndigits=3)
    cells = [row["norm"] for rows in files(output).values() for row in rows]

    assert {True} == {len(cell.partition(".")[2]) <= 3 for cell in cells}
    assert 3 == max(len(cell.partition(".")[2]) for cell in cells)


def test_step_count_per_record_is_the_number_of_steps_in_a_file(trained, output):
    trained({"steps": 3}, wg_distribution=True, format="csv", step_count_per_record=2)

    assert {"grad_reduced_0-1.csv", "grad_reduced_2-3.csv"} == {
        name for name in files(output) if name.startswith("grad_reduced")
    }


def test_append_output_continues_the_folder_of_its_window(trained, output):
    old = output / "Dec03_21-34-40-rank0-0a0b0c0d"
    old.mkdir(parents=True)
    trained(wg_distribution=True, format="csv", append_output=["Dec03_21-34-40", "Dec03_21-34-41"])

    assert [old] == list(output.iterdir())
    assert (old / "grad_reduced_0-0.csv").exists()


def test_time_zone_is_that_of_the_folder_name(trained, output):
    now = dt.datetime.now(dt.UTC)
    trained(wg_distribution=True, format="csv", time_zone="UTC")
    (folder,) = output.iterdir()

    assert dt.timedelta(minutes=5) > parse_folder(folder.name).time.replace(year=now.year, tzinfo=dt.UTC) - now


def test_squash_name_shortens_names_in_files_and_targets(trained, output):
    wrapped = torch.nn.Sequential()
    wrapped.add_module("decoder", model())
    document = {"wg_distribution": True, "format": "csv", "targets": {"layers.0": {}}}
    trained({"net": wrapped}, **document)
    names = {row["name"] for row in files(output)["grad_reduced_0-0.csv"]}

    assert {"layers.0.first.weight", "layers.0.first.bias", "layers.0.second.weight", "layers.0.second.bias"} == names
    assert set() == trained({"net": wrapped}, squash_name=False, **document).names("grad_reduced")
