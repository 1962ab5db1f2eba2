"""The native engine's logprobs are those of a plain transformers forward, for every family, over several turns."""

import asyncio

import pytest
import torch

from tests.tiny import FAMILIES, VOCABULARY, tiny
from treadle.config import RolloutConfig
from treadle.engine.native.engine import NativeEngine
from treadle.types import Request, SamplingParams

TURNS = 3
ROLLOUT = RolloutConfig(prompt_length=40, response_length=80, max_num_seqs=8)

Row = tuple[list[int], dict[int, float]]


def prompt_of(task: int) -> list[int]:
    return [(7 * task + 3 * at) % VOCABULARY for at in range(4 + 3 * task)]


async def converse(engine: NativeEngine, task: int, sample: int, temperature: float) -> Row:
    """A session of several turns: all ids, and the logprob at each sampled place."""
    ids, logprobs, position = prompt_of(task), {}, 0
    for turn in range(TURNS):
        sampling = SamplingParams(9, temperature=temperature, stop_token_ids=(1,), seed=3)
        completion = await engine.generate(Request(f"task{task}", sample, tuple(ids), sampling, position))
        logprobs |= {len(ids) + at: logprob for at, logprob in enumerate(completion.logprobs)}
        ids += completion.ids
        position += len(completion.ids)
        ids += [(task + sample + at) % VOCABULARY for at in range(2 + turn)]
    return ids, logprobs


def recompute(family: str, rows: list[Row], temperature: float) -> list[list[float]]:
    """What a fresh copy of the model, with transformers' own attention, makes of the finished rows."""
    module = tiny(family)
    module.set_attn_implementation("eager")
    found = []
    for ids, logprobs in rows:
        with torch.no_grad():
            logits = module(torch.tensor([ids])).logits[0].double() / (temperature or 1.0)
        table = logits.log_softmax(-1)
        found.append([table[at - 1, ids[at]].item() for at in logprobs])
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_plain_forward_of_the_final_sequence(family: str, temperature: float) -> None:
    async def run() -> list[Row]:
        engine = await NativeEngine.create(ROLLOUT, tiny(family))
        sessions = [converse(engine, task, sample, temperature) for task in range(5) for sample in range(3)]
        rows = await asyncio.gather(*sessions)
        await engine.close()
        return rows

    rows = asyncio.run(run())
    assert sum(len(logprobs) for _, logprobs in rows) > 200
    for (_, logprobs), expected in zip(rows, recompute(family, rows, temperature), strict=True):
        assert list(logprobs.values()) == pytest.approx(expected, abs=1e-5)
