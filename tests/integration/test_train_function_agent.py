"""`treadle.train(agent=function)`: an async function with the OpenAI SDK, two steps, and every id accounted for."""

from pathlib import Path
from typing import Any

import treadle
from treadle.config import ModelConfig
from treadle.data.renderer import Renderer
from treadle.journal import JournalReader

SMALL: dict[str, Any] = {
    "data": {"train_batch_size": 2, "val_files": []},
    "rollout": {"n": 4, "agent": {"num_workers": 1}},
    "actor": {"ppo_mini_batch_size": 2},
    "trainer": {"test_freq": -1, "val_before_train": False},
}


def test_an_async_function_trains_on_the_ids_that_it_was_answered_with(tmp_path: Path) -> None:
    greeting = "Once more."

    async def solve(base_url: str, api_key: str, task: Any) -> dict[str, Any]:
        """Asks twice, and tells what it was told; a closure, with imports of its own."""
        from openai import AsyncOpenAI

        history: list[Any] = [*task.messages]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=history, max_tokens=12)
                history += [answer.choices[0].message, {"role": "user", "content": greeting}]
        said = [message.content for message in history if not isinstance(message, dict)]
        return {"reward": float(len(said[-1])), "said": said}

    given: dict[str, Any] = {"agent": solve, "steps": 2, "run_dir": tmp_path, **SMALL}
    run = treadle.train("calculator", **given)
    assert run.steps == 2
    renderer = Renderer.create(ModelConfig(path="treadle/tiny-calculator"))
    with JournalReader.open(tmp_path) as reader:
        (event,) = reader.events(kind="gateway")
    assert event.fields["requests/chat"] == 32 and event.fields["echoes/exact"] == 16
    for trajectory in (*run.trajectories(step=1), *run.trajectories(step=2)):
        (row,) = trajectory.rows
        sampled = [row.ids[turn.start : turn.sampled_end] for turn in row.turns]
        stops = renderer.stop_token_ids
        told = [renderer.decode([one for one in ids if one not in stops]).strip() for ids in sampled]
        assert told == [text.strip() for text in trajectory.extra["notes"]["said"]]
        assert sum(row.mask) == sum(map(len, sampled)) > 0
        assert trajectory.reward is not None
        assert trajectory.reward.value - len(told[-1]) in (0.0, 1.0), "what it returned, and the config's own reward"
    apart = dict(run.metrics["rollout_corr/logprob_abs_diff_max"])
    assert sorted(apart) == [1, 2] and max(apart.values()) < 1e-3, "the trainer read the ids that the engine sampled"
    assert all(value > 0 for _, value in run.metrics["actor/grad_norm"])
