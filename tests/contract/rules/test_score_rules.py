"""The score rules, compared with formulas that are written here a second time, one series and one value at a time."""

import functools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from rankscope_contract.rules.evaluator import Frame, Layout, ScoreEvaluator
from rankscope_contract.rules.score import CONDITIONS, SCORE_RULES, ScoreRule

BETAS = 0.9, 0.99
SIZES = (40, 7, 120)
KINDS = ("param_before", "grad_reduced", "grad_clipped", "exp_avg", "exp_avg_sq", "param_after")
OPS = ("norm", "min", "max", "mean", "numel")
RULES = {rule.name: rule for rule in SCORE_RULES}
SCALARS = "loss", "eval_loss", "step_seconds", "step_phase_seconds/phase=data_wait"


class Training:
    """AdamW over three tensors in numpy; each step returns the float32 statistics by kind, tensor and op."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.weights = [self.random.normal(0, 0.1, size) for size in SIZES]
        self.m = [np.zeros(size) for size in SIZES]
        self.v = [np.zeros(size) for size in SIZES]
        self.step_number = 0
        self.spike = {}  # factor by tensor
        self.has_clipping = True
        self.decay = 0.01
        self.growth = [1.0] * len(SIZES)

    def step(self):
        self.step_number += 1
        found = {"param_before": [*map(statistics_of, self.weights)]}
        gradients = [self.random.normal(0, 1, size) * self.spike.get(place, 1.0) for place, size in enumerate(SIZES)]
        found["grad_reduced"] = [*map(statistics_of, gradients)]
        total = math.sqrt(sum(float(g @ g) for g in gradients))
        clipped = [g / total for g in gradients] if self.has_clipping else gradients
        found["grad_clipped"] = [*map(statistics_of, clipped)]
        beta1, beta2 = BETAS
        for place, gradient in enumerate(clipped):
            self.m[place] = beta1 * self.m[place] + (1 - beta1) * gradient
            self.v[place] = beta2 * self.v[place] + (1 - beta2) * gradient**2
            first = self.m[place] / (1 - beta1**self.step_number)
            second = self.v[place] / (1 - beta2**self.step_number)
            self.weights[place] *= (1 - 1e-3 * self.decay) * self.growth[place]
            self.weights[place] -= 1e-3 * first / (np.sqrt(second) + 1e-8)
        found |= {"exp_avg": [*map(statistics_of, self.m)], "exp_avg_sq": [*map(statistics_of, self.v)]}
        return found | {"param_after": [*map(statistics_of, self.weights)]}


def statistics_of(x):
    found = {"norm": math.sqrt(float(x @ x)), "min": x.min(), "max": x.max(), "mean": x.mean(), "numel": len(x)}
    return {op: float(np.float32(value)) for op, value in found.items()}


LAYOUT = Layout(
    tuple(f"t{place}" for place in range(len(SIZES))),
    {kind: np.arange(len(SIZES)) + len(SIZES) * place for place, kind in enumerate(KINDS)},
)


def frame_of(found, *, layout=LAYOUT, **more):
    rows = {op: np.array([one[op] for kind in KINDS for one in found[kind]]) for op in OPS}
    settings = {name: np.full(len(layout.tensors), beta) for name, beta in zip(("beta1", "beta2"), BETAS, strict=True)}
    return Frame(rows=rows, layout=layout, settings=settings, **more)


class Level:
    """m += a·clip(x - m, ±3s), s += a·(min(|x - m|, 3s) - s), a = 1/n at first; no limit for the first 20 values."""

    def __init__(self, rate):
        self.rate, self.seen, self.m, self.s = rate, 0, 0.0, 0.0

    def add(self, x):
        """Return the deviation and the usual deviation before x, from the 61st value on."""
        if not math.isfinite(x):
            return math.nan, math.nan
        before = (x - self.m, self.s) if self.seen >= 60 else (math.nan, math.nan)
        self.m, self.s = (x, 0.0) if self.seen == 0 else (self.m, self.s)
        rate = max(1 / (self.seen + 1), self.rate)
        size = abs(x - self.m) if self.seen < 20 else min(abs(x - self.m), 3 * self.s)
        self.m, self.s = self.m + math.copysign(rate * size, x - self.m), self.s + rate * (size - self.s)
        self.seen += 1
        return before


class Oracle:
    """Scores of one step after the other, for the rule of the method's name in lower case."""

    def __init__(self):
        self.steps = []
        self.losses = []
        self.levels = {}
        self.clipped = []
        self.z = []
        self.logged = []
        self.waits = []

    def level(self, key, rate, x):
        return self.levels.setdefault(key, Level(rate)).add(x)

    def rows(self, op, kind, back=0):
        if len(self.steps) <= back:
            return [math.nan] * len(SIZES)
        return [one[op] for one in self.steps[-1 - back][kind]]

    def parammovedbetween(self):
        found = []
        for place, size in enumerate(SIZES):
            before = self.steps[-1]["param_before"][place]
            after = self.steps[-2]["param_after"][place] if len(self.steps) > 1 else None
            if after is None:
                return None
            rms = after["norm"] / math.sqrt(size)
            moved = max(abs(before[op] - after[op]) for op in ("min", "max", "mean")) / rms
            found.append(max(moved, abs(before["norm"] / after["norm"] - 1)))
        return max(found)

    def adambooks(self):
        if len(self.steps) < 2:
            return None
        found, (beta1, beta2), now, last = [], BETAS, self.steps[-1], self.steps[-2]
        for place, size in enumerate(SIZES):
            gradient, m, v = now["grad_clipped"][place], now["exp_avg"][place], now["exp_avg_sq"][place]
            mean = beta1 * last["exp_avg"][place]["mean"] + (1 - beta1) * gradient["mean"]
            square = beta2 * last["exp_avg_sq"][place]["mean"] + (1 - beta2) * gradient["norm"] ** 2 / size
            rms = m["norm"] / math.sqrt(size)
            kept, taken = beta1 * last["exp_avg"][place]["norm"], (1 - beta1) * gradient["norm"]
            outside = max(m["norm"] - (kept + taken), abs(kept - taken) - m["norm"]) / m["norm"]
            found.append(max(abs(m["mean"] - mean) / rms, abs(v["mean"] / square - 1), outside))
        return max(found)

    def clipcap(self):
        total = math.sqrt(sum(norm**2 for norm in self.rows("norm", "grad_clipped")))
        before, self.clipped = self.clipped, [*self.clipped, total]
        near = [one for one in before if one >= max(before) * 0.999] if before else []
        # A norm that is larger by more than the share begins a new limit.
        return math.log(total / max(before)) if len(near) >= 20 else None

    def growth(self):
        now, before = self.rows("norm", "param_after"), self.rows("norm", "param_after", 10)
        return [math.log(new) - math.log(old) for new, old in zip(now, before, strict=True)]

    def weightdrift(self):
        growth = self.growth()
        deviation, usual = self.level("all", 0.02, statistics.median(growth))
        return min(abs(deviation) / 0.026, abs(deviation / usual) / 6) if len(self.steps) > 101 else None

    def tensordrift(self):
        growth = self.growth()
        middle = statistics.median(growth)
        moved = [self.level(("own", place), 0.02, one - middle) for place, one in enumerate(growth)]
        return max(abs(deviation) / (0.01 + usual) for deviation, usual in moved) if len(self.steps) > 101 else None

    def lossshift(self):
        deviation, usual = self.level("loss", 0.05, self.losses[-1])
        if math.isnan(deviation):
            return None
        self.z = [*self.z, max(-8.0, min(8.0, deviation / usual))]
        return sum(self.z[-5:]) / math.sqrt(5) if len(self.z) >= 5 else None

    def datawait(self):
        logged = self.logged[-1]
        deviation = self.level("wait", 0.005, logged[SCALARS[3]] / logged["step_seconds"])[0]
        self.waits = [*self.waits, *([] if math.isnan(deviation) else [deviation])][-40:]
        return float(np.quantile(self.waits, 0.2)) if len(self.waits) == 40 else None

    def evalrise(self):
        found = [one["eval_loss"] for one in self.logged if "eval_loss" in one]
        is_new = "eval_loss" in self.logged[-1]
        return (min(found[-3:]) - min(found[:-1])) / abs(min(found[:-1])) if is_new and len(found) >= 3 else None

    def gradspike(self):
        norms = self.rows("norm", "grad_clipped")
        own = [self.level(("norm", place), 0.02, math.log(norm))[0] for place, norm in enumerate(norms)]
        middle = statistics.median(own)
        found = [self.level(("spike", place), 0.02, one - middle)[1] for place, one in enumerate(own)]
        scores = [(one - middle) / (0.5 + usual) for one, usual in zip(own, found, strict=True)]
        return max(scores) if not math.isnan(scores[0]) else None


def injected(training, fault):
    if fault == "spike":
        training.spike = {1: 60.0}
    if fault == "written":
        training.weights[2][:5] = 0.0
    if fault == "sign":
        training.weights[2][0] *= -1.0  # the norm is the same
    if fault == "moments":
        training.m[0][:] = 0.0
    if fault == "clipping":
        training.has_clipping = False
    if fault == "decay":
        training.decay = 1000.0
    if fault == "growth":
        training.growth[1] = 1.05


FIRES = {
    "none": set(),
    "spike": {"GradSpike"},
    "written": {"ParamMovedBetween"},
    "sign": {"ParamMovedBetween"},
    "moments": {"AdamBooks"},
    "clipping": {"ClipCap"},
    "decay": {"WeightDrift"},
    "growth": {"TensorDrift"},
    "labels": {"LossShift"},
    "waiting": {"DataWait"},
    "evaluation": {"EvalRise"},
}


@functools.cache
def recorded(fault):
    """Return the frames of a training with a fault at step 190, and the score of each rule at each step."""
    training, oracle, found = Training(), Oracle(), []
    for number in range(1, 236):
        if number == 190:
            injected(training, fault)
        is_faulty = number >= 190
        loss = float(training.random.normal(2.0, 0.1)) + (1.0 if fault == "labels" and is_faulty else 0.0)
        wait = 0.01 + 0.002 * float(training.random.random()) + (0.08 if fault == "waiting" and is_faulty else 0.0)
        scalars = {"loss": loss, "step_seconds": 0.1, SCALARS[3]: wait}
        if number % 10 == 0:
            start = -2.0 if fault == "sign" else 2.0
            scalars["eval_loss"] = start - number * 1e-3 + (0.5 if fault == "evaluation" and is_faulty else 0.0)
        oracle.losses.append(loss)
        oracle.logged.append(scalars)
        oracle.steps.append(training.step())
        scores = {name: getattr(oracle, name.lower())() for name in RULES}
        found.append((frame_of(oracle.steps[-1], scalars=scalars), scores))
    return found


def differs(score, expected):
    return score != (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12))


@pytest.mark.parametrize("fault", FIRES)
def test_scores_are_those_of_the_formulas_and_the_fault_fires(fault):
    evaluator, fired, compared = ScoreEvaluator(SCORE_RULES), set(), 0
    for number, (frame, expected) in enumerate(recorded(fault), 1):
        verdict = evaluator.observe(frame)
        scores = {one.rule.name: one.score for one in verdict.largest}
        assert [name for name in RULES if differs(scores.get(name), expected[name])] == []
        compared += sum(score is not None for score in expected.values())
        fired |= {firing.rule.name for firing in verdict.firings if number >= 190}
        assert number >= 190 or not verdict.firings
    assert FIRES[fault] <= fired
    assert compared > 1000
    if fault == "none":
        assert fired == set()


MUTATIONS = [
    *[("abs(", "("), ("last(", "abs("), ("ago(10", "ago(9"), ("beta1", "beta2"), ("0.02", "0.021"), ("0.05", "0.051")],
    *[
        ("max(", "min("),
        (".rms", ".norm"),
        ("held(5", "held(4"),
        ("8,", "1,"),
        ("/ 6", "/ 7"),
        ("0.026", "0.03"),
        ("least(3", "least(2"),
        ("0.8", "0.7"),
    ],
    *[("over_tensors", "sum"), ("log(", "abs("), ("ceiling(20", "ceiling(40"), ("0.001", "0.5"), (" - 1", " - 2")],
    *[("lowest(", "last("), ("exceeded(0.8, 40", "exceeded(0.8, 39"), ("0.005", "0.006"), ("0.5", "0.6"), ("+", "-")],
    *[("/ 6", "/ 7"), ("0.026", "0.03")],
]


@pytest.mark.parametrize("name", RULES)
def test_each_mutation_of_a_score_is_found(name):
    mutants = {RULES[name].score.replace(old, new) for old, new in MUTATIONS} - {RULES[name].score}
    assert len(mutants) > 2
    missed = []
    for score in sorted(mutants):
        found = False
        for fault in FIRES:
            evaluator = ScoreEvaluator([replace(RULES[name], score=score)])
            for frame, expected in recorded(fault):
                largest = evaluator.observe(frame).largest
                found = found or differs(largest[0].score if largest else None, expected[name])
            if found:
                break
        missed += [] if found else [score]
    assert missed == []


def test_value_that_is_not_finite_does_not_move_a_level():
    rule = {"score": 'level(0.05, scalar("x"))', "latch": 0, "above": 20.0}
    values = [float(number % 3) for number in range(80)]
    odd = [*values[:40], math.nan, math.inf, -math.inf, *values[40:]]

    for more in ([100.0], [1.0]):
        plain, mixed = scores_of(rule, [*values, *more]), scores_of(rule, [*odd, *more])
        assert plain[-1] == mixed[-1] == (more == [100.0])


def scores_of(rule, values, **fields):
    evaluator = ScoreEvaluator([ScoreRule(name="R", **({"score": 'scalar("x")', "above": 1.0} | rule))])
    verdicts = [evaluator.observe(Frame(scalars={"x": value}, **fields)) for value in values]
    return [bool(verdict.firings) for verdict in verdicts]


@pytest.mark.parametrize(
    ("rule", "values", "fired"),
    [
        ({"latch": 0}, [0, 1, 1.1, 2, 0.5], [False, False, True, True, False]),
        ({"latch": 2}, [2, 2, 0, 2, 0, 0, 2], [True, False, False, False, False, False, True]),
        ({"latch": 0, "after_steps": 2}, [2, 2, 2], [False, False, True]),
        ({"latch": 1}, [2, math.nan, 2, 0, 2], [True, False, False, False, True]),  # NaN is not judged
        ({"latch": 0, "score": 'last(scalar("x"))'}, [2, 0, 0], [False, True, False]),
        ({"latch": 0, "score": 'ago(2, scalar("x"))'}, [2, 0, 0, 0], [False, False, True, False]),
        ({"latch": 0, "score": 'least(2, scalar("x"))'}, [2, 2, 0, 2], [False, True, False, False]),
        ({"latch": 0, "score": 'scalar("x") - lowest(scalar("x"))'}, [3, 1, 2.5, 1.5], [False, False, True, False]),
        ({"latch": 0, "score": 'exceeded(0.5, 3, scalar("x"))'}, [0, 2, 2, 0, 0], [False, False, True, True, False]),
    ],
)
def test_rule_fires_at(rule, values, fired):
    assert scores_of(rule, map(float, values)) == fired


def test_gap_between_steps_is_not_judged():
    rule = {"score": 'scalar("x") - last(scalar("x"))', "latch": 0}

    assert scores_of(rule, [0.0, 2.0]) == [False, True]
    assert scores_of(rule, [0.0, 2.0], follows=False) == [False, False]


def test_condition_that_does_not_hold_is_named_once_and_not_judged():
    notices, training = [], Training()
    evaluator = ScoreEvaluator([RULES["AdamBooks"]], notices.append)
    facts = {"adam": np.array([True, False, True]), "decoupled_decay": np.array([True, True, True])}
    for _ in range(4):
        training.m[1][:] = 5.0
        training.m[2][:] = 5.0
        verdict = evaluator.observe(frame_of(training.step(), facts=facts))
    assert [firing.tensor for firing in verdict.firings] in ([], [2])
    assert notices == [f"AdamBooks is not judged for 1 tensors: {CONDITIONS['adam']}"]
    assert {one.tensor for one in verdict.largest} == {2}


def test_state_follows_the_tensors_to_another_plan():
    one, other, training = ScoreEvaluator(SCORE_RULES), ScoreEvaluator(SCORE_RULES), Training()
    order = [2, 0, 1]
    moved = Layout(
        tuple(LAYOUT.tensors[place] for place in order), {kind: LAYOUT.columns[kind][order] for kind in KINDS}
    )
    for number in range(190):
        found = training.step()
        first = one.observe(frame_of(found, scalars={"loss": 2.0 + number % 7}))
        layout = moved if 60 < number < 150 else LAYOUT
        second = other.observe(frame_of(found, layout=layout, scalars={"loss": 2.0 + number % 7}))
        named = [
            [
                (item.rule.name, item.score, item.score and item.tensor is not None and where.tensors[item.tensor])
                for item in verdict.largest
            ]
            for verdict, where in ((first, LAYOUT), (second, layout))
        ]  # of several tensors with the score 0, the first one is named
        assert named[0] == named[1]


def test_a_step_has_at_most_64_firings():
    rule = ScoreRule(name="R", score="param_after.norm", above=0.0)
    layout = Layout(tuple(range(100)), {"param_after": np.arange(100)})
    verdict = ScoreEvaluator([rule]).observe(Frame(rows={"norm": np.arange(1.0, 101.0)}, layout=layout))

    assert [firing.score for firing in verdict.firings] == list(range(100, 36, -1))
