"""Decode streamed responses, written from the description of the format: frames, checksums and XOR chunks."""

from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c
from tests.ingest.remote_write.messages import message_classes

MESSAGES = message_classes(
    {
        "ReadRequest": "queries 1 Query*, accepted_response_types 2 int32*",
        "Query": "start_timestamp_ms 1 int64, end_timestamp_ms 2 int64, matchers 3 LabelMatcher*, hints 4 ReadHints",
        "LabelMatcher": "type 1 int32, name 2 string, value 3 string",
        "ReadHints": "step_ms 1 int64, func 2 string, start_ms 3 int64, end_ms 4 int64, range_ms 7 int64",
        "ReadResponse": "results 1 QueryResult*",
        "QueryResult": "timeseries 1 TimeSeries*",
        "TimeSeries": "labels 1 Label*, samples 2 Sample*",
        "Label": "name 1 string, value 2 string",
        "Sample": "value 1 double, timestamp 2 int64",
        "ChunkedReadResponse": "chunked_series 1 ChunkedSeries*, query_index 2 int64",
        "ChunkedSeries": "labels 1 Label*, chunks 2 Chunk*",
        "Chunk": "min_time_ms 1 int64, max_time_ms 2 int64, type 3 int32, data 4 bytes",
    }
)


def frames_of(stream: bytes) -> list[bytes]:
    """Return the messages of a stream, after checking their checksums."""
    place, found = 0, []
    while place < len(stream):
        size = shift = 0
        while True:
            octet = stream[place]
            place += 1
            size |= (octet & 0x7F) << shift
            shift += 7
            if octet < 0x80:
                break
        message = stream[place + 4 : place + 4 + size]
        assert (size, int.from_bytes(stream[place : place + 4], "big")) == (len(message), crc32c(message))
        found.append(message)
        place += 4 + size
    return found


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._number = int.from_bytes(data, "big")
        self._left = 8 * len(data)

    def take(self, count: int) -> int:
        self._left -= count
        assert self._left >= 0, "the chunk ends in the middle of a sample"
        return self._number >> self._left & ((1 << count) - 1)

    def varint(self) -> int:
        value = shift = 0
        while (octet := self.take(8)) >= 0x80:
            value |= (octet & 0x7F) << shift
            shift += 7
        return value | octet << shift

    def change(self) -> int:
        """Return the change of the difference between two times."""
        ones = 0
        while ones < 4 and self.take(1):
            ones += 1
        size = (0, 14, 17, 20, 64)[ones]
        number = self.take(size)
        highest = (1 << 63) - 1 if size == 64 else 1 << size >> 1
        return number - (1 << size) if number > highest else number


def decoded(chunk: bytes) -> list[tuple[int, int]]:
    """Return (ms, bits of the value) of each sample of an XOR chunk."""
    bits, found = _Bits(chunk), []
    count = bits.take(16)
    ts = value = distance = leading = significant = 0
    for place in range(count):
        if place == 0:
            number = bits.varint()
            ts, value = number >> 1 ^ -(number & 1), bits.take(64)
        else:
            distance = bits.varint() if place == 1 else distance + bits.change()
            ts += distance
            if bits.take(1):
                if bits.take(1):
                    leading, significant = bits.take(5), bits.take(6) or 64
                value ^= bits.take(significant) << (64 - leading - significant)
        found.append((ts, value))
    return found
