"""Tokens per second of the embedded engine, logprobs on, every request at once and sampled to its last token.

    python bench/engine.py --model DIR --device cuda --concurrent 256 512 1024

The limit printed beside it counts the bytes one decode step must read (weights once, keys and values once) at a copy
bandwidth measured in the same run.
"""

import argparse
import asyncio
import time

import torch

from treadle.config import ModelConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.native.engine import NativeEngine
from treadle.model.causal import load_causal_model
from treadle.types import Completion, Request, SamplingParams


def requests(renderer: Renderer, count: int, tokens: int, run: int) -> list[Request]:
    """Different prompts of about the same length; no stop tokens, so that all of them run to the end."""
    made = []
    for at in range(count):
        text = f"What is {at} + 25? Explain step by step."
        ids = renderer.prompt([{"role": "user", "content": text}])
        made.append(Request(f"{run}/{at}", 0, ids, SamplingParams(tokens, seed=run)))
    return made


async def generate(engine: NativeEngine, made: list[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in made)))


async def bench(model: ModelConfig, device: str, count: int, tokens: int, repeats: int, eager: bool) -> float:
    """The best of some runs, after one that warms up."""
    renderer = Renderer.create(model)
    rollout = RolloutConfig(
        max_num_seqs=count, prompt_length=64, response_length=tokens, enforce_eager=eager, max_num_batched_tokens=16384
    )
    engine = await NativeEngine.create(rollout, model, device=device)
    best = 0.0
    try:
        for run in range(repeats + 1):
            made = requests(renderer, count, tokens, run)
            began = time.perf_counter()
            done = await generate(engine, made)
            rate = sum(len(item.ids) for item in done) / (time.perf_counter() - began)
            best = max(best, rate if run else 0.0)
    finally:
        await engine.close()
    return best


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = 1 << 30 if device == "cuda" else 1 << 27
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
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
    return count * bandwidth / (weights + count * per_token * (40 + tokens / 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="treadle/tiny-calculator")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    options = parser.parse_args()
    model = ModelConfig(path=options.model)
    bandwidth = copy_bandwidth(options.device)
    print(f"{options.model} on {options.device}, {options.tokens} tokens each; copies move {bandwidth / 1e9:,.0f} GB/s")
    for count in options.concurrent:
        rate = asyncio.run(bench(model, options.device, count, options.tokens, options.repeats, options.eager))
        bound = limit(model, options.device, count, options.tokens, bandwidth)
        print(f"{count:6} at once: {rate:12,.0f} tokens/s, {rate / bound:6.1%} of the limit", flush=True)


if __name__ == "__main__":
    main()
