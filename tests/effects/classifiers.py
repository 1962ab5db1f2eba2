"""What keys of `reward.classifiers` change: in scores of a tiny classifier, in its batches, in requests to a server."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.effects.cases import Case, config_cases, configured
from tests.effects.engines import placed
from tests.effects.models import classifier
from tests.fake_endpoint import FakeEndpoint
from tests.reward_models import make_task, make_trajectory
from treadle.errors import TreadleError
from treadle.reward.classifier.model import ClassifierModel
from treadle.reward.context import RewardContext
from treadle.reward.scorer import Scorer

BASE = "model: {path: unused}\nreward: {num_workers: 0, retries: 0, classifiers: {it: {placement: thread}}}\n"
ANSWERS = ("42", "It is forty-two, I think.", "6 * 7 is 42", "no")


async def scores(config: Any, held: threading.Event, go_on: threading.Event, keys: dict[str, str]) -> Any:
    """Of four answers side by side; the first is computed when all others wait."""

    async def one(scorer: Scorer, answer: str) -> Any:
        try:
            score = await scorer.score(make_task(), make_trajectory(answer))
            return None if score is None else round(score.value, 4)
        except TreadleError as error:
            return str(error)

    try:
        scorer = await Scorer.create(config.reward, RewardContext(api_keys=keys))
    except TreadleError as error:
        return str(error)
    async with scorer:
        first = asyncio.ensure_future(one(scorer, ANSWERS[0]))
        computing = asyncio.ensure_future(asyncio.to_thread(held.wait, 60))
        await asyncio.wait({first, computing}, return_when=asyncio.FIRST_COMPLETED)
        held.set()
        others = [asyncio.ensure_future(one(scorer, answer)) for answer in ANSWERS[1:]]
        await asyncio.sleep(0.01)
        go_on.set()
        return await asyncio.gather(first, *others)


def classified(directory: Path, **keys: Any) -> Any:
    """Scores, and how many texts each forward had; or why there are none. A server records what it is sent."""
    path, url = "reward.classifiers.*.path", "reward.classifiers.*.endpoint.base_url"
    sizes, held, go_on, compute = list[int](), threading.Event(), threading.Event(), ClassifierModel.score

    def score(network: ClassifierModel, texts: Sequence[Any]) -> list[float]:
        held.set()
        go_on.wait(60)
        sizes.append(len(texts))
        return compute(network, texts)

    with FakeEndpoint() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClassifierModel, "score", score)
        keys[path] = str(classifier(keys.get(path, 0)))
        if url in keys:
            keys[url] = keys[url].format(endpoint.base_url)
        found = asyncio.run(scores(configured(BASE, keys), held, go_on, {"ONE": "key 1", "TWO": "key 2"}))
        asked = [header.get("authorization") for header in endpoint.headers]
        failed = any(isinstance(score, str) for score in found)  # then it is chance what was computed all the same
        return str(found).replace(endpoint.base_url, "URL"), [] if failed else sizes, endpoint.chats, asked


IT = "reward.classifiers.*"
SERVED = {f"{IT}.placement": "endpoint", f"{IT}.endpoint.base_url": "{}"}
SHORT = {f"{IT}.max_length": 30, f"{IT}.overlong": "truncate_left"}
ON_GPU = {
    f"{IT}.path": "unused",
    f"{IT}.device": "cuda",
    "rollout.n_gpus_per_node": 4,
    "rollout.gpu_memory_utilization": 0.5,
}

EFFECTS: dict[str, Case] = {
    **config_cases(
        IT,
        classified,
        *(("path", 0, 1), ("weight", 1.0, 2.0), ("prompt", None, "{{ response }}"), ("dtype", "float32", "bfloat16")),
        *(("max_length", 30, 4096, SHORT), ("overlong", "truncate_left", "truncate_right", SHORT)),
        *(("max_num_batched_tokens", 40, 16384, {f"{IT}.max_length": 40}), ("max_concurrency", 1, 4)),
        *(("timeout_s", 1e-6, 60.0), ("launch_timeout_s", 1e-6, 300.0)),
        ("placement", "thread", "endpoint", {f"{IT}.endpoint.base_url": "{}"}),
        *(("endpoint.base_url", "{}", "{}/nowhere", SERVED), ("endpoint.model", None, "second-model", SERVED)),
        *(("endpoint.api_key_env", "ONE", "TWO", SERVED), ("endpoint.extra_body", {}, {"user": "me"}, SERVED)),
    ),
    **config_cases(IT, placed, ("device", "cpu", "cuda", ON_GPU), ("gpu_memory_utilization", 0.3, 0.7, ON_GPU)),
}
