"""TensorFlow's ``tf.train.Example`` without TensorFlow: the message by its published fields, read by protobuf."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from rayfl.errors import DataError

_PACKAGE = "rayfl_tff"
_LISTS = {"BytesList": "TYPE_BYTES", "FloatList": "TYPE_FLOAT", "Int64List": "TYPE_INT64"}
_FIELDS = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}


@cache
def example_message() -> Any:
    """The class of ``tf.train.Example``: a map from names to lists of bytes, floats or integers."""
    try:
        descriptor, factory, pool = (
            import_module(f"google.protobuf.{name}")
            for name in ("descriptor_pb2", "message_factory", "descriptor_pool")
        )
    except ImportError:
        raise DataError("TFF's SQLite files need the package protobuf: pip install 'rayfl[tff]'") from None
    file = descriptor.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    kind = descriptor.FieldDescriptorProto

    def add(message: Any, name: str, number: int, of: str, repeated: bool = False) -> None:
        label = kind.LABEL_REPEATED if repeated else kind.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, label=label)
        if of.startswith("TYPE_"):
            field.type = getattr(kind, of)
        else:
            field.type, field.type_name = kind.TYPE_MESSAGE, f".{_PACKAGE}.{of}"

    for name, value in _LISTS.items():
        add(file.message_type.add(name=name), "value", 1, value, repeated=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, of) in enumerate(_FIELDS.items(), start=1):
        add(feature, name, number, of)
        feature.field[-1].oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, "TYPE_STRING")
    add(entry, "value", 2, "Feature")
    add(features, "feature", 1, "Features.FeatureEntry", repeated=True)
    add(file.message_type.add(name="Example"), "features", 1, "Features")
    own = pool.DescriptorPool()
    own.Add(file)
    return factory.GetMessageClass(own.FindMessageTypeByName(f"{_PACKAGE}.Example"))


def reader(columns: tuple[str, ...]) -> Callable[[bytes], dict[str, Any]]:
    """Returns a function that reads some columns of a serialized example.

    It gives bytes of a list with one text, and arrays of all others; KeyError where a column is missing, and
    ValueError of bytes that are no example.
    """
    message = example_message()

    def read(serialized: bytes) -> dict[str, Any]:
        example = message()
        try:
            example.ParseFromString(serialized)
        except Exception as error:  # protobuf's DecodeError, whose place differs between its implementations
            raise ValueError(f"not a serialized tf.train.Example ({error})") from error
        found: dict[str, Any] = {}
        for name in columns:
            if name not in example.features.feature:
                raise KeyError(name)
            feature = example.features.feature[name]
            which = feature.WhichOneof("kind")
            if which == "bytes_list" and len(feature.bytes_list.value) == 1:
                found[name] = feature.bytes_list.value[0]
            elif which in ("float_list", "int64_list"):
                found[name] = np.array(getattr(feature, which).value)
            else:
                raise ValueError(f"the feature {name!r} holds no list of numbers, and not exactly one text")
        return found

    return read
