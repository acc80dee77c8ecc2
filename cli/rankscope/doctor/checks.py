"""The checks of `rankscope doctor`: this machine, service, store, ranks, Prometheus, Alertmanager and ports.

Each check yields its findings in the order of the report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import yaml

from rankscope.access.service import Response, UnreachableError
from rankscope.doctor.report import CheckResult, Endpoints, Environment, State
from rankscope.output.rows import printable
from rankscope.up.machine import ALERTMANAGER, PROMETHEUS
from rankscope_contract.wire import channel
from rankscope_dashboards.deploy.prometheus import RANKS_JOB, SERVICE_JOB

if TYPE_CHECKING:
    from rankscope_storage.api.store import Store

OLDEST_PYTHON: Final = (3, 11)
_WHERE: Final = {
    "pyarrow": ("everywhere", "run pip install . in a checkout of Rankscope"),
    "prometheus-client": ("everywhere", "run pip install . in a checkout of Rankscope"),
    "torch": ("where training runs", "install the build of torch for this machine; Rankscope never replaces torch"),
    "deltalake": ("where the store is read or written", "run pip install '.[store]' in a checkout of Rankscope"),
    "duckdb": ("where the store is read or written", "run pip install '.[store]' in a checkout of Rankscope"),
    "aiohttp": ("where the service runs", "run pip install '.[service]' in a checkout of Rankscope"),
}

SKEW_SECONDS: Final = 2.0  # the Date header has a resolution of one second
SYNCHRONISE: Final = "synchronise both clocks with NTP: timedatectl"
LOW_BYTES: Final = 5 << 30
NO_BYTES: Final = 512 << 20
MAX_SENDERS: Final = 10  # of refused senders of remote write
MAX_RANKS_CHECKED: Final = 8
MAX_RANKS_NAMED: Final = 3
_FAILED: Final = "alertmanager_notifications_failed_total"

Finding = tuple[State, str, str]
"""State, text and recommended action of the result of a check."""


def ok(text: str) -> Finding:
    """Return the finding of a check that passed."""
    return State.OK, text, ""


def warn(text: str, remedy: str) -> Finding:
    """Return the finding of a check that found something that needs attention."""
    return State.WARN, text, remedy


def fail(text: str, remedy: str) -> Finding:
    """Return the finding of a failed check: a part of the installation does not work."""
    return State.FAIL, text, remedy


def run_checks(environment: Environment, where: Endpoints) -> Iterator[CheckResult]:
    """Yield the results of all checks, in the order of the report."""
    for area, check in _CHECKS.items():
        for finding in check(environment, where):
            yield CheckResult(area, *finding)


def _machine(environment: Environment, _: Endpoints) -> Iterator[Finding]:
    """Check the versions of Python and of packages, and the executables."""
    python = environment.python()
    is_new = _numbers(python) >= OLDEST_PYTHON
    yield ok(f"Python {python}") if is_new else fail(f"Python {python}", "use Python 3.11 or newer")
    required_versions = environment.required_versions()
    for package, (where, remedy) in _WHERE.items():
        version, least = environment.installed_version(package), required_versions.get(package, "0")
        if version is None:
            yield warn(f"{package} is not installed; required {where}", remedy)
        elif _numbers(version) < _numbers(least):
            yield fail(f"{package} {version}: {least} or newer is required {where}", remedy)
        else:
            yield ok(f"{package} {version}")
    for executable in (PROMETHEUS, ALERTMANAGER):
        found = environment.executable(executable)
        yield ok(f"{executable.title} {found}") if found else warn(*executable.remedy.split(": ", 1))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version text as a tuple for comparisons; empty if there are none."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _service(environment: Environment, where: Endpoints) -> Iterator[Finding]:
    """Check the response, the health, the clock and the token of the service, and the problems that it reports."""
    url = where.service
    try:
        response = environment.get(url + channel.HEALTH_PATH)
    except UnreachableError as error:
        remedy = "run rankscope up or rankscope serve, or name the address of the service with --url"
        yield fail(f"no response: {error}", remedy)
        return
    document = response.json()
    if not isinstance(document, dict) or "status" not in document:
        remedy = "see the processes that listen on the ports, below in this report"
        yield fail(f"the server at {url} is not Rankscope (status {response.status})", remedy)
        return
    if document["status"] == "ok":
        yield ok(f"{url} responds")
    else:
        yield fail(f"{url} is degraded: {document.get('reason')}", "see the log of the service")
    skew = _skew_seconds(environment, response)
    if skew is not None and abs(skew) > SKEW_SECONDS:
        ahead = "ahead of" if skew > 0 else "behind"
        yield warn(f"the clock of the service is {abs(skew):.0f} s {ahead} the clock of this machine", SYNCHRONISE)
    elif skew is not None:
        yield ok("the clock of the service agrees with the clock of this machine")
    yield _token(environment.get(url + channel.TARGETS_PATH, where.token), where.token)
    yield from _reported(environment, where)


def _skew_seconds(environment: Environment, response: Response) -> float | None:
    """Return the number of seconds by which the server's clock is ahead of this machine's clock.

    Returns None if the response has no valid Date header.
    """
    try:
        sent_at = parsedate_to_datetime(response.headers["date"])
    except (KeyError, ValueError):
        return None
    sent_at = sent_at if sent_at.tzinfo else sent_at.replace(tzinfo=UTC)
    # The Date header is truncated to whole seconds: add half a second, the expected error.
    return sent_at.timestamp() + 0.5 - environment.now()


def _token(response: Response, token: str | None) -> Finding:
    if response.status == 200:
        return ok("accepts the token" if token else "requires no token")
    if response.status == 401 and token:
        return fail("rejects the token", "use the value of [service] token: export RANKSCOPE_TOKEN=…")
    if response.status == 401:
        return fail("requires a token", "export RANKSCOPE_TOKEN=…, or name the configuration file with --config")
    text = f"the request for the list of targets failed with status {response.status}"
    return fail(text, "see the log of the service")


def _reported(environment: Environment, where: Endpoints) -> Iterator[Finding]:
    """Yield the senders of remote write with refused requests, and the receivers that do not get notifications.

    An older service does not report them.
    """
    try:
        document = environment.get(where.service + channel.STATUS_PATH, where.token).json()
    except UnreachableError:
        return
    if not isinstance(document, dict):
        return
    senders = document.get("refused_senders", ())
    for sender in senders[:MAX_SENDERS]:
        refused, accepted = sender["requests"], sender.get("accepted_requests", 0)
        share = f"{refused:,} of {refused + accepted:,}" if accepted else "all"
        yield fail(
            f"refuses {share} requests of the remote write sender {sender['name']}: {sender['reason']}",
            "the samples are lost; correct the remote_write settings of this sender, see docs/prometheus.md",
        )
    if others := senders[MAX_SENDERS:]:
        page = f"see {where.service}{channel.SERVICE_PAGE_PATH}"
        yield fail(f"refuses requests of {len(others)} other remote write senders", page)
    for sentence in document.get("shared_names", ()):
        yield warn(sentence, "export another RANKSCOPE_RUN in one of the job scripts")
    if found := document.get("notifications"):
        yield warn(f"notifications: {found}", "check the address in [notify] urls: rankscope notify test FILE")


def _store(environment: Environment, where: Endpoints) -> Iterator[Finding]:
    """Check that the store can be opened and written, and that its disk has free space."""
    from rankscope_storage.api.store import Store, is_store
    from rankscope_storage.base.errors import StoreError
    from rankscope_storage.base.location import is_url, located

    exists = False
    try:
        place = located(where.store)
        if exists := place.exists() if isinstance(place, Path) else is_store(place):
            owners = list(_owners(Store.open(place)))  # a store of an earlier release cannot be read
            yield ok(f"{where.store} can be opened{' and written' if is_url(where.store) else ''}")
            yield from owners
        else:
            yield warn(
                f"{where.store} does not exist yet", "rankscope serve creates it; name another store with --store"
            )
    except (StoreError, OSError) as error:  # such as a folder above it that cannot be read
        reason = error if isinstance(error, StoreError) else error.strerror
        yield fail(f"{where.store} cannot be opened: {reason}", "name another store with --store")
    if is_url(where.store):
        return
    folder = Path(where.store)
    if exists:
        try:
            environment.check_writable(folder)
            yield ok("can be written")
        except OSError as error:
            remedy = "the user that runs the service must be able to write the store"
            yield warn(f"{folder} is not writable for this user: {error.strerror}", remedy)
    free = environment.free_bytes(folder)
    text = f"{free / (1 << 30):,.1f} GiB free on its disk"
    if free < NO_BYTES:
        yield fail(text, "free disk space: on a full disk commits fail, and then the rings overflow")
    else:
        yield warn(text, "free disk space soon") if free < LOW_BYTES else ok(text)


def _owners(store: Store) -> Iterator[Finding]:
    """Name the service of each shard, of a store that several services share."""
    from rankscope_storage.log.services import LEASE_SECONDS

    for shard, owner in store.owners().items():
        start = f"start it: rankscope serve --shard {shard}"
        if shard.count == 1:
            continue
        if owner is None:
            yield warn(f"the shard {shard} has no service", start)
            continue
        text = f"{owner.url or owner.owner}, {owner.owner}, last commit {owner.age}"
        if owner.seconds_ago > LEASE_SECONDS:
            yield warn(f"the service of the shard {shard} is dead: {text}", start)
        else:
            duty = ", maintains the store" if owner.is_maintaining else ""
            yield ok(f"the shard {shard} has the service {text}{duty}")


def _ranks(environment: Environment, where: Endpoints) -> Iterator[Finding]:
    """Check the registered ranks: health, lost records, clocks, and the clients that read their pages.

    Yield nothing if the service does not return the list of registered ranks.
    """
    try:
        response = environment.get(where.service + channel.TARGETS_PATH, where.token)
    except UnreachableError:
        return
    targets = response.json() if response.status == 200 else None
    if not isinstance(targets, list):
        return
    live = [target for target in targets if target["health"] != "gone"]
    if not live:
        yield warn("no rank is registered", f"in the training job: export RANKSCOPE_INGEST_URL={where.service}")
        return
    counts = Counter(target["health"] for target in live)
    words = ", ".join(f"{count} {health}" for health, count in sorted(counts.items()))
    yield ok(f"{len(live)} registered: {words}")
    for target in [target for target in live if target["health"] == "failing"][:MAX_RANKS_NAMED]:
        text = f"{_name(target)} cannot be polled: {printable(str(target['last_error']))}"
        yield warn(text, "see the output of the training process of the rank")
    if lost := sum(target["records_lost"] for target in live):
        remedy = "increase serve.ring_records or enable the spool; events of type gap list the lost records"
        yield warn(f"records that were overwritten before the service read them: {lost}", remedy)
    yield from _pages_of_ranks(environment, live[:MAX_RANKS_CHECKED])


def _pages_of_ranks(environment: Environment, live: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    skews: list[tuple[float, str]] = []
    # For each page, the clients that read it, with the seconds since their last request to each rank.
    ages: dict[str, dict[str, list[float]]] = {channel.RECORDS_PATH: {}, channel.METRICS_PATH: {}}
    for target in live:
        try:
            response = environment.get(target["url"] + channel.HEALTH_PATH)
        except UnreachableError as error:
            remedy = "no action is needed if the service can reach the rank"
            yield warn(f"{_name(target)} is unreachable from this machine: {error}", remedy)
            continue
        skews.append((_skew_seconds(environment, response) or 0.0, _name(target)))
        document = response.json()
        for reader in document.get("readers", []) if isinstance(document, dict) else []:
            of_page = ages.setdefault(reader["page"], {})
            of_page.setdefault(printable(str(reader["by"])), []).append(float(reader["seconds_ago"]))
    if not skews:
        return
    skew, name = max(skews, key=lambda one: abs(one[0]))
    if abs(skew) <= SKEW_SECONDS:
        yield ok("the clocks of the ranks agree with the clock of this machine")
    else:
        yield warn(f"the clock of {name} differs by {skew:+.0f} s from that of this machine", SYNCHRONISE)
    for page, remedy in (
        (channel.RECORDS_PATH, "the service does not poll the ranks: see its log"),
        (channel.METRICS_PATH, "Prometheus does not scrape the ranks: use rankscope up, or see docs/live.md"),
    ):
        clients = [f"{by} ({len(of)} of {len(skews)} ranks, {max(of):.0f} s ago)" for by, of in ages[page].items()]
        yield ok(f"{page} is read by {', '.join(clients)}") if clients else warn(f"no client reads {page}", remedy)


def _name(target: Mapping[str, Any]) -> str:
    return printable(f"{target['run']}/{target['rank']}")


def _prometheus(environment: Environment, where: Endpoints) -> Iterator[Finding]:
    """Check the scraped jobs, the rules and the configured Alertmanagers of Prometheus."""
    url = where.prometheus
    try:
        targets = _data(environment, f"{url}/api/v1/targets?state=active").get("activeTargets", [])
        config = yaml.safe_load(str(_data(environment, f"{url}/api/v1/status/config").get("yaml", "")))
        groups = _data(environment, f"{url}/api/v1/rules").get("groups", [])
        managers = _data(environment, f"{url}/api/v1/alertmanagers").get("activeAlertmanagers", [])
    except (UnreachableError, yaml.YAMLError) as error:
        yield warn(f"no response: {error}", "run rankscope up, or name the address of Prometheus with --prometheus")
        return
    yield ok(f"{url} responds")
    yield from _scraped(targets, looks_for_ranks=_looks_for_ranks(config))
    yield _rules(groups)
    if managers:
        yield ok(f"sends alerts to {', '.join(sorted(manager['url'] for manager in managers))}")
    else:
        yield warn("sends alerts to no Alertmanager", "add `alerting:` to prometheus.yml: see docs/live.md")


def _data(environment: Environment, url: str) -> dict[str, Any]:
    """Return the field `data` of a response of the Prometheus API. Raises UnreachableError for any other response."""
    response = environment.get(url)
    document = response.json()
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        raise UnreachableError(f"{url}: not a Prometheus response (status {response.status})")
    return data


def _looks_for_ranks(config: Any) -> bool:
    """Return whether a scrape job gets its targets from the service (http_sd), so that it also finds future ranks."""
    jobs = (config.get("scrape_configs") or []) if isinstance(config, dict) else []
    asked = [str(source.get("url")) for job in jobs for source in job.get("http_sd_configs") or []]
    return any(urlsplit(url).path == channel.SERVICE_DISCOVERY_PATH for url in asked)


def _scraped(targets: Sequence[Mapping[str, Any]], *, looks_for_ranks: bool) -> Iterator[Finding]:
    for job, what in ((RANKS_JOB, "ranks"), (SERVICE_JOB, "service")):
        ours = [target for target in targets if target["labels"].get("job") == job]
        up = sum(target["health"] == "up" for target in ours)
        if not ours and job == RANKS_JOB and looks_for_ranks:
            yield ok("discovers ranks from the service; no rank is registered yet")
        elif not ours:
            remedy = "copy the scrape job from docs/live.md into prometheus.yml"
            yield warn(f"scrapes no {what} (job {job})", remedy)
        elif up == len(ours):
            yield ok(f"scrapes the {what}: {up} of {len(ours)} up")
        else:
            error = next(target["lastError"] for target in ours if target["health"] != "up")
            text = f"scrapes the {what}: {up} of {len(ours)} up; {printable(error) or 'others not scraped yet'}"
            yield (fail if error else warn)(text, "use the token and certificates of the ranks")


def _rules(groups: Sequence[Mapping[str, Any]]) -> Finding:
    rules = [rule for group in groups if group["name"].startswith("rankscope") for rule in group["rules"]]
    if not rules:
        remedy = "add to prometheus.yml: rule_files: dashboards/provisioning/prometheus/*.rules.yml"
        return warn("has no Rankscope alert rules", remedy)
    bad = [f"{rule['name']}: {rule.get('lastError', '')}" for rule in rules if rule["health"] == "err"]
    if bad:
        return fail(f"cannot evaluate {printable(bad[0])}", "use the alert rule file of this Rankscope release")
    return ok(f"evaluates {len(rules)} Rankscope rules")


def _alertmanager(environment: Environment, where: Endpoints) -> Iterator[Finding]:
    """Check that Alertmanager has receivers with an address, and that no notification failed."""
    url = where.alertmanager
    try:
        status = environment.get(f"{url}/api/v2/status").json()
        metrics = environment.get(f"{url}/metrics").body.decode("utf-8", "replace")
    except UnreachableError as error:
        yield warn(f"no response: {error}", "run rankscope up, or name the address of Alertmanager with --alertmanager")
        return
    yield ok(f"{url} responds")
    if named := _receivers_with_address(status):
        yield ok(f"notifies {', '.join(named)}")
    else:
        yield warn("notifies no receiver", "rankscope up --notify https://… or smtp://host:port?to=…")
    lines = (line for line in metrics.splitlines() if line.startswith((f"{_FAILED}{{", f"{_FAILED} ")))
    if failed := sum(float(line.rpartition(" ")[2]) for line in lines):
        yield fail(f"{failed:.0f} notifications failed", "the log of Alertmanager names the address")


def _receivers_with_address(status: Any) -> list[str]:
    """Return the names of the Alertmanager receivers that have at least one address."""
    try:
        receivers = yaml.safe_load(status["config"]["original"])["receivers"]
    except (KeyError, TypeError, yaml.YAMLError):
        return []
    return [
        printable(str(receiver["name"]))
        for receiver in receivers
        if any(value for key, value in receiver.items() if key.endswith("_configs"))
    ]


def _ports(environment: Environment, where: Endpoints) -> Iterator[Finding]:
    """Name the process that listens on each port of this machine."""
    for program, port in where.ports:
        yield ok(f"{port} ({program}): {environment.listener(port) or 'free'}")


_CHECKS: Final[Mapping[str, Callable[[Environment, Endpoints], Iterator[Finding]]]] = {
    "This machine": _machine,
    "Service": _service,
    "Store": _store,
    "Ranks": _ranks,
    "Prometheus": _prometheus,
    "Alertmanager": _alertmanager,
    "Ports": _ports,
}
"""The checks, by the area of the report that they fill."""
