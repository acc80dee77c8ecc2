"""The list of recent clients of a rank: limited, and safe for arbitrary client names."""

from __future__ import annotations

import json
import urllib.request

from rankscope_exporter.serving.rank_state import MOST_CLIENTS, RecentClients


def test_most_recent_client_is_first_with_its_age():
    now = 100.0
    readers = RecentClients(lambda: now)
    readers.note("/metrics", "Prometheus/2.42.0")
    readers.note("/config", "curl")  # only the pages with records are listed
    now = 101.0
    readers.note("/records", "Rankscope/1")
    readers.note("/plan/1", "curl")
    now = 102.5
    readers.note("/metrics", "Prometheus/2.42.0")
    now = 103.0

    assert [
        {"page": "/metrics", "by": "Prometheus/2.42.0", "seconds_ago": 0.5},
        {"page": "/records", "by": "Rankscope/1", "seconds_ago": 2.0},
    ] == readers.latest()


def test_number_and_length_of_client_names_are_limited():
    readers = RecentClients()
    for number in range(1000):
        readers.note("/metrics", f"{number}\x1b[2J{'x' * 1000}")

    assert MOST_CLIENTS == len(readers.latest())
    assert all(reader["by"].isprintable() and len(reader["by"]) <= 80 for reader in readers.latest())
    assert readers.latest()[0]["by"].startswith("999?[2J")


def test_healthz_lists_the_recent_clients(rank):
    request = urllib.request.Request(rank.channel.url + "/metrics", headers={"User-Agent": "Prometheus/2.42.0"})
    urllib.request.urlopen(request, timeout=5).close()
    (reader,) = json.loads(rank.get("/healthz").body)["readers"]

    assert ("/metrics", "Prometheus/2.42.0") == (reader["page"], reader["by"])
    assert reader["seconds_ago"] < 10
