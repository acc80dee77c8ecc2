"""Paths, headers and JSON bodies of the HTTP interfaces between ranks and the service.

One interface is the record channel of a rank; the other one is the registration at the service.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from rankscope_contract import SCHEMA_VERSION
from rankscope_contract.model.identity import LONGEST_NAME
from rankscope_contract.model.redaction import redacted_name

ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"

# Paths on a rank.
RECORDS_PATH: Final = "/records"
PLAN_PATH: Final = "/plan/"
METRICS_PATH: Final = "/metrics"
HEALTH_PATH: Final = "/healthz"
CONFIG_PATH: Final = "/config"
STACKS_PATH: Final = "/stacks"  # POST

# Paths on the service.
SERVICE_PAGE_PATH: Final = "/service"  # status of the service
STATUS_PATH: Final = "/api/v1/status"
REGISTER_PATH: Final = "/api/v1/register"
POKE_PATH: Final = "/api/v1/poke"
TARGETS_PATH: Final = "/api/v1/targets"
RUNS_PATH: Final = "/api/v1/runs"
REMOTE_WRITE_PATH: Final = "/api/v1/write"  # POST of Prometheus' remote write
REMOTE_READ_PATH: Final = "/api/v1/read"  # POST of Prometheus' remote read
EXPORTERS_PATH: Final = "/api/v1/exporters"  # external exporters
RUN_STACKS_PATH: Final = "/api/v1/stacks"  # POST: requests stacks from the ranks of a run
SERVICE_DISCOVERY_PATH: Final = "/sd"

# Headers of GET /records. Requests contain SCHEMA, LEASE and NOTICE; responses contain the others.
SCHEMA_HEADER: Final = "Rankscope-Schema"
LEASE_HEADER: Final = "Rankscope-Lease"
NOTICE_HEADER: Final = "Rankscope-Notice"  # only if the reply to a registration has one: the rank registers immediately
INCARNATION_HEADER: Final = "Rankscope-Incarnation"
FIRST_HEADER: Final = "Rankscope-First"  # first seq in the body
LAST_HEADER: Final = "Rankscope-Last"  # last seq in the body
ROWS_HEADER: Final = "Rankscope-Rows"
HEAD_HEADER: Final = "Rankscope-Head"  # newest seq in the ring, -1 before the first record
QUEUED_HEADER: Final = "Rankscope-Queued"  # further records, which the rank has not put into the ring yet
RING_FILL_HEADER: Final = "Rankscope-Ring-Fill"  # uncommitted share of the ring, 0.000 … 1.000
STATE_HEADER: Final = "Rankscope-State"  # running or draining
LOST_HEADER: Final = "Rankscope-Lost"  # "a-b": requested seqs that the ring no longer contains

# Header of the status 307 of a registration. Its Location is the service of the run.
SHARD_HEADER: Final = "Rankscope-Shard"

STATE_RUNNING: Final = "running"
STATE_DRAINING: Final = "draining"

DEFAULT_MAX_BYTES: Final = 8_388_608
NOTHING: Final = -1
"""Value of a cursor before the first record: `after=-1` requests all records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A message of the channel, which is a JSON object."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the message in `text`. Keys of a newer release are ignored.

        Raises ValueError for an invalid text and RecursionError for one that is nested too deeply.
        """
        document = json.loads(text)  # a JSONDecodeError is a ValueError
        if not isinstance(document, dict):
            found = type(document).__name__
            raise ValueError(f"{cls.__name__} must be a JSON object, not {found}")  # noqa: TRY004 - one error type for all faults
        try:
            return cls(**{name: value for name, value in document.items() if name in cls.__dataclass_fields__})
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration(_Message):
    """Identity and state of a rank, which the rank sends to the service when it starts, and then as its heartbeat."""

    run: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    incarnation: str
    launch_id: str
    url: str  # address at which the service and Prometheus reach this rank: http://host:port
    served_by: str | None = None  # incarnation that serves the spool of this dead process at `url`; None: alive
    schema_version: int = SCHEMA_VERSION
    started_at: int = 0  # UTC microseconds
    state: str = STATE_RUNNING
    head: int = NOTHING
    queued: int = 0  # records of ended steps that are not in the ring yet, or were dropped and not reported yet
    step: int | None = None
    phase: str | None = None
    planned_steps: int | None = None
    config: dict[str, Any] = field(default_factory=dict)  # secrets are masked
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Mask secrets in names. The service rejects names that are too long or no valid Unicode."""
        for name in ("run", "host", "phase"):
            text = getattr(self, name) or ""
            if isinstance(text, str) and len(text) <= LONGEST_NAME and text.encode("utf-8", "replace").decode() == text:
                object.__setattr__(self, name, redacted_name(text, LONGEST_NAME) or getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationReply(_Message):
    """Response of the service to a registration.

    It contains the lease, the attempt number of the run, the heartbeat interval in seconds, and the newest committed
    sequence number. Only a reader that sends the lease can mark records as committed. The rank prints `notice`, once.
    """

    lease: str
    attempt: int
    heartbeat_seconds: float
    committed: int = NOTHING
    notice: str | None = None
