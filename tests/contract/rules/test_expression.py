"""Scores of rules as text: their values, and the texts of errors."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_contract.rules.evaluator import Frame, Layout, ScoreEvaluator
from rankscope_contract.rules.expression import ExpressionError, parse
from rankscope_contract.rules.score import ScoreRule

NUMBERS = st.integers(1, 9).map(str)
TEXTS = st.recursive(
    NUMBERS | st.just('scalar("x")'),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" + ", " - ", " * ", " / "]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        inner.map("abs({})".format),
        st.tuples(inner, inner).map(lambda pair: f"max({pair[0]}, {pair[1]})"),
    ),
    max_leaves=12,
)


def score_of(text, x=2.5):
    rule = ScoreRule(name="R", score=text, above=0.0)
    verdict = ScoreEvaluator([rule]).observe(Frame(scalars={"x": x}))
    return verdict.largest[0].score if verdict.largest else math.nan


@given(TEXTS)
def test_expression_has_the_value_that_python_gives_it(text):
    try:
        expected = float(eval(text.replace('scalar("x")', "2.5")))
    except ZeroDivisionError:
        expected = math.nan

    assert score_of(text) == pytest.approx(expected, nan_ok=True) or math.isnan(expected)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('scalar("x") > 2', 1.0),
        ('scalar("x") <= 2', 0.0),
        ("log(0)", math.nan),
        ("1 / 0", math.nan),
        ("sqrt(-1)", math.nan),
        ("min(3, log(0))", 3.0),
        ('scalar("never logged")', math.nan),
        ("1e-3 + 2.", 2.001),
    ],
)
def test_value_of_a_word(text, value):
    assert score_of(text) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a word or a number instead of the end, at position 1 of ''"),
        ("1 +", "expected a word or a number instead of the end, at position 4"),
        ("1 2", "'2' does not continue the expression, at position 3"),
        ("nrom(1)", "'nrom' is no word: choose from abs, log,"),
        ("param_afer.norm", "'param_afer' is no word, did you mean 'param_after'?, at position 1"),
        ("param_after.nrom", "'nrom' is no word, did you mean 'norm'?"),
        ("ago(x)", "'x' is no word"),
        ("ago(3)", "ago(n, x) has 1 arguments"),
        ('level(scalar("x"), 3)', "rate of level(rate, x) must be a number"),
        ("scalar(loss)", "'loss' is no word"),
        ("scalar(1)", 'scalar(name) needs a name such as "loss"'),
        ('abs("x")', "a text is no value"),
        ("__import__('os')", "'__import__' is no word"),
        ("(1", "expected ')' instead of the end"),
        ("1 ; 2", "';' is not part of an expression, at position 3"),
        ("(" * 60 + "1" + ")" * 60, "the expression is nested too deeply"),
    ],
)
def test_wrong_expression_is_one_sentence_with_the_position(text, message):
    with pytest.raises(ExpressionError) as error:
        parse(text)

    assert message in str(error.value)
    assert "position" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("score", "scope", "message"),
    [
        ("nrom", "rank", "score: 'nrom' is no word"),
        ("others(exp_avg.norm)", "rank", 'others compares ranks: set the scope to "ranks"'),
        ("exp_avg.norm", "run", "scope must be rank or ranks, not 'run'"),
        ('scalar("loss")', "ranks", "a rule of the scope ranks reads statistics of tensors only"),
        ("largest(exp_avg.norm)", "ranks", "a rule of the scope ranks reads statistics of tensors only"),
    ],
)
def test_rule_with_a_wrong_score_or_scope_names_the_rule(score, scope, message):
    with pytest.raises(ValueError, match=f"^Mine: {message}"):
        ScoreRule(name="Mine", score=score, scope=scope, above=1.0)


NONE = math.nan
BETWEEN = [[1.0, 5.0, NONE, 2.0], [3.0, 5.0, NONE, NONE], [8.0, 5.0, 4.0, NONE]]  # [ranks, tensors]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("others(exp_avg.norm)", [[5.5, 5.0, 4.0, NONE], [4.5, 5.0, 4.0, 2.0], [2.0, 5.0, NONE, 2.0]]),
        ("over_ranks(exp_avg.norm)", [[3.0, 5.0, NONE, NONE]] * 3),
        ("apart(exp_avg.norm)", [[2.0, 0.0, NONE, NONE], [0.0, 0.0, NONE, NONE], [5.0, 0.0, NONE, NONE]]),
        ("apart(exp_avg.max)", [[0.0, 0.0, NONE, 0.0]] * 3),
        ("exp_avg.norm - over_tensors(exp_avg.norm)", [[-1.0, 3.0, NONE, 0.0], [-1, 1, NONE, NONE], [3, 0, -1, NONE]]),
        (
            "exp_avg.norm / sum(exp_avg.norm)",
            [[1 / 8, 5 / 8, NONE, 2 / 8], [3 / 8, 5 / 8, NONE, NONE], [8 / 17, 5 / 17, 4 / 17, NONE]],
        ),
        ("exp_avg.norm - largest(exp_avg.norm)", [[-7, -3, NONE, -6], [-5, -3, NONE, NONE], [0, -3, -4, NONE]]),
    ],
)
def test_value_of_a_word_between_ranks(text, values):
    rule = ScoreRule(name="R", score=text, above=0.0, scope="ranks")
    evaluator = ScoreEvaluator([rule])
    rows = {"norm": np.array(BETWEEN), "max": np.array([[1.0, 2.0, NONE, 3.0]] * 3)}
    evaluator.observe(Frame(rows=rows, layout=Layout(("a", "b", "c", "d"), {"exp_avg": np.arange(4)}, (0, 1, 2))))

    found = np.broadcast_to(evaluator.memo[rule.tree.source], (3, 4))
    np.testing.assert_allclose(found, values, rtol=1e-12)
