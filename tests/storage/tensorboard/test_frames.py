"""Records of an event file: as TensorBoard frames them, and found again behind damage."""

import io
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from rankscope_storage.tensorboard.frames import MAX_RECORD_BYTES, frame, is_header, masked_crc, read_frames

ONE, TWO, THREE = frame(b"one"), frame(b"two" * 100), frame(b"three")


def read(content):
    """Return the records that are read, and (record, fault) for the others."""
    faults = []
    found = list(read_frames(io.BytesIO(content), len(content), lambda number, text: faults.append((number, text))))
    return [data for _, data in found], faults


@given(st.binary(max_size=100))
def test_checksums_equal_tensorboards(data):
    assert masked_crc32c(data) == masked_crc(data)


@given(st.lists(st.binary(max_size=50)))
def test_frames_round_trip(records):
    assert (records, []) == read(b"".join(map(frame, records)))


@given(st.integers(0, len(ONE + TWO) - 1))
def test_truncated_file_yields_every_complete_record(cut):
    """S: a file whose writer is still at it, or was killed."""
    found, faults = read((ONE + TWO)[:cut])

    assert ([b"one"] if cut >= len(ONE) else []) == found
    assert (cut not in (0, len(ONE))) == bool(faults)


@given(st.integers(0, len(TWO) - 1), st.integers(1, 255))
@example(3, 255)  # the length
def test_damaged_byte_loses_one_record(place, change):
    damaged = bytearray(TWO)
    damaged[place] ^= change
    found, faults = read(ONE + bytes(damaged) + THREE)

    assert [b"one", b"three"] == found
    assert [2] == [number for number, _ in faults]
    assert f"damaged at byte {len(ONE)}" in faults[0][1] or f"cut off at byte {len(ONE)}" in faults[0][1]


LENGTH = struct.pack("<Q", 1 << 62)
HOSTILE = LENGTH + struct.pack("<I", masked_crc(LENGTH))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (TWO[:40] + bytes(3_000_000), "damaged at byte"),
        (HOSTILE, "cut off"),  # this length is not allocated
        (frame(bytes(MAX_RECORD_BYTES + 1)), "longer than 4,194,304 bytes: this record is skipped"),
    ],
    ids=["lost blocks and zeros", "absurd length", "too large"],
)
def test_records_behind_damage_are_found_again(damage, said):
    found, faults = read(ONE + damage + THREE)

    assert [b"one", b"three"] == found
    assert said in faults[0][1]
    assert is_header(HOSTILE)


@given(st.binary(max_size=400))
def test_random_bytes_never_stop_the_reader(noise):
    assert [b"three"] == read(noise + THREE)[0][-1:]
