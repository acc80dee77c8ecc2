"""The configuration of msprobe: accepted wherever a configuration is, its page, and its effect on two ranks."""

import csv
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.conftest import wait_until
from tests.exporter.ranks import RANKS, WORLD, outcomes_of
from tests.msprobe.monitored_runs import QUIET, Run, adam, batch, left, model, train, write
from torch.nn.parallel import DistributedDataParallel

from rankscope_contract.rules.anomaly import AnomalyNan, AnomalyTurbulence
from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.adapters.parameter_names import Targets
from rankscope_exporter.adapters.pytree import OBJECTS
from rankscope_exporter.config.loader import without_comments
from rankscope_exporter.training.sampling_config import sampling_config_from
from rankscope_msprobe.configuration import CC_KEYS, FORMATS, KEYS, L2_HOOKS, module_pattern, parameter_pattern
from rankscope_msprobe.trainer_mon import AS_IN_THE_CODE, TrainerMon

FROM_THE_MANUAL = """{
    "targets": {
        "language_model.encoder.layers.0": {"input": "tuple[2]:0", "output": "tensor", "input_grad":"tuple[2]:0", "output_grad":"tuple[1]:0"}
    },
    "dynamic_on": false,  // only with DYNAMIC_MONITOR=True
    "start_step": 0,
    "collect_times": 100000000,
    "step_interval": 1,
    "print_struct": false,
    "module_ranks": [0,1,2,3],
    "ur_distribution": true,
    "xy_distribution": true,
    "all_xy": true,
    "forward_only": false,
    "backward_only": false,
    "mv_distribution": true,
    "param_distribution": true,
    "wg_distribution": true,
    "monitor_mbs_grad": true,
    "cc_distribution": {"enable":true, "cc_codeline":[]},
    "alert": {
        "rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}],  // 0.5: fifty percent off
        "dump": false
    },
    /* where it goes */
    "format": "csv",
    "ops": ["min", "max", "norm", "zeros", "nans", "mean"],
    "eps": 1e-8,
    "ndigits": 12,
    "step_count_per_record": 1,
    "append_output": [],
    "squash_name": true
}
"""  # noqa: E501 - as the manual prints it


def test_example_of_the_manual_is_accepted_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "monitor_config.json"
    path.write_text(FROM_THE_MANUAL)
    config = MonitorConfig.from_file(path)

    assert {
        "parameters", "gradients", "micro_gradients", "optimizer_state", "adam_updates", "activations", "collectives"
    } == set(config.quantities)  # fmt: skip
    assert [[0, 1, 2, 3]] * 7 == [table["ranks"] for table in config.options.values()]
    assert (AnomalyTurbulence(threshold=0.5),) == config.rules
    assert (1e-8, 1, None) == (config.zero_below, config.every, config.times)
    assert {"csv"} == set(config.sinks)
    assert json.dumps(config.options)  # compared with the text that other ranks read
    assert config == TrainerMon(path)._config


def test_mapping_and_watched_document_are_accepted() -> None:
    asked = {"wg_distribution": True, "step_interval": 3, "collect_times": 7, "dynamic_on": True, "start_step": 9}
    config = Monitor(asked).config
    switched = sampling_config_from(asked, MonitorConfig(), on=False)

    assert (("gradients",), 3, 7) == (config.quantities, config.every, config.times)
    assert MonitorConfig.from_mapping(asked) == MonitorConfig.from_msprobe(asked)
    assert switched.on
    assert (("gradients",), 3, 7) == (switched.config.quantities, switched.config.every, switched.config.times)


def test_monitor_only_settings_may_be_combined_with_msprobes_keys() -> None:
    config = MonitorConfig.from_mapping(
        {"wg_distribution": True, "run": "pretraining", "serve": {"ring_records": 512}, "remarks": ["hello"]}
    )

    assert ("pretraining", 512, ("hello",)) == (config.run, config.serve.ring_records, config.remarks)


def test_monitor_configurations_are_not_translated() -> None:
    for ours in ({}, {"dynamic_on": True}, {"every": 2}, {"ops": ["norm"]}, {"quantities": ["gradients"]}):
        assert MonitorConfig(**ours) == MonitorConfig.from_mapping(ours)


def test_missing_keys_have_msprobes_defaults() -> None:
    config = MonitorConfig.from_mapping({"wg_distribution": True})
    null = dict.fromkeys(("start_step", "collect_times", "targets"))

    assert config == MonitorConfig.from_mapping({"wg_distribution": True, **null})
    assert ({"csv"}, (), ("norm",), 1e-8) == (set(config.sinks), config.rules, config.ops, config.zero_below)
    assert config.sinks["csv"]["squash_name"] is True


def test_rules_keep_their_order_and_get_unique_names() -> None:
    rules = [
        {"rule_name": "AnomalyNan", "args": {"threshold": 5}},
        {"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}},
        {"rule_name": "AnomalyNan"},
    ]

    assert (
        AnomalyNan(threshold=5.0, infs=True),
        AnomalyTurbulence(threshold=0.5),
        AnomalyNan(name="AnomalyNan_2", infs=False),
    ) == MonitorConfig.from_mapping({"alert": {"rules": rules}, "wg_distribution": True}).rules


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"wg_distributon": True}, "unknown setting wg_distributon.*Did you mean wg_distribution?"),
        ({"xy_distribution": True, "all_xyz": True}, "Did you mean all_xy?"),
        ({"wg_distribution": True, "every": 2}, "every is not allowed together with wg_distribution: .* step_interval"),
        ({"wg_distribution": True, "quantities": ["gradients"]}, "quantities is not allowed together with wg"),
        ({"quantities": ["gradients"], "target": ["a"]}, "unknown setting target; valid settings are"),
        ({"wg_distribution": 1}, "wg_distribution must be true or false, not 1"),
        ({"targets": ["a"]}, 'targets must be a table such as {"layers.0"'),
        ({"targets": {"a": "tensor"}}, "targets must be a table such as"),
        ({"xy_distribution": True, "targets": {"a": {}, "b": {"out": "tensor"}}}, "'out' is unknown"),
        ({"xy_distribution": True, "targets": {"a": {"output": "garbage"}}}, "'garbage' does not select an element"),
        ({"wg_distribution": True, "targets": {"b": {"outputs": "tensor"}}}, "targets: .*'b'.*'outputs' is unknown"),
        ({"start_step": -1}, "start_step must be a whole number of at least 0, not -1"),
        ({"step_interval": 0}, "step_interval must be a whole number of at least 1, not 0"),
        ({"collect_times": 1.5}, "collect_times must be a whole number of at least 0, not 1.5"),
        ({"module_ranks": "0"}, "module_ranks must be a list of rank numbers such as .0, 1., not '0'"),
        ({"module_ranks": [True]}, "module_ranks must be a list of rank numbers"),
        ({"l2_targets": {"atention_hook": []}}, "Did you mean l2_targets.attention_hook?"),
        ({"l2_targets": {"linear_hook": "fc"}}, "l2_targets.linear_hook must be a list of module names, not 'fc'"),
        ({"sa_order": "b,h,s,d"}, "sa_order must be 's,b,h,d' or 'b,s,h,d'"),
        ({"cc_distribution": True}, "cc_distribution must be a table of enable, cc_codeline"),
        ({"cc_distribution": {"enabled": True}}, "Did you mean cc_distribution.enable?"),
        ({"cc_distribution": {"enable": 1}}, "cc_distribution.enable must be true or false"),
        ({"cc_distribution": {"cc_codeline": "a"}}, "cc_distribution.cc_codeline must be a list"),
        ({"cc_distribution": {"cc_codeline": ["train.py["]}}, "cc_codeline must be a list of regular expressions"),
        ({"alert": []}, "alert must be a table with the keys rules and dump"),
        ({"alert": {"rule": []}}, "Did you mean alert.rules?"),
        ({"alert": {"dump": "yes"}}, "alert.dump must be true or false"),
        ({"alert": {"rules": {"rule_name": "AnomalyNan"}}}, "alert.rules must be a list of rules"),
        ({"alert": {"rules": [{"rule_name": "AnomalyNaN"}]}}, "Did you mean AnomalyNan?"),
        ({"alert": {"rules": [{"rule_name": "AnomalyTurbulence"}]}}, "AnomalyTurbulence needs args.threshold"),
        ({"alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0}}]}}, "set a share above 0"),
        ({"alert": {"rules": [{"rule_name": "AnomalyNan", "args": {"limit": 3}}]}}, "args of AnomalyNan"),
        ({"format": "parquet"}, "format must be one of csv, tensorboard, api, not 'parquet'"),
        ({"format": "api", "ops": ["norm", "nons"]}, "'nons' is not a statistic; .* Did you mean 'nans'?"),
        ({"ops": "norm", "wg_distribution": True}, "ops must be a list of names"),
        ({"eps": "small"}, "eps must be a number of at least 0"),
        ({"ndigits": 0}, "ndigits must be a whole number from 1 to 20"),
        ({"step_count_per_record": 2_000_000}, "step_count_per_record must be a whole number from 1 to 1,000,000"),
        ({"append_output": ["Dec03_21-34-40"]}, "append_output must be an empty list or a list of two folder times"),
        ({"append_output": ["a", "b"]}, "'a' is not a folder time"),
        ({"squash_name": "yes"}, "squash_name must be true or false"),
    ],
)  # fmt: skip
def test_wrong_key_or_value_is_rejected_with_the_correct_form(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", "[?]")):
        MonitorConfig.from_mapping(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "monitor_config.json: "), ("[]", "a table of settings"), ('{"nix": 1}', "unknown"), (None, "No such file")],
)
def test_error_for_a_wrong_file_contains_its_path(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "monitor_config.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=words):
        TrainerMon(path)


def test_settings_as_a_mapping_are_rejected_by_trainer_mon() -> None:
    with pytest.raises(ConfigError, match="path of a JSON file, not a dict: pass settings in Python to rankscope"):
        TrainerMon({"wg_distribution": True})  # type: ignore[arg-type]


MODULES = ("", "layers.1", "layers.10", "layers.1.mlp", "encoder.layers.1.mlp", "decoder.layers.1.mlp", "module.head")
OF_LAYERS = ("layers.1.weight", "layers.10.weight", "layers.1.mlp.weight")
PARAMETERS = (*OF_LAYERS, "encoder.layers.1.mlp.weight", "head.weight")


@pytest.mark.parametrize(
    ("target", "squashed", "found"),
    [
        *(("layers.1", False, {"layers.1"}), ("12:module.module.layers.1", False, {"layers.1"})),
        *(("_fsdp_wrapped_module.layers.1._orig_mod", False, {"layers.1"}), ("module.head", False, {"module.head"})),
        *(("module", False, {""}), ("", False, {""}), ("layers.1.mlp", False, {"layers.1.mlp"})),
        ("layers.1.mlp", True, {"layers.1.mlp", "encoder.layers.1.mlp", "decoder.layers.1.mlp"}),
        *(("mlp", True, set()), ("layersX1", False, set())),
    ],
)
def test_module_target_matches_the_name_without_wrappers(target, squashed, found):
    targets = Targets((module_pattern(target, squashed=squashed),))

    assert found == {name for name in MODULES if targets.selects(name)}


@pytest.mark.parametrize(
    ("target", "squashed", "found"),
    [
        ("layers.1", False, {"layers.1.weight", "layers.1.mlp.weight"}),
        *(("layers.1.weight", False, {"layers.1.weight"}), ("0:module.layers.1.mlp", False, {"layers.1.mlp.weight"})),
        ("layers.1.mlp", True, {"layers.1.mlp.weight", "encoder.layers.1.mlp.weight"}),
        *(("", False, set(PARAMETERS)), ("module", False, set(PARAMETERS)), ("layers", False, set(OF_LAYERS))),
        ("layer", False, set()),
    ],
)
def test_parameter_target_matches_a_parameter_or_its_module(target, squashed, found):
    targets = Targets((parameter_pattern(target, squashed=squashed),))

    assert found == {name for name in PARAMETERS if targets.selects(name)}


def test_name_may_contain_regex_characters():
    for name in ("head[0].weight", "a(b).weight", "a).weight", "(?#x).weight"):
        assert Targets((parameter_pattern(name),)).selects(name)


COMMENT = '{ // "dynamic_on": true switches on\n'


def write_changes(path: Path, **document: Any) -> None:
    path.write_text(COMMENT + json.dumps({**QUIET, "format": "api", **document}).removeprefix("{"))


class Training:
    def __init__(self, folder: Path, attach: Callable[..., Monitor], **document: Any) -> None:
        self.path, self.net = folder / "monitor_config.json", model()
        self.optimizer = adam(self.net)
        write_changes(self.path, wg_distribution=True, **document)
        self.monitor = attach(self.path, self.net, self.optimizer)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.net(batch()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def edit(self, **document: Any) -> None:
        write_changes(self.path, **document)
        wait_until(lambda: self.monitor.measuring["to_come"])

    def finish(self) -> Run:
        return left(self.monitor, self.net, self.path.parent)


def by_trainer_mon(path: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
    monitor = TrainerMon(path)
    monitor.set_monitor(net, optimizer)
    assert monitor.monitor is not None
    return monitor.monitor


def by_monitor(path: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
    return Monitor(path).attach(net, optimizer)


@pytest.fixture(params=[by_trainer_mon, by_monitor])
def attach(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    return request.param


def test_dynamic_on_switches_and_the_end_is_written_to_the_file(tmp_path, attach):
    training = Training(tmp_path, attach, dynamic_on=False)
    training.train(3)
    edited = {"targets": {"head": {"output": "tensor"}}, "collect_times": 2, "start_step": 50}
    training.edit(xy_distribution=True, dynamic_on=True, **edited)
    training.train(4)
    run = training.finish()
    text = training.path.read_text()
    told = [json.loads(e.details) for r in run.records for e in r.events if e.type == "switch" and e.details]

    assert {"act_out"} == run.kinds()
    assert [4, 5] == run.steps()
    assert 0 == run.faults
    assert [[], []] == [event["needs_restart"] for event in told]
    assert text.startswith(COMMENT), "the comment is as it was"
    assert json.loads(without_comments(text))["dynamic_on"] is False


def test_dynamic_on_at_start_measures_from_msprobes_step_1(tmp_path, attach):
    training = Training(tmp_path, attach, dynamic_on=True)
    training.train(3)

    assert [2, 3] == training.finish().steps()


DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "migration.md").read_text(encoding="utf-8")


def rows_of(text: str) -> set[str]:
    """Return the names in the first column of the tables in `text`."""
    return {name for cell in re.findall(r"^\|([^|]*)\|", text, re.MULTILINE) for name in re.findall(r"`(.*?)`", cell)}


def test_page_names_every_key_call_and_argument():
    keys, calls = PAGE.split("## Keys of the configuration")[1].split("## Calls")
    methods = {name for name in dir(TrainerMon) if not name.startswith("_")} - {"faults"}

    assert set() == {*KEYS, *CC_KEYS, *L2_HOOKS, *OBJECTS, "rules", "dump"} - rows_of(keys)
    assert set() == {name for name in methods if name not in calls.split("## Environment")[0]}
    assert set() == {*AS_IN_THE_CODE, "process_group", "params_have_main_grad", "opt_ty"} - rows_of(PAGE)


def test_page_names_every_variable_file_and_program():
    files = {"module_struct.json", "anomaly.json", "anomaly_analyse.json", "stack_info.csv"}
    programs = {"csv2tensorboard_by_step", "csv2db", "anomaly_processor"}

    assert set() == {
        word for word in {"MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR", *files, *programs, *FORMATS} if word not in PAGE
    }


@pytest.mark.parametrize("page", ["docs/index.md", "README.md"])
def test_migration_page_is_linked(page):
    assert "migration.md" in (DOCS.parent / page).read_text(encoding="utf-8")


pytestmark = pytest.mark.timeout(400)  # the first test waits for the training
DOCUMENT = {"wg_distribution": True, "targets": {"0:module.layers.1": {}, "module.head.bias": {}}, "format": "csv"}
NAMES = {f"layers.1.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")} | {"head.bias"}


def all_reduced(rank: int, number: int) -> torch.Tensor:
    tensor = given(rank, number)
    dist.all_reduce(tensor)
    return tensor


def given(rank: int, number: int) -> torch.Tensor:
    return torch.arange(4.0) + 10 * rank + 100 * number


COLLECTIVES: dict[str, dict[str, Any]] = {
    "enable": {},
    "off": {"enable": False, "cc_pre_hook": True},
    "cc_pre_hook": {"cc_pre_hook": True},
    "cc_codeline": {"cc_codeline": [r"test_configuration\.py\[\d+\] all_reduced"]},
    "cc_log_only": {"cc_log_only": True, "cc_pre_hook": True},
}


def collectives(rank: int, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return the rows of the script's own collective calls with each key of cc_distribution."""

    def during(_step: int, _monitor: TrainerMon) -> None:
        all_reduced(rank, 0)
        dist.broadcast(given(rank, 1), 1)

    found = {}
    for case, keys in COLLECTIVES.items():
        own = folder / f"{case}{rank}"
        own.mkdir()
        os.environ["MONITOR_OUTPUT_DIR"] = str(own / "out")
        run = train(own, {"cc_distribution": {"enable": True, **keys}, "format": "csv"}, during=during)
        norms = {(row.step, row.entry.kind, row.entry.tensor.split("@")[0]): row.numbers["norm"] for row in run.rows}
        found[case] = norms, run.said(), run.faults
    return found


def cases(rank: int, folder: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    os.environ["MONITOR_OUTPUT_DIR"] = f"{folder}/out"
    ddp = DistributedDataParallel(model(), find_unused_parameters=False)
    optimizer = adam(ddp)
    monitor = TrainerMon(write(folder / f"config{rank}.json", {**QUIET, **DOCUMENT}), dist.group.WORLD, False)
    monitor.set_monitor(ddp, 1, optimizer, dist.group.WORLD, None, 0)
    tags = set()
    for step in (1, 2):
        ddp(batch(10 * rank + step)).square().mean().backward()
        tags |= set(monitor.generate_wgrad_metrics()[1])
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.monitor is not None
    run = left(monitor.monitor, ddp, folder, monitor.faults)
    calls = collectives(rank, folder)
    yield "", (run.names("grad_unreduced"), run.names("grad_reduced"), tags, run.faults, calls)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> tuple[Path, dict[int, tuple[Any, ...]]]:
    folder = tmp_path_factory.mktemp("ranks")
    found = outcomes_of(partial(cases, folder=folder), folder)
    return folder, {rank: found["", rank] for rank in RANKS}


def test_targets_with_a_ddp_prefix_match_and_one_rank_reduces_gradients(ranks):
    for rank, (unreduced, reduced, tags, faults, _) in ranks[1].items():
        assert (NAMES, set() if rank else NAMES, 0) == (unreduced, reduced, faults)
        assert {f"0:{name}/rank{rank}/acc_grad" for name in NAMES} == tags


def test_each_rank_writes_its_own_folder(ranks):
    rows = {
        path.parent.name.split("-rank")[1][0]: {row["name"] for row in csv.DictReader(path.open())}
        for path in ranks[0].glob("out/*/grad_unreduced_1-1.csv")
    }

    assert {"0": NAMES, "1": NAMES} == rows


def norm(rank: int | None, number: int) -> float:
    """Return the norm of the tensor that a rank sends, or of the sum over ranks."""
    parts = [given(one, number) for one in range(WORLD)]
    return float((sum(parts, torch.zeros(4)) if rank is None else parts[rank]).norm())


def expected(rank: int, *, inputs: bool = False, broadcast: bool = True) -> dict[tuple[int, str, str], float]:
    one = {("comm_out", "all_reduce"): norm(None, 0)}
    if inputs:
        one["comm_in", "all_reduce"] = norm(rank, 0)
        one |= {("comm_in", "broadcast"): norm(1, 1)} if rank == 1 else {}
    if broadcast:
        one["comm_out", "broadcast"] = norm(1, 1)
    return {(step, *key): pytest.approx(value) for step in (1, 2) for key, value in one.items()}


@pytest.mark.parametrize(
    ("case", "choice"), [("enable", {}), ("cc_pre_hook", {"inputs": True}), ("cc_codeline", {"broadcast": False})]
)
def test_cc_distribution_measures_the_selected_calls(case, choice, ranks):
    for rank, (*_, calls) in ranks[1].items():
        assert (expected(rank, **choice), [], 0) == calls[case]


def test_disabled_cc_distribution_measures_nothing(ranks):
    for *_, calls in ranks[1].values():
        norms, said, faults = calls["off"]

        assert ({}, 0) == (norms, faults)
        assert ["no quantity is measured: enable wg_distribution, xy_distribution or a similar setting"] == said


def test_cc_log_only_logs_the_calls_of_the_first_step(ranks):
    for *_, calls in ranks[1].values():
        norms, (remark, *told), faults = calls["cc_log_only"]

        assert ({}, 0) == (norms, faults)
        assert "cc_log_only: training continues after the calls of the first step are logged" == remark
        assert ["all_reduce", "broadcast"] == [text.removeprefix("collectives: ").split("@")[0] for text in told]
        assert "float32[4] -> float32[4], group default_pg of 2 ranks, called from" in told[0]
        assert told[0].endswith("all_reduced")


def test_calls_have_separate_files_with_a_row_per_call(ranks):
    for rank in range(WORLD):
        (path,) = ranks[0].glob(f"cc_pre_hook{rank}/out/*-rank{rank}-*/comm_out_0-0.csv")
        rows = {row["name"].split("@")[0]: row for row in csv.DictReader(path.open())}

        assert ["all_reduce", "broadcast"] == sorted(rows)
        assert pytest.approx(norm(None, 0), rel=1e-5) == float(rows["all_reduce"]["norm"])
        assert ("[4]", "torch.float32", "0") == tuple(rows["all_reduce"][name] for name in ("shape", "dtype", "step"))
