"""Readers of outside bytes raise only their own error: seeded mutations, for longer in `make test-fuzz`."""

import itertools
import logging
import os
import random
import time
from collections.abc import Iterator

import pytest
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import Reader, readers

SECONDS = float(os.environ.get("RANKSCOPE_FUZZ_SECONDS", "0"))
FIRST = int(os.environ.get("RANKSCOPE_FUZZ_SEED") or "1")
INPUTS = 8
LONGEST_SECONDS = 5.0


def inputs(reader: Reader) -> Iterator[tuple[int, bytes]]:
    """Yield inputs with their numbers: those that failed once have 0, and others their seed."""
    yield from ((0, data) for data in reader.former)
    until = time.monotonic() + SECONDS
    for number in itertools.count(FIRST):
        if number >= FIRST + INPUTS and time.monotonic() >= until:
            return
        yield number, mutated(reader.seeds[number % len(reader.seeds)], reader.seeds, random.Random(number))


@pytest.mark.timeout(60 + 40 * SECONDS)
@pytest.mark.filterwarnings("ignore")
def test_reader_raises_only_its_own_error(tmp_path):
    """A failure names the reader, the seed and the beginning of the input."""
    logging.disable(logging.CRITICAL)  # readers log each omission
    problems = {}
    for reader in readers(tmp_path):
        for seed in reader.seeds:
            reader.read(seed)  # valid
        count = refused = 0
        for number, data in inputs(reader):
            began, problem = time.process_time(), None
            try:
                reader.read(data)
            except reader.own:
                refused += 1
            except Exception as error:  # any other error is the defect
                problem = f"{type(error).__name__}: {str(error)[:80]}"
            if (seconds := time.process_time() - began) > LONGEST_SECONDS:
                problem = f"{seconds:.0f} s"
            if problem is not None:
                problems.setdefault(f"{reader.name}: {problem}", f"seed {number}, {data[:120]!r}")
            count += 1
        print(f"{reader.name}: {count:,} inputs, {refused:,} refused")
    logging.disable(logging.NOTSET)

    assert {} == problems, "\n".join(f"{name}: {where}" for name, where in problems.items())
