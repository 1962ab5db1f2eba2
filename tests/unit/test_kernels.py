"""The Triton kernels against plain torch: on a GPU where there is one, else in Triton's interpreter where that is."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from tests.tiny import FAMILIES, VOCABULARY, tiny
from treadle.algorithm.fused_head import FusedHead
from treadle.algorithm.logprobs import _ChunkedHead
from treadle.config import RolloutConfig
from treadle.engine.native import paged_attention
from treadle.engine.native.attention_metadata import PrefillChunk, PrefillMetadata
from treadle.engine.native.cache_kernels import copy_pages
from treadle.engine.native.fused_model import FusedModel
from treadle.engine.native.fused_sampler import sample_rows
from treadle.engine.native.input_batch import NO_PENALTIES, InputBatch, RowStart
from treadle.engine.native.kv_cache import PageCopy, PagedKVCache
from treadle.engine.native.model_runner import ModelRunner
from treadle.engine.native.paged_attention import HeadShape, PagedRows, attend_paged, count_splits
from treadle.engine.native.sampler import sample
from treadle.model.attention import PackedMetadata
from treadle.model.causal_lm import compute_logits, hidden_states, prepare_module
from treadle.model.checksum import _MIX, _PLACE, _sum_here, checksum
from treadle.model.fused_layers import fuse_layers
from treadle.model.kernels import sum_words

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [  # the interpreter computes what masks leave out, and uses numpy in ways that are going away
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_one_kernel_sums_up_what_a_checksum_needs() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
        for count in (0, 1, 2047, 2048, 10_001, 128 * 2048 + 3)
    ]
    there = sum_words([words.to(DEVICE) for words in tensors], _PLACE, _MIX)
    assert there.tolist() == [_sum_here(words).item() for words in tensors]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("batch_bytes", [64, 1 << 20])
def test_a_gpu_has_the_same_checksum(batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.model.checksum._BATCH_BYTES", batch_bytes)
    wide = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {"whole": wide, "odd": wide[0, :3], "off": wide[1:, 1:7], "turned": wide.T, "one": wide[0, 0]}
    there = wide.to(DEVICE)
    views = {"whole": there, "odd": there[0, :3], "off": there[1:, 1:7], "turned": there.T, "one": there[0, 0]}
    empty = {"empty": torch.zeros(0)}
    assert checksum(views | empty) == checksum(tensors | empty)


def small(family: str) -> torch.nn.Module:
    """A model whose norms and biases are not all alike."""
    module = prepare_module(tiny(family, num_hidden_layers=2)).to(DEVICE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn(weight.shape, generator=generator).to(DEVICE)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_layer_has_the_same_outputs_and_gradients(family: str) -> None:
    module, metadata = small(family), PackedMetadata([9, 4], DEVICE)
    ids = torch.arange(13, device=DEVICE) * 5 % VOCABULARY
    coefficients = torch.randn(13, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def run() -> list[Tensor]:
        module.zero_grad()
        hidden = hidden_states(module, ids, metadata.positions(), metadata)
        (hidden * coefficients).sum().backward()
        return [hidden.detach(), *(weight.grad for weight in module.parameters() if weight.grad is not None)]

    plain = run()
    assert fuse_layers(module)
    for found, expected in zip(run(), plain, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def shuffle_pages(cache: PagedKVCache, seed: int) -> None:
    """Give every row pages from all over the cache."""
    order = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    for row in range(cache.num_rows):
        cache.assign(row, 0, order[row * cache.pages_per_row :][: cache.pages_per_row])
    cache.upload()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_model_fills_the_cache_and_decodes_as_the_modules_do(family: str) -> None:
    module = small(family)
    rollout = RolloutConfig(prompt_length=300, response_length=300, max_num_seqs=4)
    plain, fused = (ModelRunner(module, PagedKVCache.create(rollout, module, DEVICE, 4, page=32), 4) for _ in range(2))
    for seed, runner in enumerate((plain, fused)):
        shuffle_pages(runner.cache, seed)
    fused_model = FusedModel.create(module, fused.cache)
    assert fused_model is not None and count_splits(4, 2, 600) > 1
    prompts = [[(7 * row + 3 * at) % VOCABULARY for at in range(length)] for row, length in enumerate((20, 70, 1))]
    chunks = [PrefillChunk(row, 0, ids[:-1]) for row, ids in enumerate(prompts) if len(ids) > 1]
    more = [PrefillChunk(0, 19, [5, 6, 7])]
    starts = [
        RowStart(row, ids[-1], len(ids) - 1 + 3 * (row == 0), 4, 123 * row, 0, 1.0, 1.0, 0, ())
        for row, ids in enumerate(prompts)
    ]
    report = torch.zeros((4, 4), dtype=torch.int32, device=DEVICE)
    with torch.inference_mode():
        for part, total in ((chunks, 92), (more, 4)):
            plain.prefill(part)
            fused_model.prefill(PrefillMetadata(fused.cache, part, total))
        for runner in (plain, fused):
            runner.batch.start(starts)
        plain.advance(4, 80, False)
        sample_rows(compute_logits(module, fused_model.decode(fused.batch, 4)), fused.batch, report, filtered=False)
    for layer in range(2):
        for one, other in zip(*(runner.cache.read(layer, slice(0, 4), 96) for runner in (plain, fused)), strict=True):
            assert torch.allclose(one, other, atol=1e-4)
    assert torch.equal(plain.batch.last_id, fused.batch.last_id) and torch.equal(plain.batch.length, fused.batch.length)
    logprobs = report[1].view(torch.float32)[:3]
    assert torch.allclose(plain.batch.out_logprobs[:3, 0], logprobs, atol=1e-4)


def rows_of_all_kinds(count: int) -> InputBatch:
    rows = InputBatch(count, 10, DEVICE)
    starts = [
        RowStart(
            at,
            5,
            3,
            1 + at % 3,
            at * 0x9E3779B97F4A7C15 % (1 << 64),
            at % 7,
            (1.0, 0.7, 0.0, 1.3)[at % 4],
            (1.0, 0.8, 1.0, 0.3)[at // 4 % 4],
            (-1, 5, 0, 20)[at // 2 % 4],
            (at % 50, 7),
            (0.0, 0.0, 0.2)[at % 3],
            *((1.3, 0.6, 0.1, 1.4), (1, 2, 3), (4, 5, 5)) if at % 4 == 1 else (NO_PENALTIES, (), ()),
        )
        for at in range(count)
        if at % 5
    ]
    rows.start(starts)
    rows.start_penalties(starts, 5000)
    return rows


@pytest.mark.parametrize(("filtered", "penalized"), [(False, False), (True, False), (False, True), (True, True)])
def test_one_kernel_draws_and_takes_in_what_plain_sampling_does(filtered: bool, penalized: bool) -> None:
    plain, fused, count = rows_of_all_kinds(24), rows_of_all_kinds(24), 24
    report = torch.zeros((4, count), dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    for words in (5000,) if penalized else (50, 5000):
        logits = (2 * torch.randn(count, words, generator=generator)).to(DEVICE)
        lowered = plain.penalties.apply(logits) if penalized else None
        active = plain.active.clone()
        sampled = sample(logits, plain.sampling_metadata(count), filtered=filtered, penalized=lowered)
        ended = plain.advance(count, sampled)
        sample_rows(logits, fused, report, filtered=filtered, penalized=lowered)
        for name in ("active", "last_id", "length", "left", "count", "draw"):
            assert torch.equal(getattr(plain, name), getattr(fused, name)), name
        assert torch.equal(report[2].bool(), ended)
        assert torch.allclose(report[1].view(torch.float32)[active], sampled.logprobs[active], atol=1e-5)
        if sampled.processed is not None:
            assert torch.allclose(report[3].view(torch.float32)[active], sampled.processed[active], atol=1e-5)


def test_logits_that_are_no_numbers_end_a_row() -> None:
    rows, report = rows_of_all_kinds(8), torch.zeros((4, 8), dtype=torch.int32, device=DEVICE)
    logits = torch.zeros((8, 50), device=DEVICE)
    logits[3, 4], logits[6] = float("nan"), float("-inf")
    sample_rows(logits, rows, report, filtered=False)
    assert report[2, [3, 6]].tolist() == [1, 1] and report[1].view(torch.float32)[[3, 6]].isnan().all()


@pytest.mark.parametrize(
    ("chunk", "temperature", "softcap", "biased"), [(100, 1.0, None, False), (7, 0.7, None, True), (6, 1.3, 5.0, False)]
)
def test_the_fused_head_has_the_same_logprobs_entropy_and_gradients(
    chunk: int, temperature: float, softcap: float | None, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight, bias = (torch.randn(size, generator=generator) for size in ((20, 16), (300, 16), (300,)))
    targets = torch.randint(0, 300, (20,), generator=generator).to(DEVICE)
    factors = torch.randn(2, 20, generator=generator).to(DEVICE)

    def run(head: type[torch.autograd.Function]) -> list[Tensor]:
        leaves = [leaf.clone().to(DEVICE).requires_grad_() for leaf in (hidden, weight, bias)[: 2 + biased]]
        given = leaves if biased else [*leaves, None]
        logprobs, entropy = head.apply(*given, targets, chunk, temperature, softcap)
        (logprobs * factors[0] + entropy * factors[1]).sum().backward()
        return [logprobs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)]

    for found, expected in zip(run(FusedHead), run(_ChunkedHead), strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_pages_are_copied_as_far_as_asked() -> None:
    kv = torch.randn(2, 2, 5, 2, 40, 16, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    expected = kv.clone()
    moves = [PageCopy(0, 3, 17), PageCopy(0, 1, 40), PageCopy(2, 4, 1)]
    for move in moves:
        expected[:, :, move.target, :, : move.tokens] = expected[:, :, move.source, :, : move.tokens]
    copy_pages(kv, torch.tensor(moves, device=DEVICE))
    assert torch.equal(kv, expected)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="on a CPU other lines do this")
def test_what_is_saved_from_pages_comes_back_into_others() -> None:
    rollout = RolloutConfig(prompt_length=5000, response_length=20, max_num_seqs=4)
    cache = PagedKVCache.create(rollout, small("llama"), DEVICE, 4)
    cache.kv[:, :, : cache.num_pages].normal_()
    expected = cache.kv[:, :, :79].clone()
    saved = cache.save(list(range(79)), 79 * cache.page_size - 3)
    cache.kv[:, :, :79] = 0.0  # queued behind the copy
    cache.restore(list(range(100, 179)), saved)
    assert torch.equal(cache.kv[:, :, 100:179], expected)
    cache.restore([5, 3], saved)
    assert torch.equal(cache.kv[:, :, [5, 3]], expected[:, :, :2])


def attend_densely(
    qkv: Tensor, keys: Tensor, values: Tensor, lengths: list[int], shape: HeadShape, sinks: Tensor | None
) -> Tensor:
    """Decode attention of each row by itself, over [rows, K, places, D] that lack the new token: [B, H, D]."""
    heads, kv_heads, size, out = shape.heads, shape.kv_heads, shape.size, []
    for row, length in enumerate(lengths):
        query, key, value = qkv[row].view(-1, size).split([heads, kv_heads, kv_heads])
        first = max(0, length + 1 - shape.window) if shape.window else 0
        seen = [
            torch.cat([held[row, :, first:length], new[:, None]], dim=1).repeat_interleave(heads // kv_heads, dim=0)
            for held, new in ((keys, key), (values, value))
        ]
        scores = (query[:, None] * seen[0]).sum(-1) * shape.scaling
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], dim=1)
        out.append((scores.softmax(-1)[:, : seen[1].shape[1], None] * seen[1]).sum(1))
    return torch.stack(out)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("window", "softcap", "sinking"), [(None, None, False), (50, None, False), (7, 3.0, False), (50, None, True)]
)
@pytest.mark.parametrize("busy", [1, 512])
def test_decode_attention_finds_every_page(
    page: int, window: int | None, softcap: float | None, sinking: bool, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "_BUSY_PROGRAMS", busy)  # with 1 no program shares a row with others
    rows, kv_heads, size, lengths = 10, 2, 16, [0, 1, 15, 16, 63, 64, 65, 200, 555, 599]
    shape = HeadShape(4, kv_heads, size, 0.3, window, softcap, None, None)
    generator, pages_per_row = torch.Generator().manual_seed(6), -(-600 // page)
    keys, values = torch.randn(2, rows, kv_heads, pages_per_row * page, size, generator=generator)
    table = torch.randperm(rows * pages_per_row, generator=generator).view(rows, pages_per_row)
    held = torch.full((2, rows * pages_per_row + 1, kv_heads, page, size), float("nan"))
    for kind, dense in enumerate((keys, values)):
        for row, length in enumerate(lengths):
            dense[row, :, length:] = float("nan")  # nobody may read what is not there
        held[kind, table] = dense.unflatten(2, (pages_per_row, page)).transpose(1, 2)
    qkv = torch.randn(rows, (4 + 2 * kv_heads) * size, generator=generator)
    active = torch.tensor([row != 2 for row in range(rows)])
    lengths_B = torch.tensor(lengths)
    paged_rows = PagedRows(
        table.int().to(DEVICE), active.to(torch.uint8).to(DEVICE), lengths_B.to(DEVICE), rows * pages_per_row
    )
    rotated_by_0 = (torch.ones(601, size, device=DEVICE), torch.zeros(601, size, device=DEVICE))
    before, cache = held.clone(), held.to(DEVICE)
    sinks = torch.tensor([0.5, -1.0, 2.0, 4.0]) if sinking else None
    there = None if sinks is None else sinks.to(DEVICE)
    out = (
        attend_paged(qkv.to(DEVICE), (cache[0], cache[1]), paged_rows, rotated_by_0, shape, there)
        .cpu()
        .view(rows, 4, size)
    )
    expected = attend_densely(qkv, keys, values, lengths, shape, sinks)
    assert torch.allclose(out[active], expected[active], atol=1e-5)
    heads = qkv.view(rows, -1, size)
    for row in range(rows):
        at = (int(table[row, lengths[row] // page]), lengths[row] % page) if active[row] else (rows * pages_per_row, 0)
        for kind, first in ((0, 4), (1, 4 + kv_heads)):
            before[kind, at[0], :, at[1]] = heads[row, first : first + kv_heads]
    assert torch.equal(before.nan_to_num(9.0), cache.cpu().nan_to_num(9.0)), "one place of each row is written"
