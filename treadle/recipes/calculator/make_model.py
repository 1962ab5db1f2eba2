"""Makes the bundled model: `python -m treadle.recipes.calculator.make_model DIRECTORY` (two minutes on a GPU).

A small Llama, trained from scratch on conversations of which some solve their sum and the rest go wrong in the ways
agents do: guessing without the tool, asking the tool for too much at once, stopping too early. So it can do everything
the task takes, and does it less than half of the time. That is what reinforcement learning is then for.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treadle.config import ModelConfig
from treadle.data.renderer import Renderer
from treadle.recipes.calculator.make_tokenizer import VOCABULARY, save, tool_call
from treadle.recipes.calculator.tasks import Sum, draw_sum
from treadle.recipes.calculator.tools import calculate
from treadle.terminal import warn

BEHAVIOURS = {"solve": 0.4, "guess": 0.2, "ask for too much": 0.2, "stop early": 0.2}
IGNORED = -100

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=True,
)

Turn = tuple[str, str | None]
"""What the agent says, and what the tool answers, if it was called."""


def converse(task: Sum, behaviour: str, rng: Random) -> list[Turn]:
    """A conversation in which the agent behaves like that."""
    if behaviour == "guess":
        return [(f"#### {_guess(task, rng)}", None)]
    if behaviour == "ask for too much" and len(task.steps) > 1:
        refusal = "write two whole numbers with +, - or * between them"
        return [(tool_call(task.text), refusal), (f"#### {_guess(task, rng)}", None)]
    turns: list[Turn] = []
    steps = task.steps[:1] if behaviour == "stop early" else task.steps
    result = 0
    for left, sign, right in steps:
        expression = f"{result if left is None else left}{sign}{right}"
        result = int(calculate(expression))
        turns.append((tool_call(expression), str(result)))
    wrong = behaviour != "solve" and len(task.steps) == 1
    return [*turns, (f"#### {result + rng.choice((-1, 1)) if wrong else result}", None)]


def _guess(task: Sum, rng: Random) -> int:
    return task.value + rng.choice((-1, 1)) * rng.randint(1, 50)


def demonstrations(count: int = 20_000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows for `treadle sft calculator_sft`: the conversations that the bundled model was made from, as messages."""
    rng = Random(f"calculator/model/{seed}")
    made = 0
    while made < count:
        task = draw_sum(rng)
        (behaviour,) = rng.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
        turns = converse(task, behaviour, rng)
        if not task.held_out:
            made += 1
            yield {"messages": _as_messages(task, turns)}


def held_out_demonstrations(count: int = 256) -> Iterator[dict[str, Any]]:
    """The same with another seed, to validate on."""
    return demonstrations(count, seed=1)


def _as_messages(task: Sum, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    for said, heard in turns:
        messages.append({"role": "assistant", "content": said})
        if heard is not None:
            messages.append({"role": "tool", "name": "calculate", "tool_call_id": "", "content": heard})
    return messages


class Conversations:
    """Conversations as ids and labels, exactly as sessions would lay them out."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._stop = renderer.stop_token_ids[0]

    def examples(self, seed: int) -> Iterator[tuple[list[int], list[int]]]:
        """Endless; the labels are the agent's own tokens."""
        rng = Random(f"calculator/model/{seed}")
        while True:
            task = draw_sum(rng)
            (behaviour,) = rng.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
            if not task.held_out:
                yield self._lay_out(task, converse(task, behaviour, rng))

    def _lay_out(self, task: Sum, turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
        ids = list(self._renderer.prompt([{"role": "user", "content": task.prompt}]))
        labels = [IGNORED] * len(ids)
        for said, heard in turns:
            spoken = [*self._renderer.encode(said), self._stop]
            ids += spoken
            labels += spoken
            if heard is not None:
                message = {"role": "tool", "name": "calculate", "tool_call_id": "", "content": heard}
                seen = self._renderer.observation([message])
                ids += seen
                labels += [IGNORED] * len(seen)
        return ids, labels


def batch_of(examples: Iterator[tuple[list[int], list[int]]], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded on the right; causal attention never sees the padding."""
    rows = list(islice(examples, size))
    width = max(len(ids) for ids, _ in rows)
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
    return padded, labels


def untrained_model(seed: int = 0) -> Any:
    """The model before its first step."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG)  # type: ignore[no-untyped-call]


def train_model(renderer: Renderer, steps: int, size: int, device: str, seed: int = 0) -> Any:
    """The same model every time, up to the rounding of the device."""
    module = untrained_model(seed)
    module.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    examples = Conversations(renderer).examples(seed)
    for step in range(steps):
        ids, labels = batch_of(examples, size)
        loss = module(input_ids=ids.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            warn(f"step {step}: loss {loss.item():.4f}")
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--untrained", action="store_true", help="leave the training to treadle sft calculator_sft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    save(options.directory)
    if options.untrained:
        untrained_model().save_pretrained(options.directory)
        return
    renderer = Renderer.create(ModelConfig(path=str(options.directory)))
    module = train_model(renderer, options.steps, options.batch, options.device)
    module.to("cpu", torch.bfloat16).save_pretrained(options.directory)


if __name__ == "__main__":
    main()
