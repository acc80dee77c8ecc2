"""Classes of protobuf messages from a short schema, without generated modules.

The schema of a message has the declarations of its fields in protobuf's language, separated by semicolons, such as
`repeated double counts = 7`. A word behind the number is the name of the `oneof` to which the field belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SCALARS: Final = {
    "double": 1,
    "float": 2,
    "int64": 3,
    "uint64": 4,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "bytes": 12,
    "uint32": 13,
}
"""Numbers of FieldDescriptorProto.Type by name. Any other type is a message of the schema (type number 11)."""


def message_classes(package: str, schema: Mapping[str, str]) -> dict[str, Any]:
    """Return the classes of the messages in `schema`, by name.

    They are in a pool of their own, because the default one may contain messages of other packages with equal names.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"rankscope/{package}.proto", package=package, syntax="proto3")
    for name, declarations in schema.items():
        message = file.message_type.add(name=name)
        for declaration in declarations.split(";"):
            declared, _, place = declaration.partition("=")
            *repeated, kind, word = declared.split()
            number, *oneof = place.split()
            field = message.field.add(name=word, number=int(number), label=3 if repeated else 1)
            field.type = _SCALARS.get(kind, 11)
            if kind not in _SCALARS:
                field.type_name = f".{package}.{kind}"
            if oneof:
                known = [one.name for one in message.oneof_decl]
                if oneof[0] not in known:
                    message.oneof_decl.add(name=oneof[0])
                field.oneof_index = (known + oneof).index(oneof[0])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in schema}
