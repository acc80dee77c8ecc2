"""Hyper-parameters of any type become JSON values of limited size, without secrets."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rankscope_exporter import ConfigError, Monitor, MonitorConfig
from rankscope_exporter.config.monitor_config import MAX_CHARACTERS, MAX_ITEMS, MAX_TEXT, storable
from rankscope_exporter.config.resolve import public_settings


class Schedule(enum.Enum):
    COSINE = "cosine"


@dataclasses.dataclass
class Section:
    warmup: int
    path: Path


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileTable(dict):
    def items(self):
        raise RuntimeError("a missing value")


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (0.1, 0.1),
        (None, None),
        (True, True),
        (Schedule.COSINE, "cosine"),
        (np.float32(0.5), 0.5),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1 << 70, str(1 << 70)),
        (Path("data"), "data"),
        (torch.bfloat16, "torch.bfloat16"),
        ((1, "two"), [1, "two"]),
        ({"b", "a"}, ["a", "b"]),
        ({1: 2}, {"1": 2}),
        (Section(3, Path("x")), {"warmup": 3, "path": "x"}),
        (argparse.Namespace(lr=0.1), {"lr": 0.1}),
        (torch.nn.Linear(2, 2), "Linear"),
        (torch.ones(2, 3), "Tensor of shape (2, 3)"),
        (torch.optim.AdamW, "torch.optim.adamw.AdamW"),
        (Hostile(), "Hostile"),
        (object(), "<object object>"),  # addresses differ between the processes and attempts of a run
        (HostileTable(lr=1), "{'lr': 1}"),
        ("bad \udcff", "bad \\udcff"),
    ],
)
def test_values_without_a_json_form_become_text(given, stored):
    assert {"value": stored} == storable({"value": given})


@pytest.mark.parametrize("name", ["api_key", "hub_token", "db_password"])
def test_secrets_are_masked_by_name_and_by_form(name):
    class Client:
        def __str__(self) -> str:
            return "https://me:hunter2@host"

    found = storable({"model": {name: "hunter2"}, "text": "hf_abcdefghijklmnopqrst", "client": Client()})

    assert {"model": {name: "***"}, "text": "***", "client": "https://***@host"} == found


@pytest.mark.thorough
def test_size_is_limited_and_the_result_is_stable():
    endless = []
    endless.extend([endless] * 50)
    table = {f"key {number}": "y" * 900 for number in range(200)}
    given = {"lr": 0.1, "labels": list(range(MAX_ITEMS + 50)), "prompt": "x" * (MAX_TEXT + 50)}
    given |= {"endless": endless, "table": table}
    found = storable(given)

    assert 0.1 == found["lr"]
    assert [*range(MAX_ITEMS - 1), "… 51 more"] == found["labels"]
    assert found["prompt"].endswith("x… (1,050 characters)")
    assert MAX_TEXT == len(found["prompt"])
    assert found["table"].endswith("characters omitted")
    assert len(json.dumps(found, ensure_ascii=False)) <= MAX_CHARACTERS
    assert found == storable(found)


def test_hyperparameters_are_part_of_the_settings_of_the_run():
    given = argparse.Namespace(lr=0.1, password="hunter2", net=torch.nn.ReLU())
    shown = public_settings(Monitor({"hyperparameters": vars(given)}).config)["hyperparameters"]

    assert {"lr": 0.1, "password": "***", "net": "ReLU"} == shown
    with pytest.raises(ConfigError, match=r"hyperparameters must be a table, such as vars\(args\), not \[1\]"):
        MonitorConfig(hyperparameters=[1])
