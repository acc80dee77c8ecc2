"""`make demo` as a user runs it: one complete run, and one interrupted run."""

import signal
import subprocess
import sys

import psutil
import pytest
from tests.end_to_end.lives import until


def demo(folder, *arguments):
    return [sys.executable, "-m", "rankscope", "demo", "--folder", str(folder), *arguments]


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_demo_passes_all_its_checks(tmp_path, require_server):
    """The demo checks itself: exact rows, two incidents reported by both senders, a completed run."""
    require_server("prometheus")
    require_server("prometheus-alertmanager")
    command = demo(tmp_path / "demo", "--steps", "130", "--batch", "1")
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    alerts = [line for line in done.stdout.splitlines() if line.startswith("ALERT ")]
    assert 2 == sum("by Alertmanager" not in line for line in alerts)
    for rule, rank in (("AnomalyNan", 1), ("AnomalyTurbulence", 0)):
        assert f"ok    Alertmanager reports {rule} on rank {rank}" in done.stdout
    assert f"Page of the run:  {(tmp_path / 'demo' / 'report.html').as_uri()}" in done.stdout
    for heading in ("Summary", "Anomalies in causal order", "Checks", "Next steps"):
        assert f"\n{heading}\n" in done.stdout
    assert 3 == done.stdout.count("\nselect ")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_interrupted_demo_leaves_no_process_behind(tmp_path):
    process = subprocess.Popen(demo(tmp_path / "demo"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    family = psutil.Process(process.pid)
    log = tmp_path / "demo" / "training.log"
    until(lambda: "step 1/" in log.read_text(), 240)
    children = family.children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=90)

    assert len(children) >= 4  # service, torchrun, two ranks; also Prometheus and Alertmanager if they are installed
    assert [] == psutil.wait_procs(children, timeout=10)[1]
    assert 130 == process.returncode
    assert "Traceback" not in complaint
