"""A run under a manual clock: the verbs of the life-cycle tests and their effects on a `RunTracker`."""

from __future__ import annotations

from typing import Any

from tests.ingest.builders import rank_of, registration

from rankscope_contract.model.events import RunState
from rankscope_ingest.base.config import RunsSection
from rankscope_ingest.runs.models import Attempt, Liveness, Rank
from rankscope_ingest.runs.tracker import RunTracker

KEY = ("r", 0)
START = 1_700_000_000_000_000
LIMITS = RunsSection(
    refused_after_seconds=10, failed_after_seconds=25, stalled_after_seconds=300, stalled_in_phase_after_seconds=1800
)


class Life:
    """One attempt of a run. `do("step 0", …)` performs an action of a rank; the other ranks report once a second."""

    def __init__(self, ranks: int = 2, world_size: int | None = None) -> None:
        self.tracker = RunTracker(LIMITS)
        self.now = 0.0
        self.world_size = world_size or ranks
        self.liveness: dict[int, Liveness] = {}
        self.phases: dict[int, str | None] = {}
        self.silent: set[int] = set()
        self.steps = 0
        self.states: list[str] = []
        for rank in range(ranks):
            self.do(f"register {rank}")

    @property
    def wall(self) -> int:
        return START + int(self.now * 1e6)

    @property
    def attempt(self) -> Attempt:
        found = self.tracker.get(KEY)
        assert found is not None
        return found

    @property
    def state(self) -> str:
        return str(self.attempt.state)

    def do(self, *actions: str) -> Life:
        for action in actions:
            verb, _, argument = action.partition(" ")
            if verb == "wait":
                self.wait(float(argument))
            elif verb == "restart":
                self.restart()
            elif verb == "stop-service":
                self.now += float(argument)
                self.tracker.exclude(float(argument), self.now)
            else:
                for rank in sorted(self.liveness) if argument == "*" else [int(argument)]:
                    self._rank_does(verb, rank)
            self.tick()
        return self

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            for rank in self.liveness:
                if rank not in self.silent:
                    self._report(rank)
            self.tick()

    def tick(self) -> None:
        for attempt in self.tracker.tick(self.now, self.wall)[0]:
            self.states.append(str(attempt.state))

    def restart(self) -> None:
        """Restart the service: the new one has the stored rows, and the live ranks register again."""
        old, self.tracker = self.attempt, RunTracker(LIMITS)
        stored = ("run", "number", "launch_id", "world_size", "started_at", "planned_steps", "state", "reason")
        restored = Attempt(**{name: getattr(old, name) for name in (*stored, "ended_at", "last_step")})
        if old.state not in {RunState.COMPLETED, RunState.STOPPED}:
            restored.ranks = {rank.number: _restored(rank, old, self.now) for rank in old.ranks.values()}
        if restored.has_ended:
            self.tracker.remember(restored)
        else:
            self.tracker.restore(restored, self.now)
        self.liveness = {rank: Liveness(last_sign=self.now) for rank in self.liveness}
        for rank in self.liveness:
            if rank not in self.silent:
                self.register(rank)
        self.tracker.stepped(KEY, 0, None, self.now)  # makes a past attempt active

    def register(self, rank: int, incarnation: str | None = None, **more: Any) -> None:
        liveness = self.liveness.setdefault(rank, Liveness(last_sign=self.now))
        liveness.note_sign(self.now)
        shown = {"world_size": self.world_size, "started_at": START, "planned_steps": 100} | more
        shown |= {"phase": self.phases.get(rank), "incarnation": incarnation or f"i{rank}"}
        self.tracker.registered(registration(rank=rank, **shown), 0, liveness, self.wall)

    def _rank_does(self, verb: str, rank: int) -> None:
        match verb:
            case "register" | "back":
                self.silent.discard(rank)
                self.register(rank)
                self._report(rank)
            case "replace":
                self.silent.discard(rank)
                self.liveness[rank] = Liveness(last_sign=self.now)
                self.register(rank, incarnation=f"second {rank}")
            case "step":
                self.steps += 1
                self._report(rank)
                self.tracker.stepped(KEY, rank, self.steps, self.now)
            case "phase" | "leave":
                self.phases[rank] = "evaluation" if verb == "phase" else None
                self.register(rank)
            case "vanish":
                self.silent.add(rank)
            case "refuse":
                self.silent.add(rank)
                self.liveness[rank].note_refusal(self.now + 0.1)
            case "close":
                self.silent.add(rank)
                self.tracker.closed(KEY, rank)
            case _:
                self._report(rank)
                self.silent.add(rank)
                self.tracker.exited(KEY, rank, *EXITS[verb], at=self.wall)

    def _report(self, rank: int) -> None:
        self.liveness[rank].note_sign(self.now)
        self.tracker.answered(KEY, rank)


EXITS = {
    "done": ("completed", None),
    "raise": ("exception", "ValueError: no"),
    "peer": ("exception", "RuntimeError: Connection closed by peer [127.0.0.1]:4"),
    "term": ("signal", "SIGTERM"),
    "int": ("signal", "KeyboardInterrupt"),
    "exit0": ("unknown", "sys.exit(0) at step 4 of 100 planned"),
    "mute": ("unknown", None),
}


def _restored(rank: Rank, attempt: Attempt, now: float) -> Rank:
    stored = {name: getattr(rank, name) for name in ("incarnation", "exit_reason", "error", "exited_at")}
    seen = {"liveness": Liveness(last_sign=now), "known_since": now}
    return rank_of(rank.number, **stored, **seen, is_restored=True, is_vanished=attempt.state is RunState.FAILED)
