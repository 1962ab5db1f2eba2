"""Messages of the Tinker API for tests, by Google's protobuf: independent of treadle's own wire code.

The schema is what the `tinker` package's `tinker_public_pb2` declares, as far as treadle reads or writes it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from torch import Tensor

_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}

SCHEMA: Mapping[str, Sequence[tuple[int, str, str]]] = {
    "SampleResponse": [
        *(
            (1, "sequences", "*SampledSequence"),
            (2, "prompt_logprobs", "bytes"),
            (3, "topk_prompt_logprobs", "TopkLogprobs"),
        ),
        *((5, "target_prompt_logprobs", "Tensor"), (6, "prompt_alt_tokens", "PromptAltTokens")),
    ],
    "PromptAltTokens": [(1, "tokens", "Tensor"), (2, "logprobs", "Tensor")],
    "SampledSequence": [
        *((1, "stop_reason", "int32"), (2, "tokens", "bytes"), (3, "logprobs", "bytes")),
        (4, "topk_sampled_logprobs", "TopkLogprobs"),
    ],
    "TopkLogprobs": [(1, "token_ids", "bytes"), (2, "logprobs", "bytes"), (3, "k", "uint32"), (4, "length", "uint32")],
    "SparseCsr": [(1, "values", "bytes"), (2, "crow_indices", "bytes"), (3, "col_indices", "bytes")],
    "Tensor": [(1, "dense", "bytes"), (2, "sparse_csr", "SparseCsr"), (3, "dtype", "int32"), (4, "shape", "*int64")],
    "BatchedTensor": [
        (1, "data", "bytes"),
        (2, "offsets", "bytes"),
        (3, "dtype", "int32"),
        (4, "trailing_shape", "*int64"),
    ],
    "NamedBatch": [(1, "key", "string"), (2, "value", "BatchedTensor")],
    "ArrayRecord": [(1, "type_tag", "string"), (2, "fields", "*NamedBatch"), (3, "num_datums", "int64")],
    "Metric": [(1, "key", "string"), (2, "value", "double")],
    "ForwardBackwardOutput": [
        *((1, "loss_fn_output_type", "string"), (2, "loss_fn_outputs", "*ArrayRecord"), (3, "metrics", "*Metric")),
    ],
    "ForwardBackwardRequest": [
        *((1, "model_id", "string"), (2, "seq_id", "int32"), (3, "data", "*Datum"), (4, "loss_fn", "string")),
        *((5, "loss_fn_config", "*Metric"), (6, "forward_only", "bool"), (7, "loss_fn_config_v2", "*NamedValue")),
    ],
    "LossConfigValue": [(1, "number", "double"), (2, "text", "string")],
    "NamedValue": [(1, "key", "string"), (2, "value", "LossConfigValue")],
    "NamedTensor": [(1, "key", "string"), (2, "value", "Tensor")],
    "Datum": [(1, "model_input", "*Chunk"), (2, "loss_fn_inputs", "*NamedTensor")],
    "Chunk": [(1, "encoded_text", "EncodedTextChunk"), (2, "image", "ImageChunk")],
    "EncodedTextChunk": [(1, "tokens", "bytes")],
    "ImageChunk": [(1, "data", "bytes")],
}
"""Fields by number; a star is a repeated one. A map is a repeated pair of key and value: the same on the wire."""


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tinker_test.proto", package="tinker_test", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, label, kind in fields:
            base = kind.lstrip("*")
            added = message.field.add(name=label, number=number, label=3 if kind.startswith("*") else 1)
            added.type = _TYPES.get(base, 11)
            if base not in _TYPES:
                added.type_name = f".tinker_test.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tinker_test.{name}")) for name in SCHEMA}


MESSAGES = _build()


def tensor_message(tensor: Tensor, *, sparse: bool = False) -> Any:
    """A tensor of float32 or int64, as the client writes it."""
    kind, number = (torch.float32, 1) if tensor.is_floating_point() else (torch.int64, 2)
    message = MESSAGES["Tensor"](dtype=number, shape=list(tensor.shape))
    if not sparse:
        message.dense = tensor.to(kind).contiguous().numpy().tobytes()
        return message
    rows, columns = tensor.nonzero(as_tuple=True)
    starts = torch.tensor([0, *(int((rows <= row).sum()) for row in range(len(tensor)))])
    message.sparse_csr.values = tensor[rows, columns].to(kind).numpy().tobytes()
    message.sparse_csr.crow_indices = starts.numpy().tobytes()
    message.sparse_csr.col_indices = columns.contiguous().numpy().tobytes()
    return message


def datum_message(ids: Sequence[int], inputs: Mapping[str, Tensor], sparse: Sequence[str] = ()) -> Any:
    message = MESSAGES["Datum"]()
    chunk = message.model_input.add()
    chunk.encoded_text.tokens = torch.tensor(ids, dtype=torch.int32).numpy().tobytes()
    for name, tensor in inputs.items():
        message.loss_fn_inputs.add(key=name, value=tensor_message(tensor, sparse=name in sparse))
    return message


def forward_backward(
    model_id: str,
    seq_id: int,
    data: Sequence[tuple[Sequence[int], Mapping[str, Tensor]]],
    loss_fn: str = "cross_entropy",
    *,
    forward_only: bool = False,
    sparse: Sequence[str] = (),
    **config: float,
) -> bytes:
    """The body of a `forward_backward` request."""
    message = MESSAGES["ForwardBackwardRequest"](
        model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only
    )
    for name, value in config.items():
        message.loss_fn_config.add(key=name, value=value)
        message.loss_fn_config_v2.add(key=name).value.number = value
    for ids, inputs in data:
        message.data.append(datum_message(ids, inputs, sparse))
    return bytes(message.SerializeToString())


def read_outputs(body: bytes) -> tuple[list[dict[str, Tensor]], dict[str, float]]:
    """The tensors of each datum, and the metrics, of a `ForwardBackwardOutput`."""
    message = MESSAGES["ForwardBackwardOutput"].FromString(body)
    outputs: list[dict[str, Tensor]] = []
    for record in message.loss_fn_outputs:
        first = len(outputs)
        outputs += [{} for _ in range(record.num_datums)]
        for field in record.fields:
            offsets = torch.frombuffer(bytearray(field.value.offsets), dtype=torch.int64).tolist()
            for at, (start, end) in enumerate(pairwise(offsets)):
                values = torch.frombuffer(bytearray(field.value.data[start:end]), dtype=torch.float32)
                outputs[first + at][field.key] = values.view(-1, *field.value.trailing_shape)
    return outputs, {metric.key: metric.value for metric in message.metrics}


def read_sample(body: bytes) -> Any:
    """A `SampleResponse`."""
    return MESSAGES["SampleResponse"].FromString(body)


def floats(data: bytes) -> list[float]:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() if data else []


def integers(data: bytes) -> list[int]:
    return torch.frombuffer(bytearray(data), dtype=torch.int32).tolist() if data else []
