"""Check Prometheus (scraped targets, rules, Alertmanager) and Alertmanager (receivers, failed notifications)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from rankscope.access.service import UnreachableError
from rankscope.doctor.checks import CheckResult, Environment, fail, ok, warn
from rankscope.output.rows import printable
from rankscope_contract.wire.channel import SERVICE_DISCOVERY_PATH
from rankscope_dashboards.deploy.prometheus import RANKS_JOB, SERVICE_JOB

PROMETHEUS: Final = "Prometheus"
ALERTMANAGER: Final = "Alertmanager"
_FAILED: Final = "alertmanager_notifications_failed_total"


def prometheus(environment: Environment, url: str) -> Iterator[CheckResult]:
    """Yield the results of the checks of Prometheus at `url`: scraped jobs, rules and configured Alertmanagers."""
    try:
        targets = _data(environment, f"{url}/api/v1/targets?state=active").get("activeTargets", [])
        config = yaml.safe_load(str(_data(environment, f"{url}/api/v1/status/config").get("yaml", "")))
        groups = _data(environment, f"{url}/api/v1/rules").get("groups", [])
        managers = _data(environment, f"{url}/api/v1/alertmanagers").get("activeAlertmanagers", [])
    except (UnreachableError, yaml.YAMLError) as error:
        yield warn(
            PROMETHEUS, f"no response: {error}", "run rankscope up, or name the address of Prometheus with --prometheus"
        )
        return
    yield ok(PROMETHEUS, f"{url} responds")
    yield from _scraped(targets, looks_for_ranks=_looks_for_ranks(config))
    yield _rules(groups)
    if managers:
        yield ok(PROMETHEUS, f"sends alerts to {', '.join(sorted(manager['url'] for manager in managers))}")
    else:
        yield warn(PROMETHEUS, "sends alerts to no Alertmanager", "add `alerting:` to prometheus.yml: see docs/live.md")


def alertmanager(environment: Environment, url: str) -> Iterator[CheckResult]:
    """Yield the results of the checks of Alertmanager at `url`: receivers with an address, and failed notifications."""
    try:
        status = environment.get(f"{url}/api/v2/status").json()
        metrics = environment.get(f"{url}/metrics").body.decode("utf-8", "replace")
    except UnreachableError as error:
        yield warn(
            ALERTMANAGER,
            f"no response: {error}",
            "run rankscope up, or name the address of Alertmanager with --alertmanager",
        )
        return
    yield ok(ALERTMANAGER, f"{url} responds")
    named = _receivers_with_address(status)
    if named:
        yield ok(ALERTMANAGER, f"notifies {', '.join(named)}")
    else:
        yield warn(ALERTMANAGER, "notifies no receiver", "rankscope up --notify https://… or smtp://host:port?to=…")
    if failed := _sum(metrics, _FAILED):
        yield fail(ALERTMANAGER, f"{failed:.0f} notifications failed", "the log of Alertmanager names the address")


def _looks_for_ranks(config: Any) -> bool:
    """Return whether a scrape job gets its targets from the service (http_sd), so that it also finds future ranks."""
    jobs = (config.get("scrape_configs") or []) if isinstance(config, dict) else []
    asked = [str(source.get("url")) for job in jobs for source in job.get("http_sd_configs") or []]
    return any(urlsplit(url).path == SERVICE_DISCOVERY_PATH for url in asked)


def _scraped(targets: list[dict[str, Any]], *, looks_for_ranks: bool) -> Iterator[CheckResult]:
    for job, what in ((RANKS_JOB, "ranks"), (SERVICE_JOB, "service")):
        ours = [target for target in targets if target["labels"].get("job") == job]
        up = sum(target["health"] == "up" for target in ours)
        if not ours and job == RANKS_JOB and looks_for_ranks:
            yield ok(PROMETHEUS, "discovers ranks from the service; no rank is registered yet")
        elif not ours:
            yield warn(
                PROMETHEUS,
                f"scrapes no {what} (job {job})",
                "copy the scrape job from docs/live.md into prometheus.yml",
            )
        elif up == len(ours):
            yield ok(PROMETHEUS, f"scrapes the {what}: {up} of {len(ours)} up")
        else:
            error = next(target["lastError"] for target in ours if target["health"] != "up")
            text = f"scrapes the {what}: {up} of {len(ours)} up; {printable(error) or 'others not scraped yet'}"
            yield (fail if error else warn)(PROMETHEUS, text, "use the token and certificates of the ranks")


def _rules(groups: list[dict[str, Any]]) -> CheckResult:
    rules = [rule for group in groups if group["name"].startswith("rankscope") for rule in group["rules"]]
    if not rules:
        return warn(
            PROMETHEUS,
            "has no Rankscope alert rules",
            "add to prometheus.yml: rule_files: dashboards/provisioning/prometheus/*.rules.yml",
        )
    bad = [f"{rule['name']}: {rule.get('lastError', '')}" for rule in rules if rule["health"] == "err"]
    if bad:
        return fail(
            PROMETHEUS, f"cannot evaluate {printable(bad[0])}", "use the alert rule file of this Rankscope release"
        )
    return ok(PROMETHEUS, f"evaluates {len(rules)} Rankscope rules")


def _receivers_with_address(status: Any) -> list[str]:
    """Return the names of the Alertmanager receivers that have at least one address."""
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


def _data(environment: Environment, url: str) -> dict[str, Any]:
    """Return the field `data` of a response of the Prometheus API. Raises UnreachableError for any other response."""
    response = environment.get(url)
    document = response.json()
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        raise UnreachableError(f"{url}: not a Prometheus response (status {response.status})")
    return data


def _sum(page: str, metric: str) -> float:
    """Return the sum of a counter over all its series in a text in Prometheus' exposition format."""
    values = (line.rpartition(" ")[2] for line in page.splitlines() if line.startswith((metric + "{", metric + " ")))
    return sum(float(value) for value in values)
