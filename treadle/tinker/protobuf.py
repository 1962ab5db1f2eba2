"""Protocol buffers of the Tinker API: the wire format, and the four messages that the client sends or reads as such.

    read     ForwardBackwardRequest: datums with their tokens and tensors
    written  SampleResponse, ForwardBackwardOutput

Owns field numbers and byte layouts, as the `tinker` package's `tinker_public.proto` has them. Knows no model. What
comes from a client is data: sizes are checked against the message before anything is allocated, and unknown fields are
skipped, as protobuf asks for.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treadle.tinker.refusals import ApiError

FLOAT32, INT64 = 1, 2
_READ_DTYPES = {1: torch.float32, 2: torch.int64, 3: torch.int32}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

MAX_ELEMENTS = 50_000_000
"""Elements of one tensor; a sparse one may name a shape far larger than its message."""

WireValue = int | memoryview


@dataclass(frozen=True, slots=True)
class Datum:
    """A training example: the tokens that the model reads, and tensors that say what it should have said."""

    ids: Tensor
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """What `forward` and `forward_backward` send."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The k most likely tokens of each position."""

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled sequence."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampledSet:
    """The answer to a sampling request."""

    sequences: Sequence[SampledTokens]
    prompt_logprobs: Tensor | None = None
    """NaN where a token was not scored."""
    top_prompt: TopLogprobs | None = None
    target_prompt: Tensor | None = None
    alternatives: TopLogprobs | None = None


@dataclass(slots=True)
class _RawMessage:
    """A message's fields by number, each in the order they came."""

    fields: dict[int, list[WireValue]] = field(default_factory=dict)

    def all(self, number: int) -> list[memoryview]:
        found = self.fields.get(number, [])
        if any(isinstance(value, int) for value in found):
            raise _broken(f"field {number} is a number, not bytes")
        return [value for value in found if isinstance(value, memoryview)]

    def last(self, number: int) -> memoryview | None:
        found = self.all(number)
        return found[-1] if found else None

    def text(self, number: int) -> str:
        return bytes(self.last(number) or b"").decode("utf-8", "replace")

    def integer(self, number: int) -> int:
        found = self.fields.get(number, [])
        return found[-1] if found and isinstance(found[-1], int) else 0

    def integers(self, number: int) -> list[int]:
        """A repeated number, packed or not."""
        values: list[int] = []
        for item in self.fields.get(number, []):
            if isinstance(item, int):
                values.append(item)
            else:
                at = 0
                while at < len(item):
                    value, at = _read_varint(item, at)
                    values.append(value)
        return values

    def double(self, number: int) -> float:
        found = self.last(number)
        if found is None:
            return 0.0
        if len(found) != 8:
            raise _broken(f"field {number} is no double")
        return float(struct.unpack("<d", found)[0])


def _broken(problem: str) -> ApiError:
    return ApiError(422, f"the body is no protobuf message of the Tinker API: {problem}")


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise _broken("a number does not end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7


def _read_message(data: memoryview) -> _RawMessage:
    message, at = _RawMessage(), 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind, number = tag & 7, tag >> 3
        value: WireValue
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        else:
            if kind == _BYTES:
                size, at = _read_varint(data, at)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise _broken(f"wire type {kind}")
            if size > len(data) - at:
                raise _broken(f"field {number} is cut off")
            value, at = data[at : at + size], at + size
        message.fields.setdefault(number, []).append(value)
    return message


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """A request to `forward_backward`; an ApiError where it is none."""
    message = _read_message(memoryview(body))
    config: dict[str, float | str] = {key: entry.double(2) for key, entry in _entries(message, 5)}
    for key, entry in _entries(message, 7):
        value = _read_message(entry.last(2) or memoryview(b""))
        config[key] = value.text(2) if 2 in value.fields else value.double(1)
    data = tuple(_read_datum(_read_message(item), at) for at, item in enumerate(message.all(3)))
    return ForwardBackwardRequest(
        message.text(1), message.integer(2), data, message.text(4), config, bool(message.integer(6))
    )


def _entries(message: _RawMessage, number: int) -> Iterator[tuple[str, _RawMessage]]:
    """The entries of a map."""
    for item in message.all(number):
        entry = _read_message(item)
        yield entry.text(1), entry


def _read_datum(message: _RawMessage, at: int) -> Datum:
    parts = []
    for item in message.all(1):
        chunk = _read_message(item)
        text = chunk.last(1)
        if text is None:
            raise ApiError(400, f"data[{at}].model_input has an image or audio chunk; treadle serves text models")
        parts.append(_numbers(_read_message(text).last(1), torch.int32, f"data[{at}].model_input").long())
    ids = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
    inputs = {}
    for name, entry in _entries(message, 2):
        inputs[name] = _read_tensor(_read_message(entry.last(2) or memoryview(b"")), f"data[{at}].{name}")
    return Datum(ids, inputs)


def _read_tensor(message: _RawMessage, name: str) -> Tensor:
    """A dense tensor of float32 or int64; a sparse one with 0 where it lists nothing."""
    dtype = _READ_DTYPES.get(message.integer(3))
    if dtype is None:
        raise ApiError(422, f"{name}: dtype number {message.integer(3)} is none of float32, int64 and int32")
    shape = message.integers(4)
    if any(size >= 2**62 for size in shape) or _count(shape) > MAX_ELEMENTS:
        raise ApiError(422, f"{name}: a tensor of shape {shape} is larger than {MAX_ELEMENTS} elements")
    sparse = message.last(2)
    if sparse is None:
        values = _numbers(message.last(1), dtype, name)
        if shape and _count(shape) != len(values):
            raise ApiError(422, f"{name}: {len(values)} values do not fill the shape {shape}")
        tensor = values.view(shape) if shape else values
    else:
        tensor = _read_sparse(_read_message(sparse), dtype, shape, name)
    return tensor.long() if dtype == torch.int32 else tensor


def _read_sparse(message: _RawMessage, dtype: torch.dtype, shape: list[int], name: str) -> Tensor:
    values = _numbers(message.last(1), dtype, name)
    starts = _numbers(message.last(2), torch.int64, name)
    columns = _numbers(message.last(3), torch.int64, name)
    return spread_sparse(values, starts, columns, shape, name, 0)


def spread_sparse(values: Tensor, starts: Tensor, columns: Tensor, shape: list[int], name: str, blank: int) -> Tensor:
    """A sparse tensor of compressed rows as a dense one, with `blank` where it lists nothing."""
    counts = starts.diff()
    fits = len(shape) == 2 and len(starts) == shape[0] + 1 and len(columns) == len(values)
    if not fits or int(starts[0]) != 0 or int(starts[-1]) != len(values) or bool((counts < 0).any()):
        raise ApiError(422, f"{name}: its sparse rows do not fit the shape {shape}")
    if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < shape[1]:
        raise ApiError(422, f"{name}: a sparse column is outside of the shape {shape}")
    dense = torch.full(shape, blank, dtype=values.dtype)
    dense[torch.arange(shape[0]).repeat_interleave(counts), columns] = values
    return dense


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _numbers(data: memoryview | None, dtype: torch.dtype, name: str) -> Tensor:
    if data is None or not len(data):
        return torch.zeros(0, dtype=dtype)
    if len(data) % dtype.itemsize:
        raise ApiError(422, f"{name}: {len(data)} bytes are no {dtype} values")
    return torch.frombuffer(bytearray(data), dtype=dtype)


# --- writing


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value) if value else b""


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _raw(tensor: Tensor, dtype: torch.dtype) -> bytes:
    return bytes(tensor.detach().to("cpu", dtype).contiguous().numpy().tobytes())


def _packed(number: int, values: Iterable[int]) -> bytes:
    data = b"".join(_varint(value) for value in values)
    return _bytes(number, data) if data else b""


def write_sample(result: SampledSet) -> bytes:
    """A SampleResponse."""
    parts = [_bytes(1, _write_sequence(sequence)) for sequence in result.sequences]
    if result.prompt_logprobs is not None:
        parts.append(_bytes(2, _raw(result.prompt_logprobs, torch.float32)))
    if result.top_prompt is not None:
        parts.append(_bytes(3, _write_top(result.top_prompt)))
    if result.target_prompt is not None:
        parts.append(_bytes(5, _write_tensor(result.target_prompt)))
    if result.alternatives is not None:
        ids, logprobs = _write_tensor(result.alternatives.ids), _write_tensor(result.alternatives.logprobs)
        parts.append(_bytes(6, _bytes(1, ids) + _bytes(2, logprobs)))
    return b"".join(parts)


def _write_sequence(sequence: SampledTokens) -> bytes:
    ids, logprobs = torch.tensor(sequence.ids), torch.tensor(sequence.logprobs)
    parts = [_number(1, 0 if sequence.stopped else 1), _bytes(2, _raw(ids, torch.int32))]
    parts.append(_bytes(3, _raw(logprobs, torch.float32)))
    if sequence.top is not None:
        parts.append(_bytes(4, _write_top(sequence.top)))
    return b"".join(parts)


def _write_top(top: TopLogprobs) -> bytes:
    length, k = top.ids.shape
    data = _bytes(1, _raw(top.ids, torch.int32)) + _bytes(2, _raw(top.logprobs, torch.float32))
    return data + _number(3, k) + _number(4, length)


def _write_tensor(tensor: Tensor) -> bytes:
    dtype, number = (torch.float32, FLOAT32) if tensor.is_floating_point() else (torch.int64, INT64)
    return _bytes(1, _raw(tensor, dtype)) + _number(3, number) + _packed(4, tensor.shape)


def write_forward_backward(outputs: Sequence[Mapping[str, Tensor]], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput. Datums whose tensors have other trailing shapes than those before begin a new record."""
    parts = [_bytes(1, b"ArrayRecord")]
    start = 0
    for at in range(1, len(outputs) + 1):
        if at == len(outputs) or _trailing(outputs[at]) != _trailing(outputs[start]):
            parts.append(_bytes(2, _write_record(outputs[start:at])))
            start = at
    for name, value in metrics.items():
        double = _varint(2 << 3 | _FIXED64) + struct.pack("<d", value)
        parts.append(_bytes(3, _bytes(1, name.encode()) + double))
    return b"".join(parts)


def _trailing(output: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in output.items()}


def _write_record(outputs: Sequence[Mapping[str, Tensor]]) -> bytes:
    parts = []
    for name, shape in _trailing(outputs[0]).items():
        data = [_raw(output[name], torch.float32) for output in outputs]
        offsets = torch.tensor([0, *(len(part) for part in data)]).cumsum(0)
        batched = _bytes(1, b"".join(data)) + _bytes(2, _raw(offsets, torch.int64))
        batched += _number(3, FLOAT32) + _packed(4, shape)
        parts.append(_bytes(2, _bytes(1, name.encode()) + _bytes(2, batched)))
    return b"".join(parts) + _number(3, len(outputs))
