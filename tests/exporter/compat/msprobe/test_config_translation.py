"""Tests that msprobe's configuration is accepted wherever a configuration is, and of the errors for wrong values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_contract.rules.turbulence import AnomalyTurbulence
from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.compat.msprobe import TrainerMon
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
    assert config == TrainerMon(path)._config


def test_mapping_and_watched_document_are_accepted() -> None:
    asked = {"wg_distribution": True, "step_interval": 3, "collect_times": 7, "dynamic_on": True, "start_step": 9}
    config = Monitor(asked).config
    switched = sampling_config_from(asked, MonitorConfig(), on=False)

    assert (("gradients",), 3, 7) == (config.quantities, config.every, config.times)
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

    assert ({"csv"}, (), ("norm",), 1e-8) == (set(config.sinks), config.rules, config.ops, config.zero_below)
    assert config.sinks["csv"]["squash_name"] is True


def test_null_means_the_default() -> None:
    assert MonitorConfig.from_mapping({"wg_distribution": True}) == MonitorConfig.from_mapping(
        {"wg_distribution": True, "start_step": None, "collect_times": None, "targets": None}
    )


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


def test_error_for_a_wrong_file_contains_its_path(tmp_path: Path) -> None:
    path = tmp_path / "monitor_config.json"
    for text, words in (
        ("{", "monitor_config.json: "),
        ("[]", "a table of settings"),
        ('{"nix": 1}', "unknown setting"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            TrainerMon(path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        TrainerMon(path)


def test_settings_as_a_mapping_are_rejected_by_trainer_mon() -> None:
    with pytest.raises(ConfigError, match="path of a JSON file, not a dict: pass settings in Python to rankscope"):
        TrainerMon({"wg_distribution": True})  # type: ignore[arg-type]


def test_translation_of_a_document_is_json(tmp_path: Path) -> None:
    """The text of a watched file is compared with the text that other ranks read."""
    path = tmp_path / "monitor_config.json"
    path.write_text(FROM_THE_MANUAL)

    assert json.dumps(MonitorConfig.from_file(path).options)


def test_document_with_a_key_of_msprobe_alone_is_translated():
    document = {"wg_distribution": True, "step_interval": 3}

    assert MonitorConfig.from_msprobe(document) == MonitorConfig.from_mapping(document)
    assert "gradients" in MonitorConfig.from_mapping(document).quantities


@pytest.mark.parametrize("key", ["wg_distributon", "step_intervall", "xy_distribtion"])
def test_misspelt_key_of_msprobe_is_an_unknown_setting(key):
    with pytest.raises(ConfigError, match=f"unknown setting {key}; .*Did you mean "):
        MonitorConfig.from_mapping({key: True})


def test_shared_keys_alone_are_read_as_settings_of_a_monitor():
    assert ("norm", "max") == MonitorConfig.from_mapping({"ops": ["norm", "max"]}).ops
