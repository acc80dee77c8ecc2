"""Remote write requests, serialized by google.protobuf from the full definitions in Prometheus' folder prompb."""

import aiohttp
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INT64, DOUBLE, STRING, UINT32 = 3, 1, 9, 13
MESSAGES = {
    "WriteRequest": [("timeseries", 1, "TimeSeries", True), ("metadata", 3, "MetricMetadata", True)],
    "MetricMetadata": [("type", 1, INT64, False), ("metric_family_name", 2, STRING, False)],
    "TimeSeries": [
        ("labels", 1, "Label", True),
        ("samples", 2, "Sample", True),
        ("exemplars", 3, "Exemplar", True),
        ("histograms", 4, "Histogram", True),
    ],
    "Label": [("name", 1, STRING, False), ("value", 2, STRING, False)],
    "Sample": [("value", 1, DOUBLE, False), ("timestamp", 2, INT64, False)],
    "Exemplar": [("labels", 1, "Label", True), ("value", 2, DOUBLE, False), ("timestamp", 3, INT64, False)],
    "Histogram": [("sum", 3, DOUBLE, False), ("timestamp", 15, INT64, False)],
}


def message_classes(messages):
    """Return a class for each message of `messages`."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{id(messages)}.proto", package="p", syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            one = message.field.add(name=field, number=number, label=3 if repeated else 1)
            one.type = 11 if isinstance(kind, str) else kind
            if isinstance(kind, str):
                one.type_name = f".p.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p.{name}")) for name in messages}


CLASSES = message_classes(MESSAGES)


def write_request(*series, metadata=()):
    """Return the bytes of a request of (labels, [(ms, value)]) or (labels, samples, exemplars, histograms)."""
    request = CLASSES["WriteRequest"]()
    for labels, samples, *more in series:
        one = request.timeseries.add()
        for name, value in labels.items():
            one.labels.add(name=name, value=value)
        for ms, value in samples:
            one.samples.add(timestamp=ms, value=value)
        exemplars, histograms = more or (0, 0)
        for _ in range(exemplars):
            one.exemplars.add(value=1.0, timestamp=5).labels.add(name="trace", value="x")
        for _ in range(histograms):
            one.histograms.add(sum=1.0, timestamp=5)
    for name in metadata:
        request.metadata.add(type=1, metric_family_name=name)
    return request.SerializeToString()


async def post(service, data, path="/api/v1/write", **headers):
    """Send a request of remote write, and return status, headers and text of the response."""
    kinds = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{service.url}{path}", data=data, headers=kinds | headers) as response,
    ):
        return response.status, response.headers, await response.text()


MESSAGES_2 = {
    "Request": [("symbols", 4, STRING, True), ("timeseries", 5, "TimeSeries", True)],
    "TimeSeries": [
        ("labels_refs", 1, UINT32, True),
        ("samples", 2, "Sample", True),
        ("histograms", 3, "Histogram", True),
        ("exemplars", 4, "Exemplar", True),
        ("metadata", 5, "Metadata", False),
        ("created_timestamp", 6, INT64, False),
    ],
    "Sample": [("value", 1, DOUBLE, False), ("timestamp", 2, INT64, False), ("start_timestamp", 3, INT64, False)],
    "Exemplar": [("labels_refs", 1, UINT32, True), ("value", 2, DOUBLE, False), ("timestamp", 3, INT64, False)],
    "Histogram": [("sum", 3, DOUBLE, False), ("timestamp", 15, INT64, False)],
    "Metadata": [("type", 1, INT64, False), ("help_ref", 3, UINT32, False), ("unit_ref", 4, UINT32, False)],
}
CLASSES_2 = message_classes(MESSAGES_2)


def write_request_2(*series, symbols=("",)):
    """Return the bytes of a request of version 2.0 with the same items as `write_request`, and with metadata.

    Labels are sorted as the specification requires. `symbols` are the first symbols.
    """
    request, places = CLASSES_2["Request"](), {symbol: place for place, symbol in enumerate(symbols)}
    for labels, samples, *more in series:
        one = request.timeseries.add()
        for label in sorted(labels.items()):
            one.labels_refs.extend(places.setdefault(text, len(places)) for text in label)
        for ms, value in samples:
            one.samples.add(timestamp=ms, value=value, start_timestamp=ms - 1000)
        exemplars, histograms = more or (0, 0)
        for _ in range(exemplars):
            one.exemplars.add(value=1.0, timestamp=5, labels_refs=one.labels_refs[:2])
        for _ in range(histograms):
            one.histograms.add(sum=1.0, timestamp=5)
        one.metadata.type = 1
        one.metadata.help_ref = places.setdefault("A help text.", len(places))
        one.created_timestamp = 5
    request.symbols.extend(places)
    return request.SerializeToString()
