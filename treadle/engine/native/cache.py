"""Keys and values of the sequences that are being decoded: one slot for each.

Owns the memory, its budget, and copies in and out of it. Knows nothing of requests. A slot is reserved for the longest
sequence, so a sequence that has a slot never runs out of memory; those without one wait.
Invariant: every number in here is finite, since masked places are still multiplied by zero.
"""

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from treadle.config.rollout import RolloutConfig
from treadle.engine.native.memory import Block
from treadle.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPAN_STEP = 16
"""Lengths are rounded up to a multiple of this: with it, a row's bits do not depend on how far others reach."""

_HOST_SHARE = 0.5
"""The fraction of a machine's memory that the slots of an engine on CPU may take."""


def round_up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token costs."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, module: "PreTrainedModel") -> "CacheShape":
        config = cast(Any, module.config)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, kv_heads, head_dim)

    def numbers_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers as a tensor; on the way to a GPU the host does not wait for what runs there."""
    exact = isinstance(numbers, array) and bool(numbers)  # several times as fast as a list
    tensor = torch.frombuffer(numbers, dtype=dtype) if exact else torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Move(NamedTuple):
    """Tokens on their way from one slot to another."""

    source: int
    target: int
    tokens: int


class SlotCache:
    """[layers, 2, slots, kv heads, length, head size]. The last place of each slot takes writes that nobody reads."""

    def __init__(self, shape: CacheShape, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self.length = length
        self.dump = round_up(length + 1, SPAN_STEP) - 1
        size = (shape.layers, 2, slots, shape.kv_heads, self.dump + 1, shape.head_dim)
        self._block: Block | None = None
        if device.type == "cuda":
            self._block = Block(prod(size) * dtype.itemsize, device)
            self.kv = self._block.bytes.view(dtype).view(size)
        else:
            self.kv = torch.zeros(size, dtype=dtype, device=device)
        self._taken: list[tuple[int, int, Tensor]] = []
        """Slots, tokens and where they go: copies that wait to be made together."""

    @classmethod
    def create(
        cls, rollout: RolloutConfig, module: "PreTrainedModel", device: torch.device, row_step: int
    ) -> "SlotCache":
        """As many slots as `rollout.max_num_seqs` asks for and the budget allows, in multiples of `row_step`."""
        shape, length = CacheShape.of(module), rollout.sequence_length()
        slot_bytes = shape.numbers_per_token() * module.dtype.itemsize * round_up(length + 1, SPAN_STEP)
        budget = cache_budget(rollout, device)
        slots = min(round_up(rollout.max_num_seqs, row_step), budget // slot_bytes // row_step * row_step)
        if slots < row_step:
            problem = f"{row_step} sequences of {length} tokens need {slot_bytes * row_step:,} bytes of KV cache"
            fix = "lower rollout.max_model_len, or raise rollout.gpu_memory_utilization"
            raise ConfigError(
                [Mistake("rollout.max_model_len", f"{problem}; the budget is {budget:,}", length, fix=fix)]
            )
        return cls(shape, slots, length, module.dtype, device)

    def release(self) -> None:
        """Give a GPU's memory back until `acquire`; what the slots held is gone."""
        self._taken.clear()
        if self._block is not None:
            self._block.release()

    def acquire(self) -> None:
        """Take the memory again, if it was given back."""
        if self._block is not None:
            self._block.acquire()

    def close(self) -> None:
        """Give the memory back for good."""
        if self._block is not None:
            self._block.close()

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: [slots, kv heads, length, head size] each."""
        return self.kv[number, 0], self.kv[number, 1]

    def lines(self, slots_T: Tensor, places_T: Tensor) -> Tensor:
        """Where `write` puts the heads of each token: [kv heads * T] line numbers of a layer's keys or values."""
        heads, length = self.kv.shape[3], self.kv.shape[4]
        head_K = torch.arange(heads, device=slots_T.device).unsqueeze(1)
        return ((slots_T * heads + head_K) * length + places_T).flatten()

    def write(self, layer: int, lines: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values of one layer, [1, kv heads, T, head size] each."""
        size = key.shape[-1]
        for target, source in zip(self.layer(layer), (key, value), strict=True):
            target.view(-1, size).index_copy_(0, lines, source.reshape(-1, size))

    def take(self, slot: int, tokens: int) -> Tensor:
        """A copy of what a slot holds: [layers, 2, kv heads, tokens, head size]. Whole after `flush`."""
        if self.kv.device.type != "cuda":
            return self.kv[:, :, slot, :, :tokens].clone()
        layers, _, _, heads, _, size = self.kv.shape
        kept = self.kv.new_empty((layers, 2, heads, tokens, size))
        self._taken.append((slot, tokens, kept))
        return kept

    def flush(self) -> None:
        """Make all copies that were taken, with one kernel. Called before a slot is written that was taken from."""
        if self._taken:
            from treadle.engine.native.transfer import take_slots

            places = [(slot, tokens, kept.data_ptr()) for slot, tokens, kept in self._taken]
            take_slots(self.kv, to_device(places, self.kv.device))
            self._taken.clear()

    def put(self, slot: int, kept: Tensor, tokens: int) -> None:
        """Put back the first `tokens` of what `take` gave."""
        self.flush()
        self.kv[:, :, slot, :, :tokens] = kept[:, :, :, :tokens]

    def copy(self, moves: Sequence[Move]) -> None:
        """Give slots the first tokens of others. No slot is both source and target."""
        self.flush()
        if self.kv.device.type == "cuda":
            from treadle.engine.native.transfer import copy_slots  # triton comes with it

            copy_slots(self.kv, to_device([(move.source, move.target, move.tokens) for move in moves], self.kv.device))
            return
        for move in moves:
            self.kv[:, :, move.target, :, : move.tokens] = self.kv[:, :, move.source, :, : move.tokens]

    def clear(self, slot: int) -> None:
        """Forget numbers that are not finite."""
        self.kv[:, :, slot] = 0


def cache_budget(rollout: RolloutConfig, device: torch.device) -> int:
    """Bytes for the slots: on a GPU the configured share of it, less what is taken already."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(rollout.gpu_memory_utilization * total) - (total - free))
    return int(_HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
