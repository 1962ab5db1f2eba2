"""What travels between processes: described, divided, cast."""

import pickle
import socket
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treadle.weights import cuda_ipc, shared_memory
from treadle.weights.transfer import CastTensors, TensorSpec, WeightTransfer, make_buckets, tensor_specs

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([1, 2, 3]),
    "c": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16(),
}


class Copied(WeightTransfer):
    """A parcel that carries its tensors along, and hands each out from the same memory."""

    def __init__(self, tensors: dict[str, Tensor], bucket_bytes: int) -> None:
        super().__init__(tensor_specs(tensors), bucket_bytes)
        self.tensors = tensors

    def batches(self) -> Iterator[Sequence[tuple[str, Tensor]]]:
        for bucket in self.buckets:
            memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            bucket.fill(memory, self.tensors)
            yield [*bucket.views(memory)]


def test_a_parcel_is_a_map_that_survives_pickling() -> None:
    transfer = pickle.loads(pickle.dumps(Copied(TENSORS, 64)))
    assert list(transfer) == ["a", "b", "c"] and len(transfer) == 3
    assert transfer.num_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in transfer.items():
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])
    assert torch.equal(transfer["c"], TENSORS["c"])
    assert [tuple(tensor.shape) for tensor in transfer.values()] == [(2, 3), (3,), (5, 7)]
    with pytest.raises(KeyError):
        transfer["d"]


@given(sizes=st.lists(st.integers(0, 300), max_size=20), bucket=st.integers(1, 500))
def test_buckets_hold_every_tensor_once_and_no_more_than_they_may(sizes: list[int], bucket: int) -> None:
    specs = [TensorSpec(str(at), (size,), torch.float32) for at, size in enumerate(sizes)]
    buckets = make_buckets(specs, bucket)
    assert [spec for part in buckets for spec in part.specs] == specs
    for part in buckets:
        assert part.num_bytes <= bucket or len(part.specs) == 1
        ends = [offset + spec.num_bytes for spec, offset in zip(part.specs, part.offsets, strict=True)]
        assert all(end <= after for end, after in zip(ends, (*part.offsets[1:], part.num_bytes), strict=True))


def test_a_bucket_lies_at_the_front_of_memory_of_any_size() -> None:
    (bucket,) = make_buckets(tensor_specs(TENSORS), 1 << 10)
    memory = torch.zeros(bucket.num_bytes + 3, dtype=torch.uint8)
    bucket.fill(memory, TENSORS)
    assert all(torch.equal(view, TENSORS[name]) for name, view in bucket.views(memory))


def test_what_requires_gradients_is_cast_without_them() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert not CastTensors({"a": weight}, torch.bfloat16)["a"].requires_grad


def test_casting_leaves_whole_numbers_alone_and_says_the_same_before_as_after() -> None:
    cast = CastTensors(TENSORS, torch.bfloat16)
    assert cast["a"].dtype is torch.bfloat16 and cast["b"].dtype is torch.int64
    assert cast.specs() == tensor_specs(dict(cast.items()))
    assert CastTensors(TENSORS, None).specs() == tensor_specs(TENSORS)


def test_what_follows_the_handle_of_a_gpu_at_once_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent by the ring of a GPU, read by its reader: with memory of the host in the place of the GPU's."""
    monkeypatch.setattr(cuda_ipc, "_identity", lambda device: "gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sent = shared_memory.DeviceSlotRing(torch.zeros(8, dtype=torch.uint8), 4)
    sent._reader, sent._message = b"me", pickle.dumps(("gpu", make_zeros, tuple(range(8))))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent.send(theirs, b"me")
        theirs.sendall(b"number 0")
        found = shared_memory.attach_ring(ours, 4, 2)
        assert len(found.slots) == 2 and ours.recv(8) == b"number 0"


def make_zeros(*_: object) -> torch.Tensor:
    return torch.zeros(8, dtype=torch.uint8)
