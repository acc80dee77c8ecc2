"""A run under a clock that only moves when told: the words of the life-cycle tests, and what they do to the books."""

from __future__ import annotations

from rankscope_contract.model.events import RunState
from rankscope_contract.protocol.channel import Registration
from rankscope_ingest.runs.models import Liveness, Patience
from rankscope_ingest.runs.tracker import Attempt, Rank, RunTracker, Timing

KEY = ("r", 0)
START = 1_700_000_000_000_000
TIMING = Timing(
    patience=Patience(refused_after_seconds=10, failed_after_seconds=25),
    stalled_after_seconds=300,
    stalled_in_phase_after_seconds=1800,
)


class Life:
    """One attempt of a run. `do("step 0", …)` is what a rank does; the others live on, once a second."""

    def __init__(self, ranks: int = 2, world_size: int | None = None) -> None:
        self.book = RunTracker(TIMING)
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
        found = self.book.get(KEY)
        assert found is not None
        return found

    @property
    def state(self) -> str:
        return str(self.attempt.state)

    def do(self, *words: str) -> Life:
        for word in words:
            verb, _, argument = word.partition(" ")
            if verb == "wait":
                self.wait(float(argument))
            elif verb == "restart":
                self.restart()
            elif verb == "stop-service":
                self.now += float(argument)
                self.book.excuse(float(argument), self.now)
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
                    self._sign(rank)
            self.tick()

    def tick(self) -> None:
        for attempt in self.book.tick(self.now, self.wall).changed:
            self.states.append(str(attempt.state))

    def restart(self) -> None:
        """Replace the service: the new one knows what rows say, and the living ranks register again."""
        old, self.book = self.attempt, RunTracker(TIMING)
        restored = Attempt(
            run=old.run,
            number=old.number,
            launch_id=old.launch_id,
            world_size=old.world_size,
            started_at=old.started_at,
            planned_steps=old.planned_steps,
            state=old.state,
            reason=old.reason,
            ended_at=old.ended_at,
            last_step=old.last_step,
        )
        if old.state not in {RunState.COMPLETED, RunState.STOPPED}:
            restored.ranks = {rank.number: _restored(rank, old, self.now) for rank in old.ranks.values()}
        if restored.has_ended:
            self.book.remember(restored)
        else:
            self.book.restore(restored, self.now)
        self.liveness = {rank: Liveness(last_sign=self.now) for rank in self.liveness}
        for rank in self.liveness:
            if rank not in self.silent:
                self.register(rank)
        self.book._wake(KEY)

    def register(self, rank: int, incarnation: str | None = None) -> None:
        liveness = self.liveness.setdefault(rank, Liveness(last_sign=self.now))
        liveness.heard(self.now)
        registration = Registration(
            run="r",
            rank=rank,
            world_size=self.world_size,
            local_rank=rank,
            host="h",
            pid=1,
            incarnation=incarnation or f"i{rank}",
            launch_id="l",
            url="http://127.0.0.1:1",
            started_at=START,
            planned_steps=100,
            phase=self.phases.get(rank),
        )
        self.book.registered(registration, 0, liveness, self.wall)

    def _rank_does(self, verb: str, rank: int) -> None:
        match verb:
            case "register" | "back":
                self.silent.discard(rank)
                self.register(rank)
                self._sign(rank)
            case "replace":
                self.silent.discard(rank)
                self.liveness[rank] = Liveness(last_sign=self.now)
                self.register(rank, incarnation=f"second {rank}")
            case "step":
                self.steps += 1
                self._sign(rank)
                self.book.stepped(KEY, rank, self.steps, self.now)
            case "phase" | "leave":
                self.phases[rank] = "evaluation" if verb == "phase" else None
                self.register(rank)
            case "vanish":
                self.silent.add(rank)
            case "refuse":
                self.silent.add(rank)
                self.liveness[rank].refused(self.now + 0.1)
            case "close":
                self.silent.add(rank)
                self.book.closed(KEY, rank)
            case _:
                self._sign(rank)
                self.silent.add(rank)
                self.book.exited(KEY, rank, *WORDS[verb], at=self.wall)

    def _sign(self, rank: int) -> None:
        self.liveness[rank].heard(self.now)
        self.book.heard(KEY, rank)


WORDS = {
    "done": ("completed", None),
    "raise": ("exception", "ValueError: no"),
    "peer": ("exception", "RuntimeError: Connection closed by peer [127.0.0.1]:4"),
    "term": ("signal", "SIGTERM"),
    "int": ("signal", "KeyboardInterrupt"),
    "exit0": ("unknown", "sys.exit(0) at step 4 of 100 planned"),
    "mute": ("unknown", None),
}


def _restored(rank: Rank, attempt: Attempt, now: float) -> Rank:
    return Rank(
        number=rank.number,
        incarnation=rank.incarnation,
        host=rank.host,
        liveness=Liveness(last_sign=now),
        known_since=now,
        exit_reason=rank.exit_reason,
        error=rank.error,
        exited_at=rank.exited_at,
        is_restored=True,
        is_vanished=attempt.state is RunState.FAILED,
    )
