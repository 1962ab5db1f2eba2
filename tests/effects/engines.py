"""What keys change in engines: tokens and forwards of the native one, arguments of vLLM, requests to an endpoint."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import current_thread
from typing import Any

from tests.effects.cases import NAME, Case, config_cases, configured
from tests.effects.models import tiny_model
from tests.fake_endpoint import FakeEndpoint
from tests.letters import ask
from tests.rollouts import renderer
from tests.unit.test_native_determinism import Talk
from tests.unit.test_native_scheduler import Watched
from treadle.config import Config, Machine, RolloutConfig, make_plan
from treadle.config.rollout import FailureConfig
from treadle.engine.native.engine import NativeEngine
from treadle.engine.protocol import WeightUpdate
from treadle.engine.vllm.arguments import engine_arguments
from treadle.errors import TreadleError
from treadle.rollout.engines import start_engines
from treadle.types import Request, SamplingParams

BASE = """
model: {path: unused, parity_check: false}
rollout: {prompt_length: 32, response_length: 32, max_num_seqs: 8}
"""


def section(config: Config) -> RolloutConfig:
    """That of the rollout's engine; or of a judge's, where there is one."""
    judge = config.reward.judges.get(NAME)
    return config.rollout if judge is None else judge.rollout(FailureConfig())


def generated(directory: Path, **keys: Any) -> Any:
    """What the native engine answers to a long prompt, on the CPU; or why it refuses."""
    config = configured(BASE, {**keys, "model.path": str(tiny_model())})

    async def main() -> Any:
        engine = await NativeEngine.create(section(config), config.model)
        try:
            found = await engine.generate(Request("a", 0, tuple(range(3, 53)), SamplingParams(30)))
            return found.ids, found.logprobs
        except TreadleError as error:
            return str(error)
        finally:
            await engine.close()

    return asyncio.run(main())


def computed(directory: Path, **keys: Any) -> Any:
    """Pieces of prompts that the native engine reads at once, and rows of each of its steps."""
    stand = Watched(rollout=section(configured(BASE, keys)))
    stand.run([Talk(3, sample, (0, 1)) for sample in range(2)])
    stand.run([Talk(task, 0, (0,)) for task in (4, 5, 8, 12)])
    return [(piece.start, len(piece.ids)) for piece in stand.prefilled], stand.rows


class _Arriving(Mapping[str, Any]):
    """Weights on their way: it notes which thread waits for them."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors, self.readers = tensors, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.readers.add(current_thread().name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def updated(directory: Path, **keys: Any) -> Any:
    """Whether the thread that samples also waits for new weights, while there is something to sample."""
    config = configured(BASE, {**keys, "model.path": str(tiny_model())})

    async def main() -> bool:
        engine = await NativeEngine.create(section(config), config.model)
        try:
            arriving = _Arriving(dict(engine._module.named_parameters()))
            sampling = asyncio.ensure_future(engine.generate(Request("a", 0, (3, 4, 5), SamplingParams(30))))
            await asyncio.sleep(0)
            await engine.update_weights(WeightUpdate(1, "", arriving))
            await sampling
            return engine.name in arriving.readers
        finally:
            await engine.close()

    return asyncio.run(main())


def vllm_arguments(directory: Path, **keys: Any) -> Any:
    """What vLLM is started with on a GPU."""
    config = configured(BASE, keys)
    return engine_arguments(section(config), config.model, "model", on_cpu=False, known=("block_size",))


def started(directory: Path, **keys: Any) -> Any:
    """The engine of a section, as a rollout starts it, and what it sends to an endpoint; or why it does not start."""
    with FakeEndpoint() as endpoint:
        url, key = endpoint.base_url, "rollout.openai.base_url"
        config = configured(BASE, {**keys, key: keys[key].format(url)})
        environment = {"ONE": "key 1", "TWO": "key 2"}

        async def main() -> Any:
            api_key = environment.get(config.rollout.openai.api_key_env)
            try:
                (engine,) = (await start_engines(config.rollout, config.model, renderer(), api_key)).engines
            except TreadleError as error:
                return str(error).replace(url, "URL")
            try:
                return engine.name, (await engine.generate(ask())).text
            except TreadleError as error:
                return str(error).replace(url, "URL")
            finally:
                await engine.close()

        found = asyncio.run(main())
        return found, endpoint.chats, [header.get("authorization") for header in endpoint.headers]


def placed(directory: Path, **keys: Any) -> Any:
    """The plan for a machine of four GPUs; or why there is none."""
    try:
        return make_plan(configured(BASE, keys), [Machine("m0", 4)])
    except TreadleError as error:
        return str(error)


ENDPOINT = {"rollout.name": "openai", "rollout.openai.base_url": "{}"}
ENGINE = "reward.judges.*.engine"
JUDGE = {
    "reward.judges.*.prompt": "Rate {{ response }}",
    "reward.judges.*.path": "unused",
    "reward.judges.*.response_length": 16,
    f"{ENGINE}.max_model_len": 64,
    f"{ENGINE}.max_num_seqs": 4,
}
VLLM = {**JUDGE, f"{ENGINE}.name": "vllm"}
ON_GPUS = {**VLLM, f"{ENGINE}.n_gpus": 4, "rollout.n_gpus_per_node": 4, "rollout.gpu_memory_utilization": 0.5}
EXTRA = ({}, {"vllm": {"block_size": 16}})

EFFECTS: dict[str, Case] = {
    **config_cases("rollout", updated, ("overlap_weight_updates", True, False)),
    **config_cases("rollout", generated, ("dtype", "float32", "bfloat16"), ("max_model_len", 64, 128)),
    **config_cases(
        "rollout",
        computed,
        *(("max_num_seqs", 2, 4), ("max_num_batched_tokens", 5, 8192), ("enable_prefix_caching", True, False)),
    ),
    **config_cases(
        "rollout",
        vllm_arguments,
        *(("gpu_memory_utilization", 0.5, 0.7), ("enforce_eager", False, True), ("engine_kwargs", *EXTRA)),
        ("enable_chunked_prefill", True, False),
    ),
    **config_cases(
        "rollout",
        started,
        *(("name", "openai", "scripted", ENDPOINT), ("openai.base_url", "{}", "{}/nowhere", ENDPOINT)),
        *(("openai.model", None, "second-model", ENDPOINT), ("openai.api_key_env", "ONE", "TWO", ENDPOINT)),
        ("openai.extra_body", {}, {"user": "me"}, ENDPOINT),
    ),
    **config_cases(ENGINE, generated, ("dtype", "float32", "bfloat16", JUDGE)),
    **config_cases(ENGINE, computed, ("max_num_seqs", 2, 4, JUDGE)),
    **config_cases(
        ENGINE,
        vllm_arguments,
        *(("enforce_eager", False, True, VLLM), ("engine_kwargs", *EXTRA, VLLM)),
        ("tensor_model_parallel_size", 1, 2, {**VLLM, f"{ENGINE}.n_gpus": 2}),
    ),
    **config_cases(
        ENGINE,
        placed,
        *(("n_gpus", 1, 2, VLLM), ("gpu_memory_utilization", 0.3, 0.7, ON_GPUS)),
    ),
}
