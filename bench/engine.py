"""Tokens per second of an engine, the embedded one or vLLM, logprobs on, every request at once.

    python bench/engine.py --model DIR --device cuda --concurrent 256 512 1024 [--engine vllm] [--peer FILE]

Five kinds of work: `even` samples every request to its last token; `short` asks for few tokens, so that admission
counts; `mixed` has twice as many requests as rows, with lengths, temperatures, top-p, top-k and stop tokens of all
kinds, and eight samples of each prompt; `long` has lengths up to `--tokens` and a quarter of it in the mean: with
little `--memory` it shows how many run at once, and how often sequences have to wait in the middle; `turns` is sessions
of several turns, `--given` new tokens and `--sampled` ones each, in step or, with `--tool LOW HIGH`, with tools that
take so many seconds between two turns: seconds for all of them, and what the prefix cache had to evict. The limit
printed beside `even` counts the bytes that one decode step must read (weights once, keys and values once) at a copy
bandwidth measured in the same run. A peer file has a JSON line for each figure, {"peer": NAME, "work": "even",
"concurrent": N, "tokens_per_s": X}, or "seconds" for all sessions of `turns`, from the same machine: ratios to it are
printed.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from treadle.config import ModelConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.native.engine import NativeEngine
from treadle.engine.protocol import Engine, SupportsForget
from treadle.engine.vllm.engine import VLLMEngine
from treadle.model.load import load_causal_model, load_model_config
from treadle.types import Completion, Request, SamplingParams

PROMPT = "What is {} + 25? Explain step by step."
PROMPT_TOKENS = 40
"""About what the prompt takes with its template."""

Work = Callable[[Renderer, int, int, int], list[Request]]


def even(renderer: Renderer, count: int, tokens: int, run: int) -> list[Request]:
    """Different prompts of about the same length; no stop tokens, so that all of them run to the end."""
    prompts = [renderer.prompt([{"role": "user", "content": PROMPT.format(at)}]) for at in range(count)]
    return [Request(f"{run}/{at}", 0, ids, SamplingParams(tokens, seed=run)) for at, ids in enumerate(prompts)]


def short(renderer: Renderer, count: int, tokens: int, run: int) -> list[Request]:
    """Answers of a few tokens."""
    return even(renderer, count, 12, run)


def mixed(renderer: Renderer, count: int, tokens: int, run: int) -> list[Request]:
    """Twice as many requests as rows, of all kinds."""
    made = []
    for at in range(2 * count):
        ids = renderer.prompt([{"role": "user", "content": PROMPT.format(at // 8)}])
        sampling = SamplingParams(
            tokens // 4 + at * 37 % (tokens * 3 // 4 + 1),
            temperature=(1.0, 0.7, 1.3, 0.0)[at % 4],
            top_p=(1.0, 0.9)[at % 8 == 1],
            top_k=(-1, 50)[at % 8 == 5],
            stop_token_ids=renderer.stop_token_ids,
            seed=run,
        )
        made.append(Request(f"{run}/{at // 8}", at % 8, ids, sampling))
    return made


def long(renderer: Renderer, count: int, tokens: int, run: int) -> list[Request]:
    """Twice as many requests as rows, a few of them very long."""
    made = []
    for at in range(2 * count):
        ids = renderer.prompt([{"role": "user", "content": PROMPT.format(at // 8)}])
        part = (at * 0.6180339887) % 1.0
        made.append(Request(f"{run}/{at // 8}", at % 8, ids, SamplingParams(1 + int(tokens * part**3), seed=run)))
    return made


async def talk(engine: Engine, uid: str, given: Sequence[tuple[int, ...]], options: argparse.Namespace) -> int:
    """One session: what it is given before each turn. How often it was preempted."""
    random, sampling = Random(uid), SamplingParams(options.sampled)
    request, preemptions = Request(uid, 0, (), sampling), 0
    for turn, new in enumerate(given):
        request = replace(request, ids=request.ids + new)
        completion = await engine.generate(request)
        sampled = request.position + len(completion.ids)
        request = replace(request, ids=request.ids + completion.ids, position=sampled)
        preemptions += completion.preemptions
        if turn + 1 < len(given):
            await asyncio.sleep(random.uniform(*options.tool))
    if isinstance(engine, SupportsForget):
        engine.forget(request.session)
    return preemptions


async def bench_turns(model: ModelConfig, count: int, options: argparse.Namespace) -> tuple[float, str]:
    """Seconds of the best of some runs with this many sessions, after one that warms up; and what else there is to
    say."""
    vocab = load_model_config(model).vocab_size
    length = options.turns * (options.given + options.sampled)
    rollout = RolloutConfig(
        max_num_seqs=min(count, options.rows),
        prompt_length=options.given,
        response_length=length - options.given,
        max_num_batched_tokens=16384,
        gpu_memory_utilization=options.memory,
    )
    engine = await ENGINES[options.engine].create(rollout, model, device=options.device)
    best, preemptions = float("inf"), 0
    try:
        for run in range(options.repeats + 1):
            draws = torch.randint(vocab, (count, options.turns, options.given)).tolist()
            sessions = [[tuple(turn) for turn in turns] for turns in draws]
            began = time.perf_counter()
            talks = (talk(engine, f"{run}/{at}", given, options) for at, given in enumerate(sessions))
            preemptions += sum(await asyncio.gather(*talks))
            best = min(best, time.perf_counter() - began if run else float("inf"))
        counters = await engine.cache_counters() if isinstance(engine, NativeEngine) else None
    finally:
        await engine.close()
    return best, f"{1000 * best / count:6.2f} ms a session, {preemptions} preemptions, {counters}"


WORK: dict[str, Work] = {"even": even, "short": short, "mixed": mixed, "long": long}


ENGINES: dict[str, type[NativeEngine] | type[VLLMEngine]] = {"native": NativeEngine, "vllm": VLLMEngine}


async def complete(engine: Engine, request: Request) -> Completion:
    """A session of one turn."""
    completion = await engine.generate(request)
    if isinstance(engine, SupportsForget):
        engine.forget(request.session)
    return completion


async def generate(engine: Engine, made: list[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(complete(engine, request) for request in made)))


async def bench(model: ModelConfig, kind: str, count: int, options: argparse.Namespace) -> tuple[float, int]:
    """The best of some runs, after one that warms up, and how often a sequence was preempted in all of them."""
    renderer = Renderer.create(model)
    rollout = RolloutConfig(
        max_num_seqs=count,
        prompt_length=64,
        response_length=options.tokens,
        enforce_eager=options.eager,
        max_num_batched_tokens=16384,
        gpu_memory_utilization=options.memory,
    )
    engine = await ENGINES[options.engine].create(rollout, model, device=options.device)
    best, preemptions = 0.0, 0
    try:
        for run in range(options.repeats + 1):
            made = WORK[kind](renderer, count, options.tokens, run)
            began = time.perf_counter()
            done = await generate(engine, made)
            rate = sum(len(item.ids) for item in done) / (time.perf_counter() - began)
            best = max(best, rate if run else 0.0)
            preemptions += sum(item.preemptions for item in done)
    finally:
        await engine.close()
    return best, preemptions


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = 1 << 30 if device == "cuda" else 1 << 27
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    if device == "cuda":
        torch.cuda.synchronize()
    return 20 * size / (time.perf_counter() - began)


def limit(model: ModelConfig, device: str, count: int, tokens: int, bandwidth: float) -> float:
    """Tokens per second if a decode step only read weights and the cache at half its final length."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    module = load_causal_model(model, dtype=dtype, device=torch.device("cpu"))
    config = module.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * dtype.itemsize
    weights = sum(parameter.numel() for parameter in module.parameters()) * dtype.itemsize
    return count * bandwidth / (weights + count * per_token * (PROMPT_TOKENS + tokens / 2))


class PeerFigure(NamedTuple):
    """Another engine's figure: tokens per second, or seconds in `turns`."""

    peer: str
    work: str
    concurrent: int
    figure: float


def read_peers(file: Path | None) -> list[PeerFigure]:
    """The figures of a peer file. Lines that name no work have that of their unit."""
    if file is None:
        return []
    found = []
    for line in (json.loads(text) for text in file.read_text().splitlines() if text.startswith("{")):
        unit, work = ("seconds", "turns") if "seconds" in line else ("tokens_per_s", "even")
        if unit in line:
            found.append(PeerFigure(line["peer"], line.get("work", work), line["concurrent"], line[unit]))
    return found


def compare(peers: Sequence[PeerFigure], kind: str, count: int, ours: float) -> str:
    """How many times as fast as each peer this is, at the same work."""
    same = [peer for peer in peers if (peer.work, peer.concurrent) == (kind, count)]
    times = [peer.figure / ours if kind == "turns" else ours / peer.figure for peer in same]
    unit = " s" if kind == "turns" else ""
    return "".join(
        f", {ratio:.1f} × {peer.peer} ({peer.figure:,.0f}{unit})" for ratio, peer in zip(times, same, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="treadle/tiny-calculator")
    parser.add_argument("--engine", default="native", choices=ENGINES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--work", nargs="+", choices=[*WORK, "turns"], default=["even"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.5, help="rollout.gpu_memory_utilization")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--given", type=int, default=500, help="new tokens of a turn")
    parser.add_argument("--sampled", type=int, default=64, help="sampled tokens of a turn")
    parser.add_argument("--tool", type=float, nargs=2, default=(0.0, 0.0), metavar="S", help="seconds between turns")
    parser.add_argument("--rows", type=int, default=256, help="rollout.max_num_seqs of sessions with turns")
    parser.add_argument("--peer", type=Path, help="figures of other engines, from the same machine")
    options = parser.parse_args()
    model, peers = ModelConfig(path=options.model), read_peers(options.peer)
    bandwidth = copy_bandwidth(options.device)
    print(f"{options.model} on {options.device}, {options.tokens} tokens each; copies move {bandwidth / 1e9:,.0f} GB/s")
    for kind in options.work:
        for count in options.concurrent:
            if kind == "turns":
                ours, also = asyncio.run(bench_turns(model, count, options))
                line = f"turns  {count:6} sessions: {ours:8.2f} s, {also}"
            else:
                ours, preemptions = asyncio.run(bench(model, kind, count, options))
                line = f"{kind:6} {count:6} at once: {ours:12,.0f} tokens/s"
                line += f", {preemptions} preemptions" if preemptions else ""
            if kind == "even":
                line += f", {ours / limit(model, options.device, count, options.tokens, bandwidth):6.1%} of the limit"
            line += compare(peers, kind, count, ours)
            print(line, flush=True)


if __name__ == "__main__":
    main()
