"""Weights that are read where they lie: handles are made once, and again when the tensors have moved."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from treadle.weights import cuda_ipc, shared_memory
from treadle.weights.shared_memory import SharedMemoryTransport, _readable_in_place
from treadle.weights.transfer import CastTensors, TensorSpec

HELD: dict[int, Tensor] = {}
"""Stands in for a GPU that both sides see."""

SYNCHRONIZED: list[str] = []


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The handles that were made, by where the tensors are."""
    handles: list[int] = []

    def make_handle(tensor: Tensor) -> int:
        handles.append(tensor.data_ptr())
        HELD[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    monkeypatch.setattr(cuda_ipc, "make_handle", make_handle)
    monkeypatch.setattr(cuda_ipc, "open_handle", HELD.__getitem__)
    monkeypatch.setattr(shared_memory, "_readable_in_place", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: SYNCHRONIZED.append(device.type))
    yield handles
    HELD.clear()
    SYNCHRONIZED.clear()


def read(transport: SharedMemoryTransport, version: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    transfer = transport.publish(version, CastTensors(tensors, None))
    found = dict(transfer.read())
    transport.retire(version)
    return found


def test_nothing_is_copied_and_handles_are_made_once(made: list[int]) -> None:
    transport, tensors = SharedMemoryTransport(timeout_s=10), {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    for version in (1, 2):
        found = read(transport, version, tensors)
        assert {name: tensor.data_ptr() for name, tensor in found.items()} == {
            name: tensor.data_ptr() for name, tensor in tensors.items()
        }
    assert len(made) == 2


def test_either_side_waits_for_what_it_computed() -> None:
    transport = SharedMemoryTransport(timeout_s=10)
    reading = transport.publish(1, CastTensors({"a": torch.ones(3)}, None)).batches()
    next(reading)
    assert SYNCHRONIZED == ["cpu"], "the sender, before anybody reads"
    assert list(reading) == [] and SYNCHRONIZED == ["cpu", "cpu"]
    transport.close()


def test_memory_of_others_is_let_go_once_when_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(cuda_ipc, "Finalize", lambda *words, **_: registered.append(words))

    def let_go() -> None: ...

    for _ in range(3):
        cuda_ipc.at_exit(let_go)
    assert registered == [(None, let_go)]


def test_tensors_that_moved_are_shared_again(made: list[int]) -> None:
    transport, tensors = SharedMemoryTransport(timeout_s=10), {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    read(transport, 1, tensors)
    tensors["b"] = torch.full((2, 2), 7.0)
    assert read(transport, 2, tensors)["b"].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert len(made) == 4


def test_what_lies_at_the_same_place_in_another_shape_is_shared_again(made: list[int]) -> None:
    transport, weight = SharedMemoryTransport(timeout_s=10), torch.arange(6.0)
    for version, shape in enumerate([(2, 3), (3, 2)]):
        assert read(transport, version, {"a": weight.view(shape)})["a"].shape == shape
    assert len(made) == 2


def test_a_reader_that_opened_others_meanwhile_asks_again(made: list[int]) -> None:
    first, second = SharedMemoryTransport(timeout_s=10), SharedMemoryTransport(timeout_s=10)
    one, other = {"a": torch.ones(3)}, {"a": torch.zeros(3)}
    assert read(first, 1, one)["a"].sum() == 3 and read(second, 1, other)["a"].sum() == 0
    assert read(first, 2, one)["a"].sum() == 3
    assert len(made) == 3


class Lying(NamedTuple):
    """A tensor as far as it matters where it lies."""

    device: torch.device = torch.device("cuda", 0)
    dtype: torch.dtype = torch.bfloat16
    contiguous: bool = True

    def is_contiguous(self) -> bool:
        return self.contiguous


@pytest.mark.parametrize(
    ("tensor", "device", "ready"),
    [
        (Lying(), "cuda", True),
        (Lying(), "cuda:0", True),
        (Lying(), "cuda:1", False),
        (Lying(), "cpu", False),
        (Lying(device=torch.device("cpu")), "cuda", False),
        (Lying(dtype=torch.float32), "cuda", False),
        (Lying(contiguous=False), "cuda", False),
    ],
)
def test_only_what_lies_ready_on_the_gpu_is_read_there(tensor: Any, device: str, ready: bool) -> None:
    specs = [TensorSpec("a", (2,), torch.bfloat16), TensorSpec("b", (2,), torch.bfloat16)]
    assert _readable_in_place({"a": Lying(), "b": tensor}, specs, torch.device(device)) is ready  # type: ignore[dict-item]
