"""CUDA virtual memory: it grows in place, and for sleep mode is released and comes back at the same address.

Owns the reserved addresses and the physical memory behind them, as vLLM's cumem allocator does: CUDA graphs recorded
over it stay valid. The addresses are regions of one size, which grow together from their start. Contents are lost with
the memory. Uses the driver's virtual memory calls; knows nothing of what is stored.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from treadle.errors import EngineFailure

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3
_OUT_OF_MEMORY = 2
"""Numbers of the driver's interface."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def mapping_granularity(device: torch.device) -> int:
    """Bytes of which the mapped part of a region is a multiple."""
    torch.cuda.synchronize(device)  # makes the device's context this thread's
    grain = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(_properties(device)), 1)
    return grain.value


class CudaVirtualMemory:
    """Regions of bytes on a GPU, zero-filled where they are mapped; sizes are multiples of `mapping_granularity`."""

    def __init__(self, regions: int, region_bytes: int, first_bytes: int, device: torch.device) -> None:
        """Reserve `region_bytes` of addresses for each region, and map its first bytes."""
        self._device = device
        self._regions, self._region_bytes = regions, region_bytes
        self._chunks: list[tuple[int, int, ctypes.c_uint64]] = []
        """What is mapped: offset from the first address, bytes and handle."""
        self._address, nowhere = ctypes.c_uint64(), ctypes.c_uint64(0)
        torch.cuda.synchronize(device)  # makes the device's context this thread's
        _call("cuMemAddressReserve", ctypes.byref(self._address), _size(self._size), _size(0), nowhere, nowhere)
        self._first_bytes = self.mapped = first_bytes
        """Bytes of each region that are mapped, or will be by `acquire`."""
        self._map_each(0, first_bytes)
        self.bytes: Tensor = torch.as_tensor(_Array(self._address.value, self._size), device=device)
        self._zero(0)

    @property
    def _size(self) -> int:
        return self._regions * self._region_bytes

    @property
    def present(self) -> bool:
        return bool(self._chunks)

    def grow(self, num_bytes: int) -> bool:
        """Map this many more bytes of each region. False, and nothing has changed, where the GPU has no room."""
        before = self.mapped
        try:
            self._map_each(before, num_bytes)
        except EngineFailure:
            return False
        self._zero(before)
        return True

    def acquire(self) -> None:
        """Map the first bytes of each region again, if memory was released."""
        if not self.present:
            self._map_each(0, self._first_bytes)
            self._zero(0)

    def _map_each(self, start: int, num_bytes: int) -> None:
        count = len(self._chunks)
        try:
            for region in range(self._regions):
                self._map(region * self._region_bytes + start, num_bytes)
        except EngineFailure:
            while len(self._chunks) > count:
                self._unmap(*self._chunks.pop())
            raise
        self.mapped = start + num_bytes
        everywhere = _Access(_location(self._device), _READ_WRITE)
        for offset, size, _ in self._chunks[count:]:
            address = ctypes.c_uint64(self._address.value + offset)
            _call("cuMemSetAccess", address, _size(size), ctypes.byref(everywhere), _size(1))

    def _map(self, offset: int, num_bytes: int) -> None:
        handle = ctypes.c_uint64()
        wanted = (
            ctypes.byref(handle),
            _size(num_bytes),
            ctypes.byref(_properties(self._device)),
            ctypes.c_uint64(0),
        )
        if _try("cuMemCreate", *wanted) == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            _call("cuMemCreate", *wanted)
        address = ctypes.c_uint64(self._address.value + offset)
        _call("cuMemMap", address, _size(num_bytes), _size(0), handle, ctypes.c_uint64(0))
        self._chunks.append((offset, num_bytes, handle))

    def _unmap(self, offset: int, num_bytes: int, handle: ctypes.c_uint64) -> None:
        _call("cuMemUnmap", ctypes.c_uint64(self._address.value + offset), _size(num_bytes))
        _call("cuMemRelease", handle)

    def _zero(self, start: int) -> None:
        self.bytes.view(self._regions, self._region_bytes)[:, start : self.mapped].zero_()

    def release(self) -> None:
        """Release the physical memory. It must not be touched until `acquire`."""
        if self.present:
            torch.cuda.synchronize(self._device)
            for chunk in self._chunks:
                self._unmap(*chunk)
            self._chunks.clear()
            self.mapped = self._first_bytes

    def close(self) -> None:
        """Release memory and addresses for good."""
        self.release()
        if self._address.value:
            _call("cuMemAddressFree", self._address, _size(self._size))
            self._address.value = 0


def _location(device: torch.device) -> _Location:
    return _Location(_DEVICE, torch.cuda.current_device() if device.index is None else device.index)


def _properties(device: torch.device) -> _Properties:
    return _Properties(_PINNED, 0, _location(device))


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that tensors of this process can take: those that are free, and those that torch keeps unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


class _Array:
    """Memory, as torch takes it over."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _try(name: str, *arguments: Any) -> int:
    return int(getattr(_driver(), name)(*arguments))


def _call(name: str, *arguments: Any) -> None:
    problem = _try(name, *arguments)
    if problem == _OUT_OF_MEMORY:
        free, total = torch.cuda.mem_get_info()
        raise EngineFailure(
            f"the KV cache does not fit: {free:,} of {total:,} bytes of the GPU are free; "
            "lower rollout.gpu_memory_utilization or actor.ppo_max_token_len_per_gpu"
        )
    if problem:
        raise EngineFailure(f"the CUDA driver refused {name}: error {problem}")
