"""`rankscope rules`: list, explain and check anomaly rules, and judge a stored run with them again."""

from __future__ import annotations

import dataclasses
import heapq
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import typer

from rankscope.access.stores import RunOption, RunOrPath, RunSelection, open_run
from rankscope.output.rows import as_json, print_table
from rankscope.rules.replay import FACTORS, Outcome, Replay, score_rows
from rankscope.rules.rule_files import check_rules, read_rules
from rankscope.shell.errors import FAILED, USAGE, CommandError, suggestion
from rankscope.shell.options import Store
from rankscope.shell.streams import progress_bar
from rankscope_contract.metrics import catalogue
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import RANK_RULES
from rankscope_contract.rules.expression import WORDS
from rankscope_contract.rules.score import CONDITIONS, ScoreRule
from rankscope_ingest.importers import IMPORT_RULES

rules = typer.Typer(
    help="""List, explain and check anomaly rules, and judge a stored run with them again.""",
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RulesFile = Annotated[
    Path | None,
    typer.Option("--rules", help="File with rules, TOML or JSON. Default: the default rules.", show_default=False),
]
_SHORT: Final = 60


@rules.command("list")
def list_(as_json_text: Json = False) -> None:
    """List the rules that apply by default, with limit and score.

    A score is an expression of the words that `rankscope rules show` explains. A rule with a score fires where the
    score is above the limit. Rules without a score are conditions in Python, see docs/configuration.md.

    [bold]Examples[/bold]

    rankscope rules list

    rankscope rules list --json
    """
    rows = [_row(rule) for rule in _default_rules().values()]
    if as_json_text:
        print(as_json(rows), end="")
        return
    shown = [row | {"score": textwrap.shorten(row["score"] or "", _SHORT, placeholder="…")} for row in rows]
    print_table(pa.Table.from_pylist(shown), limit=len(shown))


@rules.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of a default rule.")],
    as_json_text: Json = False,
) -> None:
    """Explain one rule: its score with the words in it, its conditions, and the same comparison in PromQL and SQL.

    [bold]Example[/bold]: rankscope rules show AdamBooks
    """
    known = _default_rules()
    if name not in known:
        hint = suggestion(name, known) or f" Default rules: {', '.join(known)}."
        raise CommandError(f"no default rule is named {name!r}.{hint}", code=USAGE)
    facts = _facts(known[name])
    if as_json_text:
        print(as_json(facts), end="")
        return
    facts |= facts.pop("words", {})
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key.ljust(width)}  {', '.join(value) if isinstance(value, list) else value}")


@rules.command("check")
def check(file: Annotated[Path, typer.Argument(help="TOML or JSON file with the setting rules, or a list.")]) -> None:
    """Check the rules in a configuration of the monitor, or in a file for `rankscope import --rules`.

    Each error is one line with its position, and the exit code is 1. The keys of a rule are rule_name, which is a class
    or a default rule, and args, which replace fields of it. "default" means all default rules. An example:

    rules = ["default", {rule_name = "LossShift", args = {name = "LossShift8", above = 8}}]

    [bold]Examples[/bold]

    rankscope rules check monitor.toml

    rankscope rules check rules.json
    """
    found, errors = check_rules(file, RANK_RULES)
    names = Counter(rule.name for rule in found)
    repeated = [name for name, count in names.items() if count > 1]
    errors += [f"{file}: several rules are named {name!r}: give each another name" for name in repeated]
    if errors:
        raise CommandError("\nrankscope: ".join(errors), code=FAILED)
    print(f"{file}: {len(found)} rules: {', '.join(names)}")


@rules.command("replay")
def replay(
    source: RunOrPath = None,
    store: Store = Path("history"),
    run: RunOption = None,
    rules_file: RulesFile = None,
    top: Annotated[int, typer.Option(min=1, help="Largest number of firings to show, the first ones.")] = 40,
    as_json_text: Json = False,
) -> None:
    """Judge a stored run or a log again with rules, and count their firings at other limits.

    Only rules with a score are judged, from the stored statistics and logged numbers of each rank, as the ranks did.
    The second table has the number of firings at 0.5 to 3 times the limit of each rule, and the largest score. The last
    lines name rules that are not judged, and compare the scores with those that the ranks have stored. Older rows that
    retention has rolled up are not judged.

    [bold]Examples[/bold]

    rankscope rules replay my-run

    rankscope rules replay my-run --rules rules.toml --json

    rankscope rules replay train.log --top 10
    """
    chosen = [*_default_rules().values()] if rules_file is None else read_rules(rules_file, RANK_RULES)
    judged = [rule for rule in chosen if isinstance(rule, ScoreRule)]
    if not judged:
        raise CommandError(f"{rules_file} has no rule with a score: a replay judges no others", code=USAGE)
    with open_run(RunSelection(source=source, store=store, run=run)) as opened:
        name, replayed = opened.run, Replay(opened.connection, opened.run, judged)
        with progress_bar("records", f"judging {name}") as progress:
            found = heapq.nsmallest(top, replayed.firings(progress), key=_place)
    outcome = replayed.outcome
    limits = [_counts(rule, outcome) for rule in judged]
    if as_json_text:
        facts = {"run": name, "firings": found, "limits": limits, "not_judged": [*outcome.not_judged]}
        print(as_json(facts | {one: getattr(outcome, one) for one in ("compared", "different")}), end="")
        return
    if found:
        print_table(pa.Table.from_pylist(found), limit=len(found))
    print(f"{len(found):,} of {outcome.firings:,} firings in {name}" if outcome.firings else f"no firings in {name}")
    print()
    print_table(pa.Table.from_pylist(limits), limit=len(limits))
    print(*outcome.not_judged, sep="\n", end="\n" if outcome.not_judged else "")
    if outcome.compared or outcome.different:
        print(f"{outcome.compared:,} scores that ranks have stored, {outcome.different:,} of them differ")


def _place(one: dict[str, Any]) -> list[int]:
    return [-1 if one[name] is None else one[name] for name in ("attempt", "step", "rank")]


def _counts(rule: ScoreRule, outcome: Outcome) -> dict[str, Any]:
    """Return the numbers of firings of `rule` at each limit."""
    found: dict[str, Any] = {"rule": rule.name, "limit": rule.above}
    found |= {f"x{factor:g}": outcome.counts[rule.name, rule.above * factor] for factor in FACTORS}
    return found | {"largest": outcome.largest.get(rule.name), "judged": outcome.judged[rule.name]}


def _default_rules() -> dict[str, AnomalyRule]:
    return {rule.name: rule for rule in (*RANK_RULES, *IMPORT_RULES)}


def _row(rule: AnomalyRule) -> dict[str, Any]:
    return {
        "rule": rule.name,
        "severity": rule.severity,
        "limit": rule.limit(),
        "score": rule.score if isinstance(rule, ScoreRule) else None,
        "meaning": rule.summary or (type(rule).__doc__ or "").splitlines()[0],
    }


def _facts(rule: AnomalyRule) -> dict[str, Any]:
    """Return all facts of `rule` by name."""
    fields = {one.name: getattr(rule, one.name) for one in dataclasses.fields(rule)}
    facts = _row(rule) | {name: value for name, value in fields.items() if name not in {"name", "summary", "above"}}
    if isinstance(rule, ScoreRule):
        facts["holds_for"] = [f"not where {CONDITIONS[name]}" for name in rule.holds_for]
        facts["judged"] = "for each tensor" if rule.is_of_tensors else "once per step"
        facts["promql"], facts["sql"] = _comparisons(rule)
        facts["words"] = dict(_words_of(rule))
    return {name: value for name, value in facts.items() if value not in (None, "", [], ())}


def _comparisons(rule: ScoreRule) -> tuple[str, str]:
    """Return PromQL and SQL that select the firings of `rule` from the scores that ranks export and store."""
    score, threshold = catalogue.RULE_SCORE.name, catalogue.RULE_THRESHOLD.name
    promql = f'{score}{{rule="{rule.name}"}} > on (run, rank, rule) {threshold}'
    chosen = f"{score_rows(rule.name)} and value > {rule.above!r}"
    return promql, f"select run, attempt, rank, step, labels, value from scalars where {chosen}"  # noqa: S608


def _words_of(rule: ScoreRule) -> Iterator[tuple[str, str]]:
    names = dict.fromkeys(node.name for node in rule.tree.walk())
    for name in names:
        if name in WORDS:
            word = WORDS[name]
            yield f"{name}({', '.join(word.arguments)})" if word.arguments else name, word.doc
    for name in (one for one in names if "." in one):
        kind, _, op = name.partition(".")
        yield name, f"Statistic {op} of the quantity {kind} of a tensor, see docs/quantities.md."
