"""The Grafana board "Pipeline": targets, lag, rows, losses and cost of the telemetry itself."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders

from rankscope_contract.metrics import catalogue
from rankscope_contract.metrics.spec import MetricSpec
from rankscope_dashboards.boards.elements.board import Section, make_board, sized
from rankscope_dashboards.boards.elements.panels import (
    ZERO_IS_GOOD,
    PanelBuilder,
    PanelText,
    Query,
    count_text,
    fraction_text,
    stacked,
    stat_panel,
    time_series_panel,
    value_texts,
)
from rankscope_dashboards.boards.elements.selectors import (
    AHEAD,
    RANKS,
    RATE_WINDOW,
    SERVICE_RANKS,
    SERVICE_RUN,
    at_end,
    once,
    ranks,
    rate,
)
from rankscope_storage.base import service_catalogue

ONCE: Final = "attach|warm_up"
"""Regular expression for values of the label `thread` in the metric of the CPU time of Rankscope.

It matches work that the monitor does only once, at its start."""

NOT_SERIES: Final = 'reason!~"series_.*"'
"""Label matcher for lost records and events. The store contains the series that exceed the limit of `/metrics`."""

NO_SERVICE: Final = "Prometheus does not scrape the service, or it is down"
NO_EXPORTERS: Final = "The service scrapes no other exporters"
NO_REMOTE_WRITE: Final = "No Prometheus writes to the service"


def board() -> builders.Dashboard:
    """Return the board "Pipeline" without its uid, which `boards()` sets."""
    sections = (
        Section("Service", sized(8, 5, _lost(), _targets(), _faults())),
        Section(
            "From ranks to the store",
            sized(8, 8, _records(), _received_bytes(), _lag())
            + sized(12, 8, _rows_committed())
            + sized(6, 8, _since_commit(), _rows_pending()),
        ),
        Section(
            "Commits, compaction, failures and drops",
            sized(6, 8, _commit_seconds(), _compaction(), _scrape_failures(), _dropped()),
        ),
        Section("Cost on the ranks", sized(8, 8, _overhead(), _sampling_interval(), _ring())),
        Section(
            "Other sources and notifications",
            sized(8, 8, _exporter_scrapes(), _remote_write(), _notifications()),
            is_folded=True,
        ),
    )
    return make_board("Pipeline", "Targets, lag, losses and cost of the telemetry.", sections)


def _lost() -> PanelBuilder:
    text = count_text(
        "Lost data",
        "Records of this run that were overwritten, or lost with their rank, before the service read them; records and "
        "events that the selected ranks dropped; and rows of all runs that no store accepts. Each is a gap in the "
        "history. Above 0: check whether the service was down, and the folder `_quarantine` of the store. A spool "
        "preserves the records of a killed rank.",
        thresholds=ZERO_IS_GOOD,
        mappings=value_texts({"0": ("nothing", "green")}),
        empty=NO_SERVICE,
    )
    parts = (
        f"sum by (run) {once(service_catalogue.LOST_RECORDS, at_end(service_catalogue.LOST_RECORDS, SERVICE_RUN))}",
        f"sum by (reason) {once(catalogue.DROPPED, at_end(catalogue.DROPPED, ranks(NOT_SERIES)))}",
        f"max({at_end(service_catalogue.ROWS_SET_ASIDE)})",
    )
    return stat_panel(text, Query(f"sum({' or '.join(parts)})", instant=True))


def _targets() -> PanelBuilder:
    text = count_text(
        "Targets",
        "Processes of ranks that have registered at the service, and other exporters, by health. All should be healthy "
        "while they train. Others: `/api/v1/targets` of the service lists them with the reason of the last failure.",
        empty=NO_SERVICE,
    )
    ranks_by, others_by = (
        f"sum by (health) {once(metric, metric.name)}"
        for metric in (service_catalogue.TARGETS, service_catalogue.EXPORTERS)
    )
    others = Query(f"{others_by} > 0", "exporters {{health}}", instant=True)
    return stat_panel(text, Query(ranks_by, "{{health}}", instant=True), others, with_names=True, bad_name="failing")


def _faults() -> PanelBuilder:
    text = count_text(
        "Internal errors",
        "Errors inside Rankscope that it caught so that training continues: on the selected ranks, and in background "
        "tasks of the service. 0 is normal. The logs and events of type `fault` contain the message: please report it.",
        thresholds=ZERO_IS_GOOD,
    )
    faults = f"sum by (run) {once(catalogue.FAULTS, at_end(catalogue.FAULTS, RANKS, AHEAD))}"
    tasks = once(service_catalogue.BACKGROUND_ERRORS, at_end(service_catalogue.BACKGROUND_ERRORS, window=AHEAD))
    return stat_panel(text, Query(f"sum({faults} or {tasks})"))


def _records() -> PanelBuilder:
    text = PanelText(
        title="Records received",
        description="Records of all ranks that the service receives per second. It is steps per second times ranks. "
        "0 while ranks train: check the panels Targets and Failed polls.",
        unit="suffix: records/s",
        empty=NO_SERVICE,
    )
    return time_series_panel(text, Query(_rate(service_catalogue.RECORDS_INGESTED), "records"))


def _received_bytes() -> PanelBuilder:
    text = PanelText(
        title="Bytes received",
        description="Bytes per second that the service receives from ranks. It grows with the number of measured "
        "tensors. If it is too much for the network, sample fewer steps or fewer tensors.",
        unit="Bps",
        empty=NO_SERVICE,
    )
    return time_series_panel(text, Query(_rate(service_catalogue.BYTES_INGESTED), "bytes"))


def _rows_committed() -> PanelBuilder:
    text = PanelText(
        title="Rows committed",
        description="Rows per second that the service commits to the store, by dataset. A level that does not change "
        "is normal during training. 0 while records arrive: the disk is full, or the store is not writable.",
        unit="suffix: rows/s",
        empty=NO_SERVICE,
    )
    query = _rate(service_catalogue.ROWS_COMMITTED)
    return stacked(time_series_panel(text, Query(query, "{{dataset}}"), many=True))


def _lag() -> PanelBuilder:
    text = count_text(
        "Ingest lag",
        "Records that a rank has published and the service has not committed yet, for the rank with the most. A "
        "sawtooth between two commits is normal. A line that only rises means that the service is too slow and will "
        "lose records. A line that ends means that the service is down.",
        empty="No rank of this run is alive",
    )
    query = f"max by (run) ({service_catalogue.LAG_RECORDS.name}{SERVICE_RANKS})"
    return time_series_panel(text, Query(query, "furthest behind"))


def _since_commit() -> PanelBuilder:
    text = PanelText(
        title="Since last commit",
        description="Time since the last commit to the store, over all runs of the service. A few seconds are normal "
        "during training. The time grows if nothing trains, the disk is full, or the service is down.",
        unit="s",
        empty="The service made no commit in the last hour",
    )
    # Use the last value of the past hour: a service that is down exports nothing, and the line must continue to rise.
    last = f"last_over_time({service_catalogue.LAST_COMMIT.name}[1h])"
    return time_series_panel(text, Query(f"time() - max({last} > 0)", "since last commit"))


def _rows_pending() -> PanelBuilder:
    text = count_text(
        "Rows pending",
        "Rows in the memory of the service that are not committed yet. A sawtooth is normal. If it only rises, "
        "commits fail or take too long: see the duration of a commit.",
        empty=NO_SERVICE,
    )
    return time_series_panel(text, Query(f"max({service_catalogue.ROWS_PENDING.name})", "rows"))


def _commit_seconds() -> PanelBuilder:
    text = PanelText(
        title="Duration of a commit",
        description="Duration of the latest flush to the store with its commit. Less than a second is normal on a "
        "local disk. If it approaches the interval between commits, the disk is too slow.",
        unit="s",
        empty=NO_SERVICE,
    )
    return time_series_panel(text, Query(f"max({service_catalogue.COMMIT_SECONDS.name})", "latest commit"))


def _compaction() -> PanelBuilder:
    text = PanelText(
        title="Compaction",
        description="Commits to the store per second, files that compactions removed, and the larger ones that they "
        "added instead. Compaction runs after 50 commits, and every half an hour. No removed file for hours during "
        "training: the log of the service contains the reason, and queries become slow.",
        unit="suffix: /s",
        empty=NO_SERVICE,
    )
    commits = Query(_rate(service_catalogue.COMMITS), "commits")
    return time_series_panel(text, Query(_rate(service_catalogue.COMPACTED_FILES), "files {{change}}"), commits)


def _scrape_failures() -> PanelBuilder:
    text = PanelText(
        title="Failed polls",
        description="Polls of ranks that failed, per second and reason. 0 is normal. `timeout` on all ranks: the "
        "service has too little CPU. `refused`: the rank has ended. The log of the service names the rank.",
        unit="suffix: polls/s",
        empty=NO_SERVICE,
    )
    rates = _rate(service_catalogue.SCRAPE_FAILURES)
    return time_series_panel(text, _reasons(rates, f"sum{rates}"))


def _dropped() -> PanelBuilder:
    text = PanelText(
        title="Dropped by the ranks",
        description="Records, series and events that the selected ranks dropped per second, by reason. 0 is normal. "
        "Reasons that begin with `series_`: more tensors than the series limit; the store still contains all of them.",
        unit="suffix: items/s",
        empty="The selected ranks dropped nothing yet, or have ended",
    )
    rates = rate(catalogue.DROPPED)
    return time_series_panel(text, _reasons(f"sum by (run, reason) {rates}", f"sum by (run) {rates}"))


def _overhead() -> PanelBuilder:
    text = fraction_text(
        "Monitoring overhead",
        "CPU time of Rankscope per second, on the rank with the highest value, without one-time work at the start. A "
        "few percent of one core are normal. `max_overhead` limits this value by sampling fewer steps.",
        maximum=None,
    )
    own = rate(catalogue.OVERHEAD_SECONDS, f'thread!~"{ONCE}"')
    return time_series_panel(text, Query(f"max by (run) (sum by (run, rank) {own})", "highest rank"))


def _sampling_interval() -> PanelBuilder:
    text = count_text(
        "Sampling interval factor",
        "1: the sampling interval is as configured. Above 1: monitoring exceeded `max_overhead`, and all ranks "
        "multiply the interval by this factor. Events of type `budget` contain the time and the reason.",
    )
    return time_series_panel(text, Query(f"max by (run) ({catalogue.SAMPLING_STRETCH.name}{RANKS})", "factor"))


def _ring() -> PanelBuilder:
    text = count_text(
        "Records in the ring",
        "Records in the memory of the rank with the most, and those of them that no store has committed. The second "
        "line falls to 0 at each commit. If it reaches the first one, the rank overwrites records that were not read.",
    )
    metrics = {"in the ring": catalogue.RING_RECORDS, "not committed": catalogue.RING_UNCOMMITTED}
    queries = [Query(f"max by (run) ({of.name}{RANKS})", name) for name, of in metrics.items()]
    return time_series_panel(text, *queries)


def _exporter_scrapes() -> PanelBuilder:
    text = PanelText(
        title="Scrapes of other exporters",
        description="Scrapes of external exporters, samples read and samples dropped, per second. All scrapes should "
        "be `ok`. `skipped`: the store is behind, or too many exporters do not respond.",
        unit="suffix: /s",
        empty=NO_EXPORTERS,
    )
    return time_series_panel(
        text,
        Query(_rate(service_catalogue.EXPORTER_SCRAPES), "scrapes {{outcome}}"),
        Query(_rate(service_catalogue.EXPORTER_SAMPLES), "samples {{how}}"),
        Query(f"{_rate(service_catalogue.EXPORTER_SAMPLES_DROPPED)} > 0", "dropped {{reason}}"),
    )


def _remote_write() -> PanelBuilder:
    text = PanelText(
        title="Samples by remote write",
        description="Samples and requests per second that a Prometheus sends, and dropped items. A constant level "
        "is normal. Dropped items: the label reason shows why.",
        unit="suffix: /s",
        empty=NO_REMOTE_WRITE,
    )
    return time_series_panel(
        text,
        Query(_rate(service_catalogue.REMOTE_WRITE_SAMPLES), "samples"),
        Query(f"{_rate(service_catalogue.REMOTE_WRITE_REQUESTS)} > 0", "requests {{outcome}}"),
        Query(f"{_rate(service_catalogue.REMOTE_WRITE_DROPPED)} > 0", "dropped {{reason}}"),
    )


def _notifications() -> PanelBuilder:
    text = PanelText(
        title="Notifications",
        description="Notifications of the service per second, and attempts to deliver them, by outcome. 0 is normal "
        "without incidents. `failed`: check the addresses with `rankscope doctor`.",
        unit="suffix: /s",
        empty=NO_SERVICE,
    )
    attempts = Query(_rate(service_catalogue.NOTIFICATION_ATTEMPTS), "attempts {{outcome}}")
    return time_series_panel(text, Query(_rate(service_catalogue.NOTIFICATIONS), "{{outcome}}"), attempts)


def _reasons(rates: str, total: str) -> Query:
    """Return a query for the `rates` of the reasons that occur, and for the `total` with the name "all reasons"."""
    return Query(f'{rates} > 0 or label_replace({total}, "reason", "all reasons", "", "")', "{{reason}}")


def _rate(metric: MetricSpec) -> str:
    """Return PromQL for the increase per second of a counter of the service, which the store does not contain."""
    return once(metric, f"rate({metric.name}{RATE_WINDOW})")
