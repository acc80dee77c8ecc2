"""The effect of each key of the configuration of msprobe on a training, and its file `anomaly.json`."""

import csv
import datetime as dt
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.msprobe.monitored_runs import Run, batch, model

from rankscope_contract.model.events import Event, EventType
from rankscope_contract.model.identity import Identity
from rankscope_exporter.records.plan import ALL_OPS
from rankscope_exporter.records.record import StepRecord
from rankscope_msprobe.files.csv_layout import parse_folder
from rankscope_msprobe.sinks import csv_files
from rankscope_msprobe.sinks.csv_files import Anomalies, AnomalyOptions

GRADIENTS = {"grad_unreduced", "grad_reduced"}
ACTIVATIONS = {"act_in", "act_out", "act_grad_in", "act_grad_out"}
XY, WG = {"xy_distribution": True}, {"wg_distribution": True}


# Quantities.


@pytest.mark.parametrize(
    ("document", "kinds"),
    [
        *((WG, GRADIENTS), ({"param_distribution": True}, {"param_before", "param_after"})),
        *(({"mv_distribution": True}, {"exp_avg", "exp_avg_sq"}), (XY, ACTIVATIONS)),
        *(({**WG, "xy_distribution": False}, GRADIENTS), ({**XY, "forward_only": True}, {"act_in", "act_out"})),
        ({**XY, "backward_only": True}, {"act_grad_in", "act_grad_out"}),
        ({**XY, "targets": {"layers.1": {}}}, ACTIVATIONS),
    ],
)
def test_key_measures_its_kinds(trained, document, kinds):
    assert kinds == trained(**document).kinds()


@pytest.mark.parametrize(
    ("document", "kinds", "remarks"),
    [
        (
            {"monitor_mbs_grad": True, "param_distribution": True},
            *({"param_before", "param_after"}, ["monitor_mbs_grad has no effect without wg_distribution"]),
        ),
        (
            {**XY, "forward_only": True, "backward_only": True},
            *(set(), ["activations: forward_only and backward_only exclude each other; nothing is measured"]),
        ),
        (
            {**WG, "l2_targets": {"linear_hook": ["head"]}},
            *(GRADIENTS, ["l2_targets has no effect without recording_l2_features"]),
        ),
        (
            {**WG, **XY, "targets": {"layers.7": {}}},
            set(),
            [
                "gradients: target 'layers.7' matches no parameter; nearest: layers.1.first.bias",
                "activations: target 'layers.7' matches no module; nearest: layers.1",
            ],
        ),
    ],
)
def test_key_without_an_effect_is_reported(trained, document, kinds, remarks):
    run = trained(**document)

    assert (kinds, set()) == (run.kinds(), run.features())
    assert remarks == [said.partition(", ")[0] for said in run.said()]


def test_monitor_mbs_grad_measures_each_micro_batch(trained):
    run = trained({"micro_batches": 2}, **WG, monitor_mbs_grad=True)
    micro = [row.entry.micro_step for row in run.rows if row.entry.tensor == "head.bias" and row.step == 1]
    alone = trained({"micro_batches": 2}, **WG)

    assert {None, 0, 1} == set(micro)
    assert {None} == {row.entry.micro_step for row in alone.rows}
    assert 12 == len(alone.names("grad_reduced"))


def test_ur_distribution_counts_update_and_ratio_in_histograms(trained, output):
    rows = trained(ur_distribution=True, format="tensorboard").dataset("histograms")
    accumulator = EventAccumulator(str(output / "rank0" / "adam_update"), size_guidance={"histograms": 0})
    accumulator.Reload()

    assert {"adam_update", "adam_ratio"} == {row["kind"] for row in rows}
    assert {30} == {len(row["counts"]) for row in rows}
    assert [0, 1] == [found.step for found in accumulator.Histograms("0:head.weight/rank0/adam_update")]


def test_mg_direction_and_xy_distribution_measure_all_modules(trained):
    run = trained(**XY, mg_direction=True)

    assert ("direction_agreement", "head.weight") in run.features()
    assert {"", "layers.0", "layers.0.core", "layers.1.second", "gate", "head"} <= run.names("act_in")


def test_all_xy_measures_the_modules_without_a_target(trained):
    targets = {"layers.0": {"output": "tuple[2]:1"}}
    some, every = (trained(**XY, targets=targets, all_xy=all_xy) for all_xy in (False, True))

    assert {("layers.0", 1)} == some.slots("act_out")
    assert {("layers.0", 1), ("layers.1", 0), ("layers.1", 1), ("head", None)} <= every.slots("act_out")
    assert ("layers.0", 0) not in every.slots("act_out")


def test_targets_select_parameters_by_module(trained):
    run = trained(**WG, targets={"0:module.layers.1": {}, "head.bias": {}})
    of_layer = {f"layers.1.{layer}.{part}" for layer in ("first", "second") for part in ("weight", "bias")}

    assert of_layer | {"head.bias"} == run.names("grad_reduced")


def test_targets_select_tensors_in_a_modules_objects(trained):
    spec = {"input": "tensor", "output": "tuple[2]:0", "input_grad": "tensor", "output_grad": "tuple[2]:1"}
    run = trained(**XY, targets={"layers.1": spec})

    assert {"layers.1"} == run.names(*ACTIVATIONS)
    assert {("layers.1", None)} == run.slots("act_in") == run.slots("act_grad_in")
    assert {("layers.1", 0)} == run.slots("act_out")
    assert {("layers.1", 1)} == run.slots("act_grad_out")


# Schedule.


@pytest.mark.parametrize(
    ("count", "document", "steps"),
    [
        (2, {"dynamic_on": False, "module_ranks": [0]}, [1, 2]),  # without DYNAMIC_MONITOR
        *((4, {**XY, "start_step": 2}, [3, 4]), (6, {"start_step": 1, "step_interval": 3}, [2, 5])),
        *((5, {"start_step": 1, "collect_times": 2}, [2, 3]), (2, {"stack_info": True, "collect_times": 0}, [])),
        (2, {"collect_times": 100_000_000}, [1, 2]),
    ],
)
def test_key_selects_the_measured_steps(trained, count, document, steps):
    run = trained({"steps": count}, **WG, **document)

    assert steps == run.steps()
    assert [] == run.dataset("modules")


def test_module_ranks_excludes_other_ranks(trained, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)

    assert [] == trained(**WG, **XY, module_ranks=[0]).steps()
    assert [1, 2] == trained(**WG, module_ranks=[]).steps()


# Features and structure.

SPECTRAL, ROUTER = ("spectral_norm", "stable_rank"), ("router_entropy", "router_load", "router_similarity")


@pytest.mark.parametrize(
    ("targets", "features"),
    [
        (
            {
                "attention_hook": ["0:layers.1.core"],
                "linear_hook": ["0:layers.0.first", "head"],
                "moe_router_weight_hook": ["gate"],
                "moe_router_logit_hook": ["gate"],
            },
            {
                *((kind, "layers.1.core") for kind in ("attention_entropy", "softmax_max")),
                *((kind, module) for kind in SPECTRAL for module in ("layers.0.first", "head")),
                *((kind, "gate") for kind in ROUTER),
            },
        ),
        (
            {"attention_hook": [], "linear_hook": []},  # all linear layers, and no attention
            {
                *((kind, f"layers.{n}.{layer}") for kind in SPECTRAL for n in (0, 1) for layer in ("first", "second")),
                *((kind, module) for kind in SPECTRAL for module in ("gate", "head")),
            },
        ),
    ],
)
def test_l2_targets_select_attention_linear_and_router_modules(trained, targets, features):
    run = trained(recording_l2_features=True, l2_targets=targets)

    assert (features, []) == (run.features(), run.said())


def causal_entropy(length: int, scores: torch.Tensor) -> float:
    weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1)
    return float(-(weights * weights.clamp_min(1e-38).log()).sum(-1).mean())


@pytest.mark.parametrize(("order", "equation"), [("s,b,h,d", "sbhd,tbhd->bhst"), ("b,s,h,d", "bshd,bthd->bhst")])
def test_sa_order_gives_the_layout_of_query_and_key(trained, order, equation):
    run = trained(recording_l2_features=True, l2_targets={"attention_hook": ["layers.0.core"]}, sa_order=order)
    heads = batch(1).view(5, 3, 2, 2)
    scores = torch.einsum(equation, heads, heads) / math.sqrt(2)
    expected = [causal_entropy(scores.shape[-1], scores[:, head]) for head in range(2)]
    rows = [row for record in run.records if record.step == 1 for row in record.features]
    found = {row["index"]: row["value"] for row in rows if row["kind"] == "attention_entropy"}

    assert expected == pytest.approx([found[0], found[1]], rel=1e-5)


def test_stack_info_stores_the_call_stacks_of_modules(trained):
    rows = {row["module"]: row for row in trained(stack_info=True).dataset("modules")}

    assert {"", "layers.0.core", "head"} <= set(rows)
    assert "monitored_runs.py" in rows["head"]["stack"]


def test_print_struct_writes_the_structure_and_training_continues(trained, output):
    run = trained({"steps": 3}, print_struct=True)
    document = json.loads((output / "module_struct/rank0/module_struct.json").read_text())

    tensors = {"0": "size=(5, 3, 4), dtype=torch.float32", "1": "size=(5, 3, 6), dtype=torch.float32"}
    assert {"config": "tuple[2]", **tensors} == document["0:layers.0"]["output"]
    assert {1, 2, 3} <= {record.step for record in run.records}
    assert ["print_struct: training continues after the structure is printed"] == run.said()


def test_cc_distribution_hooks_collectives_at_measured_steps(trained):
    """The effect of each of its keys on two ranks is tested in test_config_translation.py."""
    original, listened = dist.all_reduce, []
    document = {"cc_distribution": {"enable": True}, **WG, "collect_times": 1}
    during = {"during": lambda *_: listened.append(dist.all_reduce is not original)}
    (sentence,) = trained(during, **document).said()
    off = trained(during, **{**document, "cc_distribution": {"enable": False, "cc_pre_hook": True}})

    assert [True, False, False, False] == listened
    assert "collectives: no call of the script was seen in a sampled step" in sentence
    assert [] == off.said()
    assert dist.all_reduce is original


# Alerts.


# Gradients are 1,000 times as large in step 3 and NaN in step 4.
SPOILED = {"steps": 4, "inputs": lambda step: batch() * (1000.0 if step == 3 else math.nan if step == 4 else 1.0)}


def test_alert_rules_fire_as_in_msprobe(trained):
    rules = [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}, {"rule_name": "AnomalyNan"}]
    run = trained({**SPOILED, "net": torch.nn.Linear(4, 2)}, **WG, ops=["norm"], alert={"rules": rules})
    found = set(run.anomalies())

    assert {(3, "AnomalyTurbulence", "norm"), (4, "AnomalyNan", "nans")} <= found
    assert {3, 4} == {step for step, _, _ in found}


def test_anomaly_nan_fires_for_inf_only_above_its_threshold(trained):
    net = torch.nn.Linear(4, 2)
    torch.nn.init.ones_(net.weight)  # all products have one sign, so infinities do not add up to NaN
    how = {"net": net, "inputs": lambda step: torch.ones(5, 3, 4) * (1e25 if step == 2 else 1.0)}
    limit = {"rule_name": "AnomalyNan", "args": {"threshold": 1e10}}
    plain = trained(how, **WG, alert={"rules": [{"rule_name": "AnomalyNan"}]}, ops=["infs"])
    torch.nn.init.ones_(net.weight)
    limited = trained(how, **WG, alert={"rules": [limit]})

    assert any(row.numbers["infs"] for row in plain.rows)
    assert [] == [found for found in plain.anomalies() if found[2] == "infs"]
    assert {2} == {step for step, _, _ in limited.anomalies()}


def test_alert_dump_writes_anomaly_json(trained, output):
    how = {**SPOILED, "net": torch.nn.Linear(4, 2)}
    trained(how, **WG, alert={"rules": [{"rule_name": "AnomalyNan"}], "dump": False})
    assert [] == trained(how, **WG).anomalies()  # without rules
    assert not output.exists()

    trained({**how, "net": torch.nn.Linear(4, 2)}, **WG, alert={"rules": [{"rule_name": "AnomalyNan"}], "dump": True})
    document = json.loads((output / "anomaly_detected/rank0/anomaly.json").read_text())
    assert {3} == {entry["step"] for entry in document.values()}
    assert {"0:weight/rank0/acc_grad", "0:weight/rank0/post_grad"} <= {e["tag_name"] for e in document.values()}


# Published statistics and output formats.


def published(run: Run) -> set[str]:
    return {op for row in run.rows for op in ALL_OPS if row.numbers.get(op) is not None}


@pytest.mark.parametrize(
    ("ops", "names"),
    [
        ({"ops": ["norm", "nans", "shape", "dtype"]}, {"norm", "nans", "numel"}),
        ({}, {"norm", "numel"}),
        ({"ops": ["median"]}, {"norm", "numel"}),
    ],
)
def test_ops_select_the_published_statistics(trained, ops, names):
    assert names == published(trained(**WG, **ops))


def test_eps_is_the_limit_below_which_an_element_is_zero(trained):
    how = {"inputs": lambda _step: torch.full((5, 3, 4), 1e-3)}
    runs = {eps: trained(how, **XY, ops=["zeros"], eps=eps) for eps in (1e-8, 1e-2)}
    inputs = {eps: [row for row in run.rows if not row.entry.tensor and row.entry.kind == "act_in"]
              for eps, run in runs.items()}  # fmt: skip

    assert {1e-8: {0}, 1e-2: {60}} == {eps: {row.numbers["zeros"] for row in rows} for eps, rows in inputs.items()}


def files(output: Path) -> dict[str, list[dict[str, str]]]:
    return {path.name: list(csv.DictReader(path.open())) for path in output.rglob("*.csv")}


def test_format_csv_writes_msprobes_files(trained, output):
    trained({"steps": 3}, **WG, format="csv", ops=["min", "norm"], ndigits=3, step_count_per_record=2)
    found = files(output)
    decimals = {len(row["norm"].partition(".")[2]) for rows in found.values() for row in rows}

    assert {f"grad_{side}_{steps}.csv" for side in ("reduced", "unreduced") for steps in ("0-1", "2-3")} == set(found)
    assert ["vpp_stage", "name", "step", "min", "norm", "shape", "dtype"] == list(found["grad_reduced_0-1.csv"][0])
    assert 3 == max(decimals)


def test_format_tensorboard_writes_event_files_and_api_nothing(trained, output):
    trained(**WG, **XY, format="api")
    assert not output.exists()

    trained(**WG, format="tensorboard")
    assert [path for path in output.rglob("*tfevents*") if path.stat().st_size]
    assert {} == files(output)


def test_append_output_continues_a_folder_and_time_zone_is_that_of_new_names(trained, output):
    old = output / "Dec03_21-34-40-rank0-0a0b0c0d"
    old.mkdir(parents=True)
    trained(**WG, format="csv", append_output=["Dec03_21-34-40", "Dec03_21-34-41"])
    assert [old] == list(output.iterdir())
    assert (old / "grad_reduced_0-0.csv").exists()

    now = dt.datetime.now(dt.UTC)
    trained(**WG, format="csv", time_zone="UTC")
    (folder,) = set(output.iterdir()) - {old}
    assert dt.timedelta(minutes=5) > parse_folder(folder.name).time.replace(year=now.year, tzinfo=dt.UTC) - now


def test_squash_name_shortens_names_in_files_and_targets(trained, output):
    wrapped = torch.nn.Sequential()
    wrapped.add_module("decoder", model())
    document = {**WG, "format": "csv", "targets": {"layers.0": {}}}
    trained({"net": wrapped}, **document)
    names = {row["name"] for row in files(output)["grad_reduced_0-0.csv"]}

    assert {f"layers.0.{layer}.{part}" for layer in ("first", "second") for part in ("weight", "bias")} == names
    assert set() == trained({"net": wrapped}, squash_name=False, **document).names("grad_reduced")


RECORDED = Path(__file__).parents[1] / "data/msprobe/single_rank/anomaly_detected/rank0/anomaly.json"


def sink(folder: Path, rank: int = 3) -> Anomalies:
    return Anomalies(
        AnomalyOptions(folder=str(folder)),
        Identity(run="r", launch_id="l", rank=rank, world_size=4, incarnation="5eed5eed" * 4),
    )


def anomaly(tensor: str = "head.weight", **others: Any) -> Event:
    told = {"kind": "grad_reduced", "op": "norm", "rule": "AnomalyTurbulence", "value": 3.0, "baseline": 1.5}
    return Event(type=EventType.ANOMALY, tensor=tensor, **{**told, "call_id": 7, **others})


def record(step: int | None, *events: Event) -> StepRecord:
    return StepRecord(ts=0, step=step, events=events)


def read(folder: Path, rank: int = 3) -> dict[str, dict[str, Any]]:
    return json.loads((folder / f"anomaly_detected/rank{rank}/anomaly.json").read_text())


def test_entry_has_msprobes_fields_key_and_message(tmp_path):
    sink(tmp_path).put(record(5, anomaly()))
    (key, entry), = read(tmp_path).items()  # fmt: skip
    name = "0:head.weight/rank3/post_grad"

    assert list(next(iter(json.loads(RECORDED.read_text()).values()))) == list(entry)
    assert f"{name}_step_4_call_7" == key
    place = {"rank": 3, "step": 4, "micro_step": 0, "pp_stage": 3, "vpp_stage": 0, "call_id": 7}
    signal = f"Rule AnomalyTurbulence reports anomaly signal in ('{name}', 'norm') at step 4"
    message = f"{signal}, current value 3.0, history mean 1.5."
    sink(tmp_path).put(record(1, *(anomaly(op=op) for op in ("norm", "mean", "norm"))))
    assert ["norm", "mean", "norm"] == [entry["message"].split("'")[3] for entry in read(tmp_path).values()]
    assert {**place, "tag_name": name, "message": message, "group_mates": [0, 1, 2, 3]} == entry


def test_file_is_complete_after_every_step_and_replaced_by_a_new_run(tmp_path):
    first = sink(tmp_path)
    for step in range(1, 6):
        first.put(record(step, anomaly(), anomaly("b")))
        first.put(record(step))
        assert 2 * step == len(read(tmp_path))
    second = sink(tmp_path)
    second.put(record(1))

    assert not list(tmp_path.rglob("anomaly.json"))
    second.put(record(2, anomaly()))
    assert 1 == len(read(tmp_path))

    (tmp_path / "anomaly_detected/rank3/anomaly.json").unlink()
    second.put(record(3, anomaly()))
    assert [2] == [entry["step"] for entry in read(tmp_path).values()]


def test_partial_write_leaves_the_file_complete(tmp_path, monkeypatch):
    written = sink(tmp_path)
    written.put(record(1, anomaly()))
    pwrite, sizes = os.pwrite, iter([20])
    monkeypatch.setattr(os, "pwrite", lambda handle, data, place: pwrite(handle, data[: next(sizes, None)], place))
    with pytest.raises(OSError, match="20 of"):
        written.put(record(2, anomaly()))
    assert [0] == [entry["step"] for entry in read(tmp_path).values()]

    written.put(record(3, anomaly()))
    assert [0, 2] == [entry["step"] for entry in read(tmp_path).values()]


def test_file_size_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "MOST_BYTES", 600)
    written = sink(tmp_path)
    written.put(record(1, anomaly()))
    with pytest.raises(OSError, match="limit of"):
        written.put(record(2, anomaly()))

    assert 1 == len(read(tmp_path))


def test_events_without_a_tensor_are_omitted_and_any_name_is_a_valid_key(tmp_path):
    without = (Event(type=EventType.NOTE), anomaly(None, op="loss"), anomaly(kind=None))  # type: ignore[arg-type]
    sink(tmp_path).put(record(1, *without))
    assert not list(tmp_path.iterdir())

    sink(tmp_path).put(record(1, anomaly('a"b\\c\n☃\ud800')))
    assert 1 == len(read(tmp_path))
