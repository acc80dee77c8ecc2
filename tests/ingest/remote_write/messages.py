"""Remote write requests, serialized by google.protobuf from the full definitions in Prometheus' folder prompb."""

import aiohttp
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

KINDS = {"double": 1, "int64": 3, "int32": 5, "string": 9, "message": 11, "bytes": 12, "uint32": 13}
MESSAGES = {
    "WriteRequest": "timeseries 1 TimeSeries*, metadata 3 MetricMetadata*",
    "MetricMetadata": "type 1 int64, metric_family_name 2 string",
    "TimeSeries": "labels 1 Label*, samples 2 Sample*, exemplars 3 Exemplar*, histograms 4 Histogram*",
    "Label": "name 1 string, value 2 string",
    "Sample": "value 1 double, timestamp 2 int64",
    "Exemplar": "labels 1 Label*, value 2 double, timestamp 3 int64",
    "Histogram": "sum 3 double, timestamp 15 int64",
}


def message_classes(messages):
    """Return a class for each of `messages`. Fields have a name, a number and a type; `*` is a repeated field."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{id(messages)}.proto", package="p", syntax="proto3")
    for message, fields in messages.items():
        made = file.message_type.add(name=message)
        for name, number, kind in (field.split() for field in fields.split(", ")):
            one = made.field.add(name=name, number=int(number), label=3 if kind.endswith("*") else 1)
            one.type = KINDS.get(kind.rstrip("*"), KINDS["message"])
            if one.type == KINDS["message"]:
                one.type_name = f".p.{kind.rstrip('*')}"
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
    "Request": "symbols 4 string*, timeseries 5 TimeSeries*",
    "TimeSeries": "labels_refs 1 uint32*, samples 2 Sample*, histograms 3 Histogram*, exemplars 4 Exemplar*, "
    "metadata 5 Metadata, created_timestamp 6 int64",
    "Sample": "value 1 double, timestamp 2 int64, start_timestamp 3 int64",
    "Exemplar": "labels_refs 1 uint32*, value 2 double, timestamp 3 int64",
    "Histogram": "sum 3 double, timestamp 15 int64",
    "Metadata": "type 1 int64, help_ref 3 uint32, unit_ref 4 uint32",
}
CLASSES_2 = message_classes(MESSAGES_2)


def write_request_2(*series, symbols=("",)):
    """Return the bytes of a request of version 2.0 with the same items as `write_request`, and with metadata."""
    # Labels are sorted as the specification requires. `symbols` are the first symbols.
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
