"""A page with a board, as a real Grafana draws it in Chromium: its panels, marks and queries."""

import base64
import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlencode

from tests.view.browser import Browser

OPEN_ROWS = 'document.querySelectorAll(".dashboard-row--collapsed .dashboard-row__title").forEach((row) => row.click())'
LOADED = """(() => {
    const panels = document.querySelectorAll("section.panel-container");
    return panels.length > 0 && !document.querySelector(".panel-loading, .panel-loading__spinner") && panels.length;
})()"""
PANELS = """(() => {
    const numbers = (colour) => (colour.match(/rgba?\\((\\d+), (\\d+), (\\d+)/) ?? []).slice(1).map(Number);
    const isGreen = (colour) => ((found) => found[1] > 1.2 * Math.max(found[0], found[2]))(numbers(colour));
    return [...document.querySelectorAll("section.panel-container")].map((panel) => {
        const parts = [...panel.querySelectorAll("*")].map((one) => [one, getComputedStyle(one)]);
        const leaves = parts.filter(([one]) => one.childElementCount === 0 && one.innerText?.trim());
        const marks = [...panel.querySelectorAll('div[style*="-50%, 0"]')].map((one) => getComputedStyle(one));
        return {
            title: panel.querySelector("h2, h6")?.innerText ?? "",
            text: panel.innerText,
            drawn: panel.querySelectorAll("canvas, [role=cell], .flot-text").length,
            cut: leaves
                .filter(([one, style]) => style.overflowX !== "visible" && one.scrollWidth > one.clientWidth + 1)
                .map(([one]) => one.innerText),
            green: leaves.filter(([, style]) => isGreen(style.color)).concat(
                parts.filter(([, style]) => isGreen(style.backgroundColor) || isGreen(style.backgroundImage))
            ).map(([one]) => one.innerText),
            marks: marks.map((one) => numbers(one.height === "5px" ? one.backgroundColor : one.borderBottomColor)),
        };
    });
})()"""
MARKS = {"red": "Incidents", "blue": "Checkpoints", "purple": "Restarts"}


def mark(colour: list[int]) -> str:
    """Return the name of the marks that have this colour, whose shade depends on the theme."""
    red, green, blue = colour
    return MARKS["red" if red > blue else "purple" if red > green else "blue"]


@dataclass(frozen=True)
class Query:
    """A query as the browser sent it. Times are in seconds."""

    expression: str
    start: float
    end: float
    step: float
    is_instant: bool

    @property
    def substituted(self) -> str:
        """Return the expression with values for the variables that the server of Grafana replaces."""
        values = {
            "__rate_interval": f"{max(60, round(self.step) + 15)}s",
            "__interval_ms": str(round(self.step * 1000)),
            "__interval": f"{round(self.step)}s",
            "__range": f"{round(self.end - self.start)}s",
        }
        return re.sub(r"\$\{?(__\w+)\}?", lambda found: values[found[1]], self.expression)

    def ask(self, prometheus: str) -> tuple[float, str | None]:
        """Return the seconds until Prometheus responds, and its error if it refuses the query."""
        arguments: dict[str, Any] = {"query": self.substituted, "time": self.end}
        if not self.is_instant:
            arguments |= {"start": self.start, "end": self.end, "step": self.step}
        began, error = time.monotonic(), None
        try:
            with urllib.request.urlopen(
                f"{prometheus}/api/v1/query{'' if self.is_instant else '_range'}?{urlencode(arguments)}", timeout=60
            ) as answer:
                answer.read()
        except urllib.error.HTTPError as refused:
            error = refused.read().decode()
        return time.monotonic() - began, error


class Requests(Browser):
    """A browser that keeps its requests for data: `sent` and `answered` by number, and the addresses of lists."""

    sent: dict[str, tuple[float, dict[str, Any]]]
    answered: dict[str, float]
    lists: list[str]

    def log_in(self, credentials: str | tuple[str, str]) -> None:
        """Send `credentials`, a token or a user with a password, with each request, and keep the requests for data."""
        if isinstance(credentials, str):
            login = f"Bearer {credentials}"
        else:
            login = f"Basic {base64.b64encode(':'.join(credentials).encode()).decode()}"
        self.call("Network.enable", maxPostDataSize=1 << 20)
        self.call("Network.setExtraHTTPHeaders", headers={"Authorization": login})

    def forget(self) -> None:
        self.sent, self.answered, self.lists = {}, {}, []
        self.problems.clear()

    def _receive(self, seconds: float) -> dict[str, Any]:
        answer = super()._receive(seconds)
        told = answer.get("params", {})
        if answer.get("method") == "Network.requestWillBeSent":
            url, body = told["request"]["url"], told["request"].get("postData", "")
            if "/api/ds/query" in url:
                self.sent[told["requestId"]] = told["timestamp"], json.loads(body)
            elif "/api/datasources/" in url:
                self.lists.append(unquote(f"{url} {body}"))
        elif answer.get("method") == "Network.loadingFinished" and told["requestId"] in self.sent:
            self.answered[told["requestId"]] = told["timestamp"]
        return answer

    def queries(self) -> set[Query]:
        """Return the different queries of panels and marks."""
        return {
            Query(
                query["expr"],
                int(body["from"]) / 1000,
                int(body["to"]) / 1000,
                query.get("intervalMs", 15000) / 1000,
                is_instant=bool(query.get("instant")),
            )
            for _, body in self.sent.values()
            for query in body["queries"]
            if "expr" in query
        }

    def seconds(self) -> tuple[float, float]:
        """Return the seconds from the first request to the last response, and those of the slowest request."""
        took = [self.answered[number] - sent for number, (sent, _) in self.sent.items() if number in self.answered]
        first = min((sent for sent, _ in self.sent.values()), default=0.0)
        return max(self.answered.values(), default=first) - first, max(took, default=0.0)
