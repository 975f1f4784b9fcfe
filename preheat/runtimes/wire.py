"""Protocol buffers for frozen dataclasses: the wire format, nothing else.

Generated stubs of the containerd and CRI protos are 20 files that tie the agent to one protobuf
release; what the agent needs of them is some thirty small messages. A message is a frozen
dataclass whose fields carry their field number (``number``); the kind follows from the annotation:
int, bool, str, bytes, a message, a tuple of str or of messages, or a str-to-str mapping.

Unset is the kind's zero value, for a message None. Unknown fields are skipped, as the format asks.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

MessageT = TypeVar("MessageT", bound="Message")

_MASK = (1 << 64) - 1


class WireError(ValueError):
    """Bytes that are no message, or a value that its field cannot hold."""


def number(field_number: int, default: Any = None) -> Any:
    """A field with its number; the default is the kind's zero value."""
    metadata = {"number": field_number}
    if default is None:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def mapping(field_number: int) -> Any:
    """A ``map<string, string>`` field."""
    return dataclasses.field(default_factory=dict, metadata={"number": field_number})


class Message:
    """Base of messages; ``encode`` and ``decode`` are each other's inverse."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def encode(self) -> bytes:
        """The wire form. WireError when a field holds something that is not of its kind."""
        out = bytearray()
        for spec in _specs(type(self)):
            value = getattr(self, spec.name)
            if spec.repeated:
                if not isinstance(value, tuple):
                    raise WireError(f"{type(self).__name__}.{spec.name}: expected a tuple")
                for item in value:
                    _put(out, spec, item)
            elif spec.kind is dict:
                if not isinstance(value, Mapping):
                    raise WireError(f"{type(self).__name__}.{spec.name}: expected a mapping")
                for key, item in value.items():
                    _put(out, spec, _Entry(key, item))
            elif value is not None and (spec.is_message or value != spec.kind()):
                _put(out, spec, value)
        return bytes(out)

    @classmethod
    def decode(cls: type[MessageT], data: bytes) -> MessageT:
        """The message in ``data``; WireError when it is cut short or malformed."""
        fields = {spec.number: spec for spec in _specs(cls)}
        values: dict[str, Any] = {}
        position = 0
        while position < len(data):
            tag, position = _varint(data, position)
            spec = fields.get(tag >> 3)
            raw, position = _raw(data, position, tag & 7)
            if spec is None:
                continue
            value = spec.read(raw)
            if spec.kind is dict:
                values.setdefault(spec.name, {})[value.key] = value.value
            elif spec.repeated:
                values.setdefault(spec.name, []).append(value)
            else:
                values[spec.name] = value
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class _Entry(Message):
    key: str = number(1, "")
    value: str = number(2, "")


@dataclasses.dataclass(frozen=True)
class _Spec:
    name: str
    number: int
    kind: type  # int, bool, str, bytes, dict or a Message
    repeated: bool

    @property
    def is_message(self) -> bool:
        return self.kind is not dict and issubclass(self.kind, Message)

    def read(self, raw: "int | bytes") -> Any:
        if self.kind in (int, bool):
            if not isinstance(raw, int):
                raise WireError(f"field {self.name}: a number was expected")
            if self.kind is bool:
                return bool(raw)
            return raw - (1 << 64) if raw >> 63 else raw
        if not isinstance(raw, bytes):
            raise WireError(f"field {self.name}: bytes were expected")
        if self.kind is str:
            return raw.decode("utf-8", "replace")
        if self.kind is bytes:
            return raw
        message: type[Message] = _Entry if self.kind is dict else self.kind
        return message.decode(raw)


def _specs(message: type[Message]) -> tuple[_Spec, ...]:
    found = _KNOWN.get(message)
    if found is None:
        found = _KNOWN[message] = _read_specs(message)
    return found


def _read_specs(message: type[Message]) -> tuple[_Spec, ...]:
    hints = typing.get_type_hints(message)
    return tuple(
        _spec(field.name, field.metadata["number"], hints[field.name])
        for field in dataclasses.fields(message)
    )


_KNOWN: dict[type[Message], tuple[_Spec, ...]] = {}  # as many as there are message classes


def _spec(name: str, field_number: int, hint: Any) -> _Spec:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _Spec(name, field_number, arguments[0], repeated=True)
    if origin is Mapping:
        return _Spec(name, field_number, dict, repeated=False)
    if origin in (typing.Union, types.UnionType):
        (hint,) = (each for each in arguments if each is not type(None))
    return _Spec(name, field_number, hint, repeated=False)


def _put(out: bytearray, spec: _Spec, value: Any) -> None:
    kind: Any = _Entry if spec.kind is dict else spec.kind
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise WireError(f"field {spec.name}: {type(value).__name__} is not {kind.__name__}")
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise WireError(f"field {spec.name}: {value} does not fit 64 bits")
        _put_varint(out, spec.number << 3)
        _put_varint(out, value & _MASK)
        return
    if isinstance(value, str):
        try:
            data = value.encode()
        except UnicodeEncodeError as error:
            raise WireError(f"field {spec.name}: not valid text") from error
    else:
        data = value.encode() if isinstance(value, Message) else bytes(value)
    _put_varint(out, spec.number << 3 | 2)
    _put_varint(out, len(data))
    out += data


def _put_varint(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        if position >= len(data) or shift > 63:
            raise WireError("a number is cut short or longer than 64 bits")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value & _MASK, position


def _raw(data: bytes, position: int, wire_type: int) -> tuple["int | bytes", int]:
    if wire_type == 0:
        return _varint(data, position)
    if wire_type == 2:
        length, position = _varint(data, position)
    elif wire_type in (1, 5):
        length = 8 if wire_type == 1 else 4
    else:
        raise WireError(f"wire type {wire_type} is not known")
    if position + length > len(data):
        raise WireError("a field is cut short")
    return data[position : position + length], position + length
