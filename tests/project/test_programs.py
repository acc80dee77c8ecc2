"""Programs that are forked for tests end as those of a separate interpreter do."""

import signal

import pytest
from tests.programs import OF_COMMANDS, run_program

ENDS = """
import atexit, sys, threading, time

class Closed:
    def __del__(self):
        print("object", flush=True)

def finish():
    time.sleep(0.1)
    print("thread", flush=True)

closed = Closed()
file = open({path!r}, "w")
file.write("complete")
atexit.register(print, "atexit")
threading.Thread(target=finish).start()
print("end")
sys.exit({code})
"""


@pytest.mark.parametrize("whole_exit", [False, True])
def test_exit_waits_for_threads_runs_atexit_and_closes_files(tmp_path, whole_exit):
    path = tmp_path / "file"
    code = ENDS.format(path=str(path), code=7)
    done = run_program(code, imported=OF_COMMANDS, whole_exit=whole_exit)

    assert 7 == done.returncode, done.stderr
    assert ["end", "thread", "atexit", "object"] == done.stdout.split()
    assert "complete" == path.read_text()


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        *(("", 0, ""), ("import sys; sys.exit()", 0, ""), ("import sys; sys.exit(True)", 1, "")),
        *(("import sys; sys.exit(257)", 1, ""), ("import sys; sys.exit('no store')", 1, "no store\n")),
        ("raise ValueError('no store')", 1, "ValueError: no store\n"),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_status_and_message_are_those_of_the_interpreter(code, status, message):
    done = run_program(code, imported=OF_COMMANDS)

    assert status == done.returncode
    assert message in done.stderr
    assert "" == done.stdout
