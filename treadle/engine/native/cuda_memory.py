"""CUDA virtual memory for sleep mode: memory that is released for a while and comes back at the same address.

Owns the reserved addresses and the physical memory behind them, as vLLM's cumem allocator does: CUDA graphs recorded
over it stay valid. Contents are lost with the memory. Uses the driver's virtual memory calls; knows nothing of what is
stored.
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


class CudaVirtualMemory:
    """Bytes on a GPU, zero-filled whenever they are mapped."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # makes the device's context this thread's
        index = torch.cuda.current_device() if device.index is None else device.index
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(_PINNED, 0, self._location)
        grain = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties), 1)
        self._size = -(-num_bytes // grain.value) * grain.value
        self._address = ctypes.c_uint64()
        nowhere = ctypes.c_uint64(0)
        _call("cuMemAddressReserve", ctypes.byref(self._address), _size(self._size), _size(0), nowhere, nowhere)
        self._handle: ctypes.c_uint64 | None = None
        self._map()
        self.bytes: Tensor = torch.as_tensor(_Array(self._address.value, num_bytes), device=device)
        self.bytes.zero_()

    @property
    def present(self) -> bool:
        return self._handle is not None

    def acquire(self) -> None:
        """Map memory again, if it was released."""
        if not self.present:
            self._map()
            self.bytes.zero_()

    def _map(self) -> None:
        handle = ctypes.c_uint64()
        wanted = (ctypes.byref(handle), _size(self._size), ctypes.byref(self._properties), ctypes.c_uint64(0))
        if _try("cuMemCreate", *wanted) == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            _call("cuMemCreate", *wanted)
        _call("cuMemMap", self._address, _size(self._size), _size(0), handle, ctypes.c_uint64(0))
        access = _Access(self._location, _READ_WRITE)
        _call("cuMemSetAccess", self._address, _size(self._size), ctypes.byref(access), _size(1))
        self._handle = handle

    def release(self) -> None:
        """Release the physical memory. It must not be touched until `acquire`."""
        if self._handle is not None:
            torch.cuda.synchronize(self._location.id)
            _call("cuMemUnmap", self._address, _size(self._size))
            _call("cuMemRelease", self._handle)
            self._handle = None

    def close(self) -> None:
        """Release memory and addresses for good."""
        self.release()
        if self._address.value:
            _call("cuMemAddressFree", self._address, _size(self._size))
            self._address.value = 0


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
