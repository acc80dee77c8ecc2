"""Tests that msprobe's configuration is accepted wherever a configuration is, and of its names of targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.compat.msprobe import TrainerMon
from rankscope_exporter.compat.msprobe.config_translation import module_pattern, parameter_pattern
from rankscope_exporter.model.parameter_names import Targets, target_notices
from rankscope_exporter.sampling.sampling_config import sampling_config_from

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


NAMES = ("", "layers.1", "layers.10", "layers.1.mlp", "encoder.layers.1.mlp", "decoder.layers.1.mlp", "module.head")
OF_LAYERS = ("layers.1.weight", "layers.10.weight", "layers.1.mlp.weight")
PARAMETERS = (*OF_LAYERS, "encoder.layers.1.mlp.weight", "head.weight")


@pytest.mark.parametrize(
    ("target", "squashed", "found"),
    [
        ("layers.1", False, {"layers.1"}),
        ("12:module.module.layers.1", False, {"layers.1"}),
        ("_fsdp_wrapped_module.layers.1._orig_mod", False, {"layers.1"}),
        ("module.head", False, {"module.head"}),
        ("module", False, {""}),
        ("", False, {""}),
        ("layers.1.mlp", False, {"layers.1.mlp"}),
        ("layers.1.mlp", True, {"layers.1.mlp", "encoder.layers.1.mlp", "decoder.layers.1.mlp"}),
        ("mlp", True, set()),
        ("layersX1", False, set()),
    ],
)
def test_module_target_matches_the_name_without_wrappers(target, squashed, found):
    targets = Targets((module_pattern(target, squashed=squashed),))

    assert found == {name for name in NAMES if targets.selects(name)}


@pytest.mark.parametrize(
    ("target", "squashed", "found"),
    [
        ("layers.1", False, {"layers.1.weight", "layers.1.mlp.weight"}),
        ("layers.1.weight", False, {"layers.1.weight"}),
        ("0:module.layers.1.mlp", False, {"layers.1.mlp.weight"}),
        ("layers.1.mlp", True, {"layers.1.mlp.weight", "encoder.layers.1.mlp.weight"}),
        ("", False, set(PARAMETERS)),
        ("module", False, set(PARAMETERS)),
        ("layers", False, set(OF_LAYERS)),
        ("layer", False, set()),
    ],
)
def test_parameter_target_matches_a_parameter_or_its_module(target, squashed, found):
    targets = Targets((parameter_pattern(target, squashed=squashed),))

    assert found == {name for name in PARAMETERS if targets.selects(name)}


def test_target_without_a_match_is_reported_with_the_nearest_name():
    parameters = Targets(tuple(map(parameter_pattern, ["0:layer.1.weight", "hed.weight"])))
    modules = Targets((module_pattern("0:module.layer.1"),))
    told = [*target_notices(parameters, PARAMETERS, "parameter"), *target_notices(modules, NAMES, "module")]

    assert [
        "target 'layer.1.weight' matches no parameter; nearest: layers.1.weight",
        "target 'hed.weight' matches no parameter; nearest: head.weight",
        "target 'layer.1' matches no module; nearest: layers.1",
    ] == [sentence.partition(",")[0] for sentence in told]


def test_name_may_contain_regex_characters():
    for name in ("head[0].weight", "a(b).weight", "a).weight", "(?#x).weight"):
        assert Targets((parameter_pattern(name),)).selects(name)
