"""The Megatron importer reads any bytes in bounded memory, with the same result for each way of reading."""

import random
import resource
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_ingest.importers.common import forms
from rankscope_ingest.importers.common import lines as lines_of_logs
from rankscope_ingest.importers.common.importer import Faults, ImportedBlock, ImportedRun
from rankscope_ingest.importers.megatron import MegatronText
from rankscope_ingest.importers.megatron.other_lines import Companions

ROW = (
    "[2025-02-28 16:26:20] iteration {step}/ 1000 | consumed samples: {step} | elapsed time per iteration (ms): 4647.8 "
    "| learning rate: 3.0E-06 | lm loss: {loss} | grad norm: 5.127 | number of nan iterations:   0 |"
)
COMPANIONS = (
    "time (ms) | forward-compute: 265.42 | optimizer: 52.20",
    "[default7]: time (ms) | forward-compute: nan | optimizer: 1e999 |",
    " time (ms) | forward-compute: 1.0/2.0 | optimizer",
    "(min, max) time across ranks (ms):",
    "    forward-backward ......: (3290.18, 3907.08)",
    " validation loss at iteration 2 | lm loss value: 7.6E+00 | lm loss PPL: 2.0E+03 |",
    "saving checkpoint at iteration       2 to ./ckpt",
    "[Rank 25] (after 1 iterations) memory (MB) | allocated: 17693.5 | reserved: 2.0",
    "Traceback (most recent call last):",
    "Main process received SIGTERM, exiting",
    "[after training is done] datetime: 2025-10-06 03:27:07",
)
NOISE = (
    *("", "loading data ...", " 45%|####5     | 45/100 [00:10<00:12]", "a | b: 1 | c", "\x1b[31mred\x1b[0m"),
    "iteration 5/",
)

steps = st.integers(0, 40)
losses = st.sampled_from(
    ["2.0E+00", "NAN", "inf", "1e999", "x", "1.0/2.0", "", "1,234.5", "1,5", "1,234", "-nan(ind)", "1:02:03"]
)
prefixes = st.sampled_from(["", " ", "[default0]: ", "[default7]: ", "node-1: ", "3: ", "\x1b[32m", "45%|##  | 9/20\r"])


@st.composite
def rows(draw):
    text = draw(prefixes) + ROW.format(step=draw(steps), loss=draw(losses))
    match draw(st.integers(0, 9)):
        case 0:
            return text[: draw(st.integers(0, len(text)))]
        case 1:
            at = draw(st.integers(1, len(text) - 1))
            return text[:at] + "\n" + text[at:]
        case 2:
            return text + draw(prefixes) + ROW.format(step=draw(steps), loss="1.0")
        case 3:
            return text.replace("lm loss: ", "loss: ").replace("| grad norm: 5.127 ", "")
        case 4:
            return text.removesuffix(" |")
        case 5:
            return text.replace("lm loss: ", draw(st.sampled_from(["lm loss ", "a loss: ", "b loss: ", "c loss: "])))
        case 6:
            return text[: text.find("|", draw(st.integers(0, len(text) - 1))) + 1]
    return text


lines = st.one_of(rows(), rows(), rows(), st.sampled_from(COMPANIONS), st.sampled_from(NOISE), st.text(max_size=30))
logs = st.lists(lines, max_size=40).map("\n".join).map(lambda text: text.encode("utf-8", "surrogatepass"))
open_logs = st.lists(
    st.one_of(rows().map(lambda text: text.removesuffix(" |")), st.sampled_from(COMPANIONS), st.just("")), max_size=30
).map(lambda some: "\n".join(some).encode())


@st.composite
def regular_logs(draw):
    """Return rows with the same lines below each of them, except for a few changes."""
    below = draw(st.lists(st.sampled_from(COMPANIONS[:5] + NOISE[:4]), min_size=1, max_size=4))
    text = [line for step in range(12) for line in (ROW.format(step=step, loss=f"{step}.5"), *below)]
    for place in draw(st.lists(st.integers(0, len(text) - 1), max_size=3)):
        text[place : place + draw(st.integers(0, 1))] = [draw(lines)]
    return "\n".join(text).encode("utf-8", "surrogatepass")


any_logs = logs | open_logs | regular_logs()
slow = settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


def said(path):
    faults = Faults()
    found, run = [], None
    for block in MegatronText().read(path, faults):
        if not isinstance(block, ImportedBlock):
            run = block if isinstance(block, ImportedRun) else run
            continue
        own = [[] for _ in range(block.records)]
        for name, table in block.tables.items():
            for one in table.to_pylist():
                at = one.pop("record")
                own[at].append((name, sorted(repr(item) for item in one.items() if item[1] is not None)))
        found += [sorted(one) for one in own]
    return found, (faults.count, faults.passed_over, [(fault.line, fault.text) for fault in faults.first]), run


ROW_AFTER_BAR = (
    b"[2025-02-28 16:26:20] iteration 0/ 1000 | consumed samples: 0 | elapsed time per iteration (ms): 4647.8 | "
    b"learning rate: 3.0E-06 | loss: 2.0E+00 | number of nan iterations:   0 |"
)


@slow
@given(any_logs, st.integers(50, 3000))
@example(b"45%|##  | 9/20\r[2025-02-28 16:26:20] iteration 0/ \n" + ROW_AFTER_BAR, 50)
def test_result_does_not_depend_on_the_way_of_reading(tmp_path, log, size):
    """Rows are read one by one, as rows of a learned form, or in small parts of the file."""
    path = tmp_path / "train.log"
    path.write_bytes(log)
    whole = said(path)
    with mock.patch.object(forms.Forms.__init__, "__defaults__", (64, 1)):
        by_form = said(path)
        with mock.patch.object(lines_of_logs, "BLOCK_BYTES", size):
            in_parts = said(path)

    assert whole == by_form
    assert whole == in_parts


@pytest.mark.parametrize("label", ["", "[default7]: "])
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(
    "below", [COMPANIONS[:1], COMPANIONS[3:5], (*COMPANIONS[3:5], "  y ...: (0.00, 1)", COMPANIONS[0])]
)
def test_timers_below_repeated_rows_are_a_part_of_their_form(tmp_path, below, is_closed, label):
    path = tmp_path / "train.log"
    rows = [ROW.format(step=step, loss=2.5).removesuffix("" if is_closed else " |") for step in range(20)]
    path.write_text("".join(f"{line}\n" for row in rows for line in (row, *(label + line for line in below))))
    with (
        mock.patch.object(forms.Forms.__init__, "__defaults__", (64, 1)),
        mock.patch.object(Companions, "read", autospec=True, side_effect=Companions.read) as read,
    ):
        found, *_ = said(path)

    assert 20 * (1 + sum("across" not in line for line in below)) == len(found)
    # Below the first two rows, and once more to learn the form.
    assert read.call_count == 3 * len(below)


@slow
@given(any_logs, st.floats(0, 1))
def test_growing_log_gives_the_same_records_first(tmp_path, log, share):
    """S0-06, contract 2: a record is identified by its number, so no row is stored twice or lost."""
    path = tmp_path / "train.log"
    path.write_bytes(log)
    whole, *_ = said(path)
    cut = log.rfind(b"\n", 0, int(len(log) * share)) + 1
    path.write_bytes(log[:cut])
    before, *_ = said(path)

    # A row wrapped exactly here may be read as a row without a last bar, or as an incomplete row.
    assert before[:-1] == whole[: max(0, len(before) - 1)]


@pytest.mark.parametrize("seed", range(3))
def test_row_behind_random_bytes_is_read(tmp_path, seed):
    path = tmp_path / "train.log"
    path.write_bytes(random.Random(seed).randbytes(20_000) + b"\niteration 5/ 10 | lm loss: 1.0 |\n")

    assert 1 == len(said(path)[0])


@pytest.mark.parametrize("width", [60, 80, 100, 120, 132, 160, 200, 250])
def test_rows_wrapped_at_any_width_are_joined(tmp_path, width):
    """S0-08 (variant 8): a terminal wraps lines anywhere, also in words and numbers."""
    path, log = tmp_path / "train.log", [ROW.format(step=step, loss="2.0") for step in range(1, 6)]
    path.write_text("".join(f"{row}\n" for row in log))
    whole = said(path)
    path.write_text("".join(row[at : at + width] + "\n" for row in log for at in range(0, len(row), width)))

    assert 5 == len(whole[0])
    assert whole == said(path)


def test_last_row_is_stored_when_it_is_complete(tmp_path):
    """S0-06: a log may be read at any length while it is written; its rows are always those of the whole log."""
    path, text = tmp_path / "train.log", "".join(ROW.format(step=step, loss="2.0") + "\n" for step in range(1, 6))
    path.write_text(text)
    whole, *_ = said(path)
    length = len(text) // 5

    for cut in range(length * 2, length * 4 + 4, 7):
        path.write_text(text[:cut])
        found, *_ = said(path)

        assert found == whole[: len(found)]
        assert len(found) == text[:cut].count("iterations:   0 |\n") + text[:cut].endswith("nan iterations:   0 |")


@pytest.mark.thorough
def test_line_of_a_gigabyte_needs_little_memory(tmp_path):
    """The line is between rows: it is counted, and the rows are read."""
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        file.write("".join(ROW.format(step=step, loss="2.0") + "\n" for step in range(40)).encode())
        file.truncate(1 << 30)  # zeros, which take no disk space
        file.seek(0, 2)
        file.write(b"\n" + ROW.format(step=40, loss="2.0").encode() + b"\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, (count, _, faults), _ = said(path)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    assert 41 == len(found)
    assert (1, 41) == (count, faults[0][0])
    assert "longer than 1,048,576 bytes" in faults[0][1]
    assert grown_mib < 200


def test_200000_partial_prefixes_do_not_hang_the_parser(tmp_path):
    """Nested brackets, colons and spaces are slow for careless regular expressions."""
    path, head = tmp_path / "train.log", "iteration 5/ 10 | lm loss: 1.0 |\n"
    marks = ("[", "a: ", "[a]: ", " ", "a:", "1: ", "[a] ", "iteration ")
    path.write_text("".join(f"{one * 50_000}{head}" for one in marks))

    assert 8 == len(said(path)[0])


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("noise\n" * 20_000 + "  a ....... b\n" + ROW.format(step=1, loss="2.0") + "\n", 0.0),
        ("  adam_beta1 ....... 0.9\n" + "noise\n" * 20_000 + ROW.format(step=1, loss="2.0") + "\n", 0.9),
    ],
)
def test_rows_are_found_after_a_long_preamble(tmp_path, text, confidence):
    path = tmp_path / "train.log"
    path.write_text(text)
    detection = MegatronText().detect(path, path.read_bytes()[:65_536])

    assert confidence == detection.confidence
    assert detection.because


def test_row_behind_megabytes_of_nul_bytes_is_read(tmp_path):
    path = tmp_path / "train.log"
    log = [ROW.format(step=step, loss="2.0") + "\n" for step in range(40)]
    path.write_text("".join(log[:20]) + "\0" * (3 << 20) + "".join(log[20:]))

    assert 40 == len(said(path)[0])
