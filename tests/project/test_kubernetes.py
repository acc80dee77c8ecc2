"""The files for Kubernetes match its schema, and their configuration and number of services are consistent."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from rankscope_ingest.base.config_file import load_config

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "kubernetes.json").read_text())
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
OBJECTS = [item for name in KUSTOMIZATION["resources"] for item in yaml.safe_load_all((DEPLOY / name).read_text())]
(STATEFUL_SET,) = (item for item in OBJECTS if item["kind"] == "StatefulSet")


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: item["metadata"]["name"])
def test_object_matches_the_schema_of_kubernetes(item):
    jsonschema.validate(item, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(item | {"spec": item["spec"] | {"unknown": 1}}, SCHEMA)


def test_each_pod_is_one_of_n_services_with_its_address_and_the_token():
    (container,) = STATEFUL_SET["spec"]["template"]["spec"]["containers"]
    services = dict(line.split("=") for line in (DEPLOY / "services.env").read_text().split())
    ((source,), (count,)) = KUSTOMIZATION["configMapGenerator"], KUSTOMIZATION["replicas"]
    token = {"RANKSCOPE_TOKEN": "secret"}
    config = load_config(DEPLOY / "rankscope.toml", {"store.shard": f"1/{services['SERVICES']}"}, environment=token)

    assert {"envs": ["services.env"], "files": ["rankscope.toml"], "name": "rankscope"} == source
    assert {int(services["SERVICES"])} == {count["count"], STATEFUL_SET["spec"]["replicas"], config.store.owned.count}
    assert ["--shard", "$(POD_INDEX)/$(SERVICES)"] == container["args"][3:5]
    assert {"RANKSCOPE_TOKEN_FILE", "SERVICES", "POD_INDEX"} == {variable["name"] for variable in container["env"]}
    assert STATEFUL_SET["spec"]["template"]["spec"]["setHostnameAsFQDN"]
    assert config.service.listen.endswith(f":{container['ports'][0]['containerPort']}")
