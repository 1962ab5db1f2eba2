"""Fused sampler: from logits to tokens and the next state of the rows, in one Triton kernel. CUDA only.

Owns the same rules as `sampler` and `InputBatch.advance`, with one program for each row: one pass over the logits for
their sum, one that walks up to the row's number. Min-p, top-k and top-p are a threshold on the logits, found by
halving: tokens that lie within rounding of it stay, where sorting would keep some of them. Where rows have penalties
the kernel is given penalised logits to draw from, and takes one more pass over the model's own, whose logprob is
reported too.

Shapes: B rows, V vocabulary, W stop tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.engine.native.input_batch import MAX_STOPS, InputBatch

_HALVINGS = 26
"""Enough to separate any two float32 logits, over the range below."""

_RANGE = 40.0
"""How far below the top a token may be and still matter: its weight is e**-40."""


@triton.jit
def _unit(stream, position):  # type: ignore[no-untyped-def]
    """`sampler.units_at` of one row."""
    bits = (stream + (position + 1) * -0x61C8864680B583EB).to(tl.uint64, bitcast=True)
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    return (bits >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit  # type: ignore[untyped-decorator]
def _above(logits, vocab_size, temp, peak, floor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many scaled logits reach `floor`, and their weight."""
    v = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    weight = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logits + start + v, mask=start + v < vocab_size, other=float("-inf")).to(tl.float32) / temp
        count += (x >= floor).to(tl.int32)
        weight += tl.where(x >= floor, tl.exp(x - peak), 0.0)
    return tl.sum(count, axis=0), tl.sum(weight, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _find_floor(  # type: ignore[no-untyped-def]
    logits,
    vocab_size,
    temp,
    peak,
    total,
    top_k,
    top_p,
    min_p,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
    RANGE: tl.constexpr,
):
    """The lowest scaled logit that min-p, top-k and top-p leave, and the weight from there on."""
    floor = float("-inf")
    weight = total
    if min_p > 0.0:
        floor = peak + tl.log(min_p)
        count, weight = _above(logits, vocab_size, temp, peak, floor, BLOCK)
    if top_k > 0:
        low, high = tl.maximum(floor, peak - RANGE), peak + 1.0e-3
        count, mass = _above(logits, vocab_size, temp, peak, low, BLOCK)
        if count >= top_k:
            for _ in range(HALVINGS):
                middle = 0.5 * (low + high)
                count, mass = _above(logits, vocab_size, temp, peak, middle, BLOCK)
                low, high = tl.where(count >= top_k, middle, low), tl.where(count >= top_k, high, middle)
            floor = low
            count, weight = _above(logits, vocab_size, temp, peak, low, BLOCK)
    if top_p < 1.0:
        wanted = top_p * weight
        low, high = tl.maximum(floor, peak - RANGE), peak + 1.0e-3
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            count, mass = _above(logits, vocab_size, temp, peak, middle, BLOCK)
            low, high = tl.where(mass >= wanted, middle, low), tl.where(mass >= wanted, high, middle)
        floor = low
        count, weight = _above(logits, vocab_size, temp, peak, low, BLOCK)
    return floor, weight


@triton.jit  # type: ignore[untyped-decorator]
def _full_logprob(own, vocab_size, temp, token, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token's logprob by the model's own logits."""
    v = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(own + start + v, mask=start + v < vocab_size, other=float("-inf")).to(tl.float32) / temp
        higher = tl.maximum(tops, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(tops - shift) + tl.exp(x - shift)
        tops = higher
    peak = tl.max(tops, axis=0)
    total = tl.sum(sums * tl.exp(tops - peak), axis=0)
    return tl.load(own + token).to(tl.float32) / temp - peak - tl.log(total)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits,
    own,
    temperatures,
    top_ps,
    top_ks,
    min_ps,
    streams,
    draws,
    actives,
    last_ids,
    lengths,
    counts,
    lefts,
    stops,
    report,
    vocab_size,
    stride_logits,
    stride_own,
    stride_report,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    PENALIZED: tl.constexpr,
    HALVINGS: tl.constexpr,
    RANGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK)
    live = tl.load(actives + row) != 0
    logits += row * stride_logits
    row_vocab = tl.where(live, vocab_size, 0)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    temp = tl.where(greedy, 1.0, temperature)

    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    bests = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, row_vocab, BLOCK):
        x = tl.load(logits + start + v, mask=start + v < vocab_size, other=float("-inf")).to(tl.float32) / temp
        higher = tl.maximum(tops, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(tops - shift) + tl.exp(x - shift)
        bests = tl.where(x > tops, start + v, bests)
        tops = higher
    peak = tl.max(tops, axis=0)
    total = tl.sum(sums * tl.exp(tops - peak), axis=0)
    best = tl.min(tl.where(tops == peak, bests, vocab_size), axis=0)

    draw = tl.load(draws + row)
    floor = float("-inf")
    weight = total
    if FILTERED:  # noqa: SIM102 - decided when the kernel is compiled
        if live & (temperature > 0.0):
            top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
            floor, weight = _find_floor(
                logits, vocab_size, temp, peak, total, top_k, top_p, min_p, BLOCK, HALVINGS, RANGE
            )
    # A millionth less than everything: the two passes add up in another order, and the end must be reached.
    reach = (1.0 - _unit(tl.load(streams + row), draw)) * weight * (1.0 - 9.5367431640625e-07)
    start = tl.where(live & (temperature > 0.0), 0, vocab_size)
    passed = 0.0
    token = best
    while start < vocab_size:
        x = tl.load(logits + start + v, mask=start + v < vocab_size, other=float("-inf")).to(tl.float32) / temp
        weights = tl.where(x >= floor, tl.exp(x - peak), 0.0)
        here = tl.sum(weights, axis=0)
        if passed + here >= reach:
            reached = (passed + tl.cumsum(weights, axis=0) >= reach) & (weights > 0.0)
            found = tl.min(tl.where(reached, start + v, vocab_size), axis=0)
            token = tl.where(found < vocab_size, found, token)
            start = vocab_size
        else:
            passed += here
            start += BLOCK
    token = tl.where(live, tl.minimum(token, vocab_size - 1), 0)
    scaled = tl.load(logits + token).to(tl.float32) / temp - peak
    logprob = scaled - tl.log(total)
    if FILTERED or PENALIZED:
        processed = scaled - tl.log(weight)
        tl.store(report + 3 * stride_report + row, processed.to(tl.int32, bitcast=True))
    if PENALIZED:
        logprob = _full_logprob(own + row * stride_own, row_vocab, temp, token, BLOCK)

    tl.store(report + row, token)
    tl.store(report + stride_report + row, logprob.to(tl.int32, bitcast=True))
    tl.store(counts + row, tl.load(counts + row) + 1, mask=live)
    tl.store(lengths + row, tl.load(lengths + row) + 1, mask=live)
    tl.store(draws + row, draw + 1, mask=live)
    tl.store(last_ids + row, token.to(tl.int64), mask=live)
    left = tl.load(lefts + row) - 1
    tl.store(lefts + row, left, mask=live)
    stopped = tl.sum((tl.load(stops + row * STOPS + tl.arange(0, STOPS)) == token).to(tl.int32), axis=0) > 0
    over = live & (stopped | (left <= 0) | (logprob != logprob))
    tl.store(report + 2 * stride_report + row, over.to(tl.int32))
    tl.store(actives + row, (live & (over == 0)).to(tl.uint8))


def sample_rows(
    logits: Tensor, rows: InputBatch, report: Tensor, *, filtered: bool, penalized: Tensor | None = None
) -> None:
    """Sample a token for each active row among the first ones, and advance the rows.

    Logits are [B, V]; `report` is [4, rows] in int32 and gets tokens, logprobs (their bits), which rows ended, and with
    a filter or penalty the logprobs of the distribution drawn from. The rows' own record of what they sampled is left
    as it is. `filtered` says that some row asks for min-p, top-k or top-p; `penalized` are the logits to draw from,
    where some row has penalties.
    """
    count, vocab_size = logits.shape
    drawn = logits if penalized is None else penalized
    _draw[(count,)](
        drawn,
        logits,
        rows.temperature,
        rows.top_p,
        rows.top_k,
        rows.min_p,
        rows.stream,
        rows.draw,
        rows.active.view(torch.uint8),
        rows.last_id,
        rows.length,
        rows.count,
        rows.left,
        rows.stops,
        report,
        vocab_size,
        drawn.stride(0),
        logits.stride(0),
        report.stride(0),
        STOPS=MAX_STOPS,
        BLOCK=min(4096, triton.next_power_of_2(vocab_size)),
        FILTERED=filtered,
        PENALIZED=penalized is not None,
        HALVINGS=_HALVINGS,
        RANGE=_RANGE,
        num_warps=8,
    )
