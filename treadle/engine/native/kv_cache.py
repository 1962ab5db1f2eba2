"""Paged KV cache: keys and values in pages of fixed size (vLLM's blocks), found through a page table.

Owns the memory and its budget, the page table, and copies in and out. Knows nothing of requests and of which sequence
may have which page. Kernels find pages through the table, which stays at its
address. On a CPU a page is as long as the longest sequence, if that many fit: row i is then on page i, and attention
reads the cache in place.
Invariant: every number in the cache is finite, since masked slots are still multiplied by zero.
"""

import mmap
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from treadle.config.rollout import RolloutConfig
from treadle.engine.native.cuda_memory import CudaVirtualMemory, mapping_granularity
from treadle.errors import ConfigError, Mistake
from treadle.model.attention import AttentionOptions, PackedMetadata
from treadle.model.causal_lm import hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPAN_STEP = 16
"""Lengths are rounded up to a multiple of this: with it, a row's bits do not depend on how far others reach."""

PAGE_SIZE = 64
"""Slots of a page on a GPU: a multiple of what the decode kernel reads at once."""

_GROWTH_STEPS = 8
"""In how many steps the page pool of a GPU grows to the whole budget."""

_FIRST_BACKOFF, _MAX_BACKOFF = 16, 4096
"""Calls of `grow` that do not try after a GPU had no room, doubled each time: every eviction calls it, and the driver
takes long to refuse, since torch frees what it has cached first."""

_PAGES_PER_SAVE = 16
"""Pages that are saved together: they take room on the GPU for a moment."""

_HOST_MEMORY_FRACTION = 0.5
"""The fraction of a machine's memory that the pages of an engine on CPU may take."""


def round_up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """Shape of one token's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    @torch.no_grad()
    def of(cls, module: "PreTrainedModel") -> "KVCacheShape":
        """Found out by running the module on two tokens: what its layers pass to attention is what is cached."""
        metadata = _ShapeProbe((2,), module.device)
        hidden_states(module, torch.zeros(2, dtype=torch.long, device=module.device), metadata.positions(), metadata)
        layers, shapes = metadata.layers, set(metadata.shapes)
        problem = None
        if sorted(layers) != list(range(len(layers))) or not layers:
            problem = "a layer attends twice in one forward, or has no number: its keys and values have no slot"
        elif len(shapes) > 1:
            problem = f"its layers have key and value heads of different shapes: {sorted(shapes)}"
        if problem is not None:
            problem = f"{type(module).__name__} does not fit the native engine: {problem}"
            raise ConfigError([Mistake("rollout.name", problem, "native", fix="sample with rollout.name=vllm")])
        return cls(len(layers), *shapes.pop())

    def elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


class _ShapeProbe(PackedMetadata):
    """Records which layers attend, and the shape of their keys."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.layers: list[int] = []
        self.shapes: list[tuple[int, int]] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        number = getattr(module, "layer_idx", None)
        self.layers.append(number if isinstance(number, int) else -1)
        self.shapes.append((key.shape[1], key.shape[3]))
        return super().attend(module, query, key, value, options)


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers as a tensor; on the way to a GPU the host does not wait for what runs there."""
    exact = isinstance(numbers, array) and bool(numbers)  # several times as fast as a list
    tensor = torch.frombuffer(numbers, dtype=dtype) if exact else torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


SavedPages = list[Tensor]
"""Tokens on the host, some pages at a time: [layers, 2, pages, kv heads, page, head size] each."""


class PageCopy(NamedTuple):
    """The first tokens of a page on their way to another."""

    source: int
    target: int
    tokens: int


class PagedKVCache:
    """[layers, 2, max pages + 1, kv heads, page, head size].

    The null page is the one behind those that are there at first: inactive rows write to it. More pages are mapped as
    they are needed (`grow`), up to the budget: sessions between two turns keep theirs as long as there is memory, and
    a run with few of them leaves it to the training.
    """

    def __init__(
        self,
        shape: KVCacheShape,
        rows: int,
        length: int,
        page: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_pages: int | None = None,
    ) -> None:
        """`pages` at first, and up to `max_pages` by `grow`."""
        assert page % SPAN_STEP == 0, "spans end with a page"
        self.num_rows, self.length, self.page_size = rows, length, page
        self.pages_per_row = -(-length // page)
        self._page_bytes = shape.kv_heads * page * shape.head_dim * dtype.itemsize
        self._memory: CudaVirtualMemory | None = None
        self._max_pages = max(pages, max_pages or 0)
        planes, total = shape.layers * 2, self._max_pages + 1
        if device.type == "cuda":
            grain = mapping_granularity(device)
            self._page_step = grain // gcd(grain, self._page_bytes)
            first, total = (round_up(count, self._page_step) for count in (pages + 1, total))
            self._memory = CudaVirtualMemory(planes, total * self._page_bytes, first * self._page_bytes, device)
            memory = self._memory.bytes
        else:
            memory = _lazy_zeros(planes * total * self._page_bytes)
        self.kv = memory.view(dtype).view(shape.layers, 2, total, shape.kv_heads, page, shape.head_dim)
        self._backoff = self._skips = 0
        """Calls of `grow` that are skipped after a refusal, and those of them that are left."""
        self.null_page = pages
        self.num_pages = pages
        """Pages that sequences can have now. Those that `grow` adds are numbered on behind the null page."""
        self.aligned = device.type == "cpu" and self.pages_per_row == 1 and pages == rows
        """Whether row i is on page i, always."""
        self.table = torch.full((rows, self.pages_per_row), self.null_page, dtype=torch.int32, device=device)
        """The pages of each row. Beyond those that a row has are any numbers of pages."""
        self._assigned: dict[int, int] = {}
        """Entries of the page table, and the pages that the next `upload` writes there."""

    @classmethod
    def create(
        cls,
        rollout: RolloutConfig,
        module: "PreTrainedModel",
        device: torch.device,
        row_step: int,
        *,
        page: int | None = None,
        budget: int | None = None,
    ) -> "PagedKVCache":
        """Rows for `rollout.max_num_seqs`, rounded up to `row_step`, and the pages that they need or the budget allows.

        The rest of the budget is for `grow`. `page` and `budget` (in bytes) override what the device suggests.
        """
        shape, length = KVCacheShape.of(module), rollout.sequence_length()
        rows = round_up(rollout.max_num_seqs, row_step)
        token_bytes = shape.elements_per_token() * module.dtype.itemsize
        budget = kv_cache_bytes(rollout, device) if budget is None else budget
        whole = round_up(length, SPAN_STEP)
        if page is None:
            page = whole if device.type == "cpu" and (rows + 1) * whole * token_bytes <= budget else PAGE_SIZE
        pages_per_row = -(-length // page)
        most = budget // (page * token_bytes) - 1
        pages = min(rows * pages_per_row, most)
        if pages < pages_per_row:
            problem = (
                f"one sequence of {length} tokens needs {(pages_per_row + 1) * page * token_bytes:,} bytes of KV cache"
            )
            fix = "lower rollout.max_model_len, or raise rollout.gpu_memory_utilization"
            raise ConfigError(
                [Mistake("rollout.max_model_len", f"{problem}; the budget is {budget:,}", length, fix=fix)]
            )
        max_pages = pages if device.type == "cpu" and pages_per_row == 1 else most
        return cls(shape, rows, length, page, pages, module.dtype, device, max_pages=max_pages)

    def grow(self) -> range:
        """Map more pages, an eighth of the budget at a time, and return their numbers; none where no memory is left.

        Where a GPU had no room, the next calls return none without trying.
        """
        first = self.num_pages + 1
        wanted = min(self.num_pages + max(1, self._max_pages // _GROWTH_STEPS), self._max_pages)
        if self._memory is not None and wanted >= first and not self._map_up_to(wanted, self._memory):
            return range(0)
        self.num_pages = wanted
        return range(first, wanted + 1)

    def _map_up_to(self, pages: int, memory: CudaVirtualMemory) -> bool:
        missing = round_up(pages + 1, self._page_step) * self._page_bytes - memory.mapped
        if missing <= 0:
            return True
        if self._skips:
            self._skips -= 1
            return False
        found = memory.grow(missing)
        self._backoff = self._skips = 0 if found else min(2 * self._backoff or _FIRST_BACKOFF, _MAX_BACKOFF)
        return found

    def release(self) -> None:
        """Release a GPU's memory until `acquire`, which maps the first pages alone; the contents are lost."""
        self.num_pages, self._backoff, self._skips = self.null_page, 0, 0
        if self._memory is not None:
            self._memory.release()

    def acquire(self) -> None:
        """Map the memory again, if it was released."""
        if self._memory is not None:
            self._memory.acquire()

    def close(self) -> None:
        """Release the memory for good."""
        if self._memory is not None:
            self._memory.close()

    def count_pages(self, slots: int) -> int:
        """How many pages hold so many slots."""
        return -(-slots // self.page_size)

    def assign(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Let a row have these pages, from its page number `first` on. Kernels know after `upload`."""
        start = row * self.pages_per_row + first
        self._assigned.update(zip(range(start, start + len(pages)), pages, strict=True))

    def upload(self) -> None:
        """Bring what was assigned to the table, after all steps that run already and before the next."""
        if self._assigned:
            device = self.table.device
            slots = to_device(array("q", self._assigned), device)
            self.table.view(-1)[slots] = to_device(array("i", self._assigned.values()), device, torch.int32)
            self._assigned.clear()

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: [pages + 1, kv heads, page, head size] each."""
        return self.kv[number, 0], self.kv[number, 1]

    def find_slots(self, rows_T: Tensor, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """The page of each token, and its offset in the page, from its row and its slot in the sequence."""
        pages_T = self.table[rows_T, slots_T // self.page_size].long()
        return pages_T, slots_T % self.page_size

    def slot_mapping(self, pages_T: Tensor, offsets_T: Tensor) -> Tensor:
        """Slot mapping: where `write` puts the heads of each token, [kv heads * T] lines of a layer's keys/values."""
        heads = self.kv.shape[3]
        head_K = torch.arange(heads, device=pages_T.device).unsqueeze(1)
        return ((pages_T * heads + head_K) * self.page_size + offsets_T).flatten()

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values of one layer, [1, kv heads, T, head size] each."""
        size = key.shape[-1]
        for target, source in zip(self.layer(layer), (key, value), strict=True):
            target.view(-1, size).index_copy_(0, slot_mapping, source.reshape(-1, size))

    def read(self, layer: int, rows: slice, span: int) -> tuple[Tensor, Tensor]:
        """The first slots of some rows, keys and values: [rows, kv heads, span, head size] each.

        A view where rows and pages are aligned, else a copy, which takes several times as long as attention to it.
        """
        keys, values = self.layer(layer)
        if self.aligned:
            return keys[rows, :, :span], values[rows, :, :span]
        pages = self.table[rows, : self.count_pages(span)]
        return _join(keys[pages], span), _join(values[pages], span)

    def save(self, pages: Sequence[int], tokens: int) -> SavedPages:
        """A copy on the host of the tokens in some pages. A single page is copied as far as it has tokens.

        From a GPU it arrives later, in the order of its work: the host may hand it to `restore`, and not read it.
        """
        if self.kv.device.type != "cuda":
            slots = tokens if len(pages) == 1 else self.page_size
            return [self.kv[:, :, list(pages), :, :slots]]
        return [self._save(pages[at : at + _PAGES_PER_SAVE]) for at in range(0, len(pages), _PAGES_PER_SAVE)]

    def saved_bytes(self, pages: Sequence[int], tokens: int) -> int:
        """The bytes of what `save` returns."""
        cut = len(pages) == 1 and self.kv.device.type != "cuda"
        slots = tokens if cut else len(pages) * self.page_size
        return slots * prod(self.kv.shape[:2]) * self.kv.shape[3] * self.kv.shape[5] * self.kv.itemsize

    def _save(self, pages: Sequence[int]) -> Tensor:
        found = self.kv.index_select(2, to_device(pages, self.kv.device))
        return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)

    def restore(self, pages: Sequence[int], saved: SavedPages) -> None:
        """Copy what `save` returned, or its first pages, into other pages."""
        for part in saved:
            now, pages = pages[: part.shape[2]], pages[part.shape[2] :]
            if now:  # whole parts travel: the host must not touch what may not have arrived
                new = part.to(self.kv.device, non_blocking=True)[:, :, : len(now)]
                self.kv[:, :, to_device(now, self.kv.device), :, : new.shape[4]] = new

    def copy(self, moves: Sequence[PageCopy]) -> None:
        """Copy the first tokens of pages to others. No page is both source and target."""
        if self.kv.device.type == "cuda":
            from treadle.engine.native.cache_kernels import copy_pages  # triton comes with it

            copy_pages(self.kv, to_device([(move.source, move.target, move.tokens) for move in moves], self.kv.device))
            return
        for move in moves:
            self.kv[:, :, move.target, :, : move.tokens] = self.kv[:, :, move.source, :, : move.tokens]

    def clear(self, pages: Sequence[int]) -> None:
        """Replace values that are not finite by 0; finite ones in shared pages stay."""
        for page in pages:
            self.kv[:, :, page].nan_to_num_(0.0, 0.0, 0.0)


def _join(pages: Tensor, span: int) -> Tensor:
    """From [rows, pages, kv heads, page, head size] to the first slots of all pages of a row together."""
    return pages.transpose(1, 2).flatten(2, 3)[:, :, :span]


def _lazy_zeros(num_bytes: int) -> Tensor:
    """Zeros in main memory that take room once they are written: `torch.zeros` writes them all.

    A cache for many sequences of a model of some size is larger than the few that a laptop decodes.
    """
    return torch.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def kv_cache_bytes(rollout: RolloutConfig, device: torch.device) -> int:
    """Bytes for the pages: on a GPU the configured share of it, less what is taken already."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(rollout.gpu_memory_utilization * total) - (total - free))
    return int(_HOST_MEMORY_FRACTION * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
