"""Records of an event file: as TensorBoard frames them, and found again behind damage."""

from __future__ import annotations

import io
import struct

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


def test_lost_blocks_and_zeros_are_skipped():
    content = ONE + TWO[:40] + bytes(3_000_000) + THREE

    assert [b"one", b"three"] == read(content)[0]


def test_absurd_length_is_not_allocated():
    length = struct.pack("<Q", 1 << 62)
    hostile = length + struct.pack("<I", masked_crc(length))
    found, faults = read(ONE + hostile + THREE)

    assert [b"one", b"three"] == found
    assert is_header(hostile)
    assert ["cut off"] == [text[:7] for _, text in faults]


def test_too_large_record_is_skipped_unread():
    found, faults = read(ONE + frame(bytes(MAX_RECORD_BYTES + 1)) + THREE)

    assert [b"one", b"three"] == found
    assert "longer than 4,194,304 bytes: this record is skipped" in faults[0][1]


@given(st.binary(max_size=400))
def test_random_bytes_never_stop_the_reader(noise):
    assert [b"three"] == read(noise + THREE)[0][-1:]
