"""Prometheus and Alertmanager: do they see us, have they our rules, and is there anybody they tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from rankscope.base.http_client import UnreachableError
from rankscope.doctor.environment import Surroundings
from rankscope.doctor.result import Finding, fail, ok, warn
from rankscope.output.rows import printable
from rankscope_contract.channel import SERVICE_DISCOVERY_PATH
from rankscope_dashboards.prometheus_config import RANKS_JOB, SERVICE_JOB

PROMETHEUS: Final = "Prometheus"
ALERTMANAGER: Final = "Alertmanager"
_FAILED: Final = "alertmanager_notifications_failed_total"


def prometheus(world: Surroundings, url: str) -> Iterator[Finding]:
    """Yield what Prometheus at `url` knows of us."""
    try:
        targets = _data(world, f"{url}/api/v1/targets?state=active").get("activeTargets", [])
        config = yaml.safe_load(str(_data(world, f"{url}/api/v1/status/config").get("yaml", "")))
        groups = _data(world, f"{url}/api/v1/rules").get("groups", [])
        managers = _data(world, f"{url}/api/v1/alertmanagers").get("activeAlertmanagers", [])
    except (UnreachableError, yaml.YAMLError) as error:
        yield warn(PROMETHEUS, f"does not answer: {error}", "rankscope up starts one; --prometheus names another")
        return
    yield ok(PROMETHEUS, f"{url} answers")
    yield from _scraped(targets, looks_for_ranks=_looks_for_ranks(config))
    yield _rules(groups)
    if managers:
        yield ok(PROMETHEUS, f"sends alerts to {', '.join(sorted(manager['url'] for manager in managers))}")
    else:
        yield warn(PROMETHEUS, "sends alerts to nobody", "add `alerting:` to prometheus.yml, as docs/live.md shows")


def alertmanager(world: Surroundings, url: str) -> Iterator[Finding]:
    """Yield whether Alertmanager at `url` tells anybody."""
    try:
        status = world.get(f"{url}/api/v2/status").json()
        metrics = world.get(f"{url}/metrics").body.decode("utf-8", "replace")
    except UnreachableError as error:
        yield warn(ALERTMANAGER, f"does not answer: {error}", "rankscope up starts one; --alertmanager names another")
        return
    yield ok(ALERTMANAGER, f"{url} answers")
    named = _told(status)
    if named:
        yield ok(ALERTMANAGER, f"tells {', '.join(named)}")
    else:
        yield warn(ALERTMANAGER, "tells nobody", "rankscope up --notify https://… or smtp://host:port?to=…")
    if failed := _sum(metrics, _FAILED):
        yield fail(ALERTMANAGER, f"{failed:.0f} messages could not be delivered", "its log names the address")


def _looks_for_ranks(config: Any) -> bool:
    """Return whether a job asks our service who is there, so that ranks are found once there are some."""
    jobs = (config.get("scrape_configs") or []) if isinstance(config, dict) else []
    asked = [str(source.get("url")) for job in jobs for source in job.get("http_sd_configs") or []]
    return any(urlsplit(url).path == SERVICE_DISCOVERY_PATH for url in asked)


def _scraped(targets: list[dict[str, Any]], *, looks_for_ranks: bool) -> Iterator[Finding]:
    for job, what in ((RANKS_JOB, "ranks"), (SERVICE_JOB, "service")):
        ours = [target for target in targets if target["labels"].get("job") == job]
        up = sum(target["health"] == "up" for target in ours)
        if not ours and job == RANKS_JOB and looks_for_ranks:
            yield ok(PROMETHEUS, "asks the service for ranks, and none is there yet")
        elif not ours:
            yield warn(PROMETHEUS, f"scrapes no {what} (job {job})", "docs/live.md has the lines for prometheus.yml")
        elif up == len(ours):
            yield ok(PROMETHEUS, f"scrapes the {what}: {up} of {len(ours)} up")
        else:
            error = next(target["lastError"] for target in ours if target["health"] != "up")
            text = f"scrapes the {what}: {up} of {len(ours)} up; {printable(error) or 'the others were not tried yet'}"
            yield (fail if error else warn)(PROMETHEUS, text, "token and certificates must be those of the ranks")


def _rules(groups: list[dict[str, Any]]) -> Finding:
    rules = [rule for group in groups if group["name"].startswith("rankscope") for rule in group["rules"]]
    if not rules:
        return warn(PROMETHEUS, "has none of our rules", "rule_files: dashboards/provisioning/prometheus/*.rules.yml")
    bad = [f"{rule['name']}: {rule.get('lastError', '')}" for rule in rules if rule["health"] == "err"]
    if bad:
        return fail(PROMETHEUS, f"cannot evaluate {printable(bad[0])}", "use the rule file of this release")
    return ok(PROMETHEUS, f"evaluates our {len(rules)} rules")


def _told(status: Any) -> list[str]:
    """Return the receivers that have an address, each with how many."""
    try:
        document = yaml.safe_load(status["config"]["original"])
        receivers = document["receivers"]
    except (KeyError, TypeError, yaml.YAMLError):
        return []
    named = []
    for receiver in receivers:
        ways = sum(len(value) for key, value in receiver.items() if key.endswith("_configs") and value)
        if ways:
            named.append(printable(str(receiver["name"])))
    return named


def _data(world: Surroundings, url: str) -> dict[str, Any]:
    """Return the `data` of an answer of Prometheus. Raises UnreachableError for one that is none."""
    answer = world.get(url)
    document = answer.json()
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        raise UnreachableError(f"{url}: this is not Prometheus (status {answer.status})")
    return data


def _sum(page: str, metric: str) -> float:
    """Return the sum over the series of a counter on a text page."""
    values = (line.rpartition(" ")[2] for line in page.splitlines() if line.startswith((metric + "{", metric + " ")))
    return sum(float(value) for value in values)
