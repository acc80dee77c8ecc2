"""`rankscope view`: pages of a store without a service."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

from tests.view.training import MAIN, Size, write_store


def test_view_serves_the_pages_of_a_store_until_it_is_interrupted(tmp_path):
    write_store(tmp_path / "store", Size(steps=48, layers=1))
    command = [sys.executable, "-m", "rankscope", "view", str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        address = shown.stdout.readline().split()[-1]
        with urllib.request.urlopen(address, timeout=30) as answer:
            page = answer.read().decode()
        shown.send_signal(2)

    assert address.startswith("http://127.0.0.1:")
    assert MAIN in page
    assert 130 == shown.returncode


def test_folder_without_a_store_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "view", tmp_path], capture_output=True, text=True, check=False
    )

    assert 1 == done.returncode
    assert "is not a Rankscope store" in done.stderr
