"""ScoreRule: a rule is one score and one limit."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final, Literal

from rankscope_contract.model.events import Severity
from rankscope_contract.model.kinds import GRADIENT_KINDS, Kind
from rankscope_contract.model.phases import LABEL, STEP_PHASE_SECONDS, Phase
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.expression import GRADIENT, Node, parse

RULE_SCORE: Final = "rule_score"
"""Name of the scalar with the largest score of a rule at a step; its labels are the rule and the tensor."""

STATE_LOADED: Final = "state_loaded"
"""Name of the scalar of a step before which a state was loaded. It is not compared with the step before."""

SCALAR_OF_SETTING: Final[dict[str, str]] = {
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "weight_decay": "weight_decay",
    "eps": "adam_eps",
}
"""The scalar under which a setting is stored when it changes. Its label `group` is that of `learning_rate`."""

CONDITIONS: Final[dict[str, str]] = {
    "adam": "the optimizer is not Adam, AdamW, NAdam or RAdam of torch",
    "decoupled_decay": "weight decay is part of the gradient",
    "minimizes": "the optimizer maximizes",
    "float32_moments": "the moments of the optimizer are not float32",
    "same_part": "gradient and optimizer state are different parts of the parameter on this rank",
    "plain_gradient": "the optimizer itself divides the gradient by the loss scale",
}
"""Facts about the optimizer of a tensor that rules can need, each with the sentence for tensors without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule(AnomalyRule):
    """Fires where `score`, an expression (see `expression.WORDS`), is above `above`. In health it is about 0.

    A rule is judged for each tensor if a statistic of its score is that of a tensor, otherwise once per step. It is
    judged from step `after_steps` of the process on. With `holds_for`, it is judged only for tensors for which these
    `CONDITIONS` are true. It fires once, and again after it held for `latch` steps.

    A rule of the scope `ranks` compares the statistics of tensors on several ranks. The service evaluates it, for each
    tensor and rank, and it fires only after it held for `latch` steps.
    """

    score: str
    above: float
    scope: Literal["rank", "ranks"] = "rank"
    holds_for: tuple[str, ...] = ()
    after_steps: int = 0
    latch: int = 20

    def __post_init__(self) -> None:
        AnomalyRule.__post_init__(self)
        self.check_threshold(self.above)
        self.check_names("holds_for")
        if unknown := [name for name in self.holds_for if name not in CONDITIONS]:
            raise ValueError(f"{self.name}: holds_for must be some of {', '.join(CONDITIONS)}, not {unknown[0]}")
        for name in ("after_steps", "latch"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{self.name}: {name} must be an integer of at least 0, not {value!r}")
        if not isinstance(self.score, str):
            raise ValueError(f"{self.name}: score must be a text, not {self.score!r}")  # noqa: TRY004 - as for all
        try:
            self.tree  # noqa: B018 - an error in the text is found here
        except ValueError as error:
            raise ValueError(f"{self.name}: score: {error}") from error
        self._check_scope()

    def _check_scope(self) -> None:
        if self.scope not in ("rank", "ranks"):
            raise ValueError(f"{self.name}: scope must be rank or ranks, not {self.scope!r}")
        if self.scope == "ranks" and (self.scalars or self.holds_for or not self.is_of_tensors):
            raise ValueError(f"{self.name}: a rule of the scope ranks reads statistics of tensors only")
        if self.scope == "rank" and (words := [one.name for one in self.tree.walk() if one.name in _OVER_RANKS]):
            raise ValueError(f'{self.name}: {words[0]} compares ranks: set the scope to "ranks"')

    @property
    def held_at_first(self) -> int:
        """Return the number of steps for which the rule counts as held before the first one."""
        return 0 if self.scope == "ranks" else self.latch

    @property
    def tree(self) -> Node:
        return _tree(self.score)

    @property
    def is_of_tensors(self) -> bool:
        """Return whether the score has a value for each tensor, and not one for the rank."""
        return is_of_tensors(self.tree)

    @property
    def subject(self) -> str:
        """Return the logged number that the score reads first; `score` if it reads none."""
        return next(iter(self.scalars), "score")

    @property
    def scalars(self) -> list[str]:
        """Return the names of the logged numbers that the score reads."""
        return [str(node.arguments[0].value) for node in self.tree.walk() if node.name == "scalar"]

    def message(self, tensor: str | None, score: float) -> str:
        """Return the text of an event."""
        where = f" on {tensor}" if tensor else ""
        return f"{self.name}{where}: {self.summary} (score {score:.3g}, limit {self.above:g})"

    def judges(self, kind: str | None, op: str) -> bool:
        return kind is None and op == "value" and not self.is_of_tensors  # the score of a tensor is no statistic of it

    def reads(self, kind: str | None, op: str) -> bool:
        kinds = (kind, GRADIENT) if kind in GRADIENT_KINDS else (kind,)
        ops = (op, "rms") if op == "norm" else (op,)
        return any(node.name == f"{one}.{name}" for node in self.tree.walk() for one in kinds for name in ops)

    def for_scalar(self, name: str) -> None:  # noqa: ARG002 - the score says which scalars it reads
        return

    def fires(self, op: str, value: Any, baseline: Any) -> Any:  # noqa: ARG002 - the signature of every rule
        return value > self.above

    def limit(self) -> float:
        return self.above


@functools.lru_cache(maxsize=256)
def _tree(text: str) -> Node:
    return parse(text)


def kinds_of(tree: Node) -> list[str]:
    """Return the kinds of the statistics that `tree` reads, in the order of the text."""
    return list(dict.fromkeys(node.name.partition(".")[0] for node in tree.walk() if "." in node.name))


def kinds_named(kind: str) -> tuple[str, ...]:
    """Return the kinds of tensors that `kind` in an expression means, the preferred one first."""
    return (Kind.GRAD_CLIPPED, Kind.GRAD_REDUCED) if kind == GRADIENT else (kind,)


def is_of_tensors(tree: Node) -> bool:
    """Return whether the value of `tree` has an element for each tensor."""
    if tree.name in ("sum", "over_tensors", "largest"):
        return False
    return "." in tree.name or tree.name in _OF_TENSORS or any(map(is_of_tensors, tree.arguments))


_OF_TENSORS: Final = ("beta1", "beta2", "weight_decay")
_OVER_RANKS: Final = ("others", "apart", "over_ranks")

_ADAM_MEAN = f"beta1 * last({Kind.EXP_AVG}.mean) + (1 - beta1) * {GRADIENT}.mean"
_ADAM_SQUARE = (
    f"beta2 * last({Kind.EXP_AVG_SQ}.mean) + (1 - beta2) * {GRADIENT}.norm * {GRADIENT}.norm / {Kind.EXP_AVG_SQ}.numel"
)
_FIRST = f"{Kind.EXP_AVG}.norm"
_KEPT, _TAKEN = f"beta1 * last({_FIRST})", f"(1 - beta1) * {GRADIENT}.norm"  # the norm of a sum is between these
_BEFORE, _AFTER = Kind.PARAM_BEFORE, Kind.PARAM_AFTER
_GROWTH = f"log({_AFTER}.norm) - ago(10, log({_AFTER}.norm))"
_ALL_GROWTH = f"over_tensors({_GROWTH})"
_OWN_GROWTH = f"({_GROWTH}) - over_tensors({_GROWTH})"
_DATA_WAIT = f'scalar("{STEP_PHASE_SECONDS}/{LABEL}={Phase.DATA_WAIT}")'
_LOG_NORM = f"log({GRADIENT}.norm)"
_OWN_LEVEL = f"deviation(0.02, {_LOG_NORM}) - over_tensors(deviation(0.02, {_LOG_NORM}))"

EXACT_RULES: Final = (
    ScoreRule(
        name="ParamMovedBetween",
        summary="something other than the optimizer has changed the parameter since the step before",
        score="max(max("
        + ", ".join(f"abs({_BEFORE}.{op} - last({_AFTER}.{op}))" for op in ("min", "max", "mean"))
        + f") / last({_AFTER}.rms), abs({_BEFORE}.norm / last({_AFTER}.norm) - 1))",
        above=1e-5,
    ),
    ScoreRule(
        name="AdamBooks",
        summary="the moments of Adam do not follow from the moments before and the gradient",
        score=f"max(abs({Kind.EXP_AVG}.mean - ({_ADAM_MEAN})) / {Kind.EXP_AVG}.rms, "
        f"abs({Kind.EXP_AVG_SQ}.mean / ({_ADAM_SQUARE}) - 1), "
        f"({_FIRST} - ({_KEPT} + {_TAKEN})) / {_FIRST}, (abs({_KEPT} - {_TAKEN}) - {_FIRST}) / {_FIRST})",
        above=1e-5,
        severity=Severity.CRITICAL,
        holds_for=("adam", "decoupled_decay", "minimizes", "float32_moments", "same_part", "plain_gradient"),
    ),
    ScoreRule(
        name="ClipCap",
        summary="the gradient that the optimizer got is above the norm to which it was clipped before",
        score=f"log(sqrt(sum({GRADIENT}.norm * {GRADIENT}.norm)) "
        f"/ ceiling(20, 0.001, sqrt(sum({GRADIENT}.norm * {GRADIENT}.norm))))",
        above=0.01,
    ),
)
"""Rules with a score that is only rounding in health."""

LEVEL_RULES: Final = (
    ScoreRule(
        name="WeightDrift",
        summary="all weights grow or shrink at another rate than before",
        score=f"min(abs(deviation(0.02, {_ALL_GROWTH})) / 0.026, abs(level(0.02, {_ALL_GROWTH})) / 6)",
        above=1.0,
        after_steps=101,
    ),
    ScoreRule(
        name="TensorDrift",
        summary="the norm of the parameter changes unlike before, and unlike those of the others",
        score=f"abs(deviation(0.02, {_OWN_GROWTH})) / (0.01 + usual(0.02, {_OWN_GROWTH}))",
        above=9.0,
        after_steps=101,
    ),
    ScoreRule(
        name="LossShift",
        summary="the loss has left its level",
        score='held(5, 8, level(0.05, scalar("loss")))',
        above=6.5,
    ),
    ScoreRule(
        name="GradSpike",
        summary="the gradient is far larger than before, compared with those of the other tensors",
        score=f"({_OWN_LEVEL}) / (0.5 + usual(0.02, {_OWN_LEVEL}))",
        above=3.95,
        latch=0,
    ),
    ScoreRule(
        name="DataWait",
        summary="the rank waits for data for a larger share of its steps than before",
        score=f'exceeded(0.8, 40, deviation(0.005, {_DATA_WAIT} / scalar("step_seconds")))',
        above=0.055,
        latch=200,
    ),
    ScoreRule(
        name="EvalRise",
        summary="the loss of the last three evaluations is above the best one before",
        score='(least(3, scalar("eval_loss")) - lowest(scalar("eval_loss"))) / abs(lowest(scalar("eval_loss")))',
        above=0.015,
        severity=Severity.INFO,
    ),
)
"""Rules that compare values with a level that follows them slowly."""

_LOCAL: Final = Kind.GRAD_UNREDUCED
_ZEROS = f"{_LOCAL}.zeros / {_LOCAL}.numel"
_ZEROS_GAP = f"{_ZEROS} - others({_ZEROS})"
_LOCAL_NORM = f"log({_LOCAL}.norm) - over_tensors(log({_LOCAL}.norm))"
_NORM_GAP = f"{_LOCAL_NORM} - others({_LOCAL_NORM})"


def _apart(kind: str) -> str:
    norm, furthest = f"over_ranks({kind}.norm)", f"max(apart({kind}.min), apart({kind}.max), apart({kind}.mean))"
    return f"apart({kind}.norm) / {norm}, {furthest} / {norm} * sqrt(over_ranks({kind}.numel))"


RANKS_RULES: Final = (
    ScoreRule(
        name="ReplicasApart",
        summary="the replicas of the tensor are no longer equal",
        score=f"max({', '.join(map(_apart, (Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.PARAM_AFTER)))})",
        above=1e-5,
        severity=Severity.CRITICAL,
        scope="ranks",
        latch=5,
    ),
    ScoreRule(
        name="ZerosGap",
        summary="more elements of the rank's own gradient are zero than on the other ranks",
        # Experts that get no tokens have such gradients now and then: there, a gap of one step was seen before.
        score=f"least(2, {_ZEROS_GAP}) + least(30, 0 - ago(2, largest({_ZEROS_GAP})))",
        above=0.33,
        scope="ranks",
        latch=10,
    ),
    ScoreRule(
        name="GradGap",
        summary="the gradient of the rank itself has left its level, compared with those of the other ranks",
        score=f"abs(held(40, 3, level(0.003, {_NORM_GAP})))",
        above=9.3,
        scope="ranks",
    ),
)
"""Rules between ranks, which the service evaluates."""

SCORE_RULES: Final = (*EXACT_RULES, *LEVEL_RULES)
