"""vLLM on the policy's own GPU: weights that are written in place, damage on the way, and sleep."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.loop import Loop
from tests.policies import save_tiny_model
from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.vllm.engine import VLLMEngine
from treadle.errors import RunError
from treadle.types import Completion, Request, SamplingParams
from treadle.weights import PolicySender, WeightSync
from treadle.weights.shared_memory import SharedMemoryTransport
from treadle.weights.transfer import CastTensors

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]
DEVICE = torch.device("cuda")
PROMPT = tuple(range(10, 40))


class Weights:
    """A policy that is nothing but its weights."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype)
        self.module: nn.Module = loaded.to(DEVICE)

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.module.parameters():
                weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=generator).to(weight)

    def tensors(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.module.named_parameters()}

    def gap(self, answer: Completion) -> float:
        """How far an engine's logprobs are from this policy's, in the mean."""
        ids = torch.tensor([[*PROMPT, *answer.ids]], device=DEVICE)
        with torch.no_grad():
            logits = self.module(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
        own = logits.float().log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        return float((own.cpu() - torch.tensor(answer.logprobs)).abs().mean())


class Damaging(SharedMemoryTransport):
    """Changes one number after the checksum was taken."""

    def publish(self, version: int, tensors: CastTensors) -> Any:
        damaged = {name: tensor.clone() for name, tensor in tensors.items()}
        list(damaged.values())[-1].view(-1)[7] += 1
        return super().publish(version, CastTensors(damaged, None))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    directory = save_tiny_model(tmp_path_factory.mktemp("model"), **sizes, initializer_range=0.05)
    return ModelConfig(path=str(directory))


@pytest.fixture(scope="module")
def engine(loop: Loop, model: ModelConfig) -> Iterator[VLLMEngine]:
    rollout = RolloutConfig(
        name="vllm",
        gpu_memory_utilization=0.2,
        prompt_length=64,
        response_length=32,
        max_num_seqs=16,
        enforce_eager=True,
        free_cache_engine=True,
    )
    made: VLLMEngine = loop.run(VLLMEngine.create(rollout, model, device=DEVICE.type))
    yield made
    loop.run(made.close())


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["read in place", "cast on the way"])
def weights(model: ModelConfig, request: pytest.FixtureRequest) -> Weights:
    return Weights(model, request.param)


def sender(weights: Weights, kind: type[SharedMemoryTransport] = SharedMemoryTransport) -> PolicySender:
    transport = kind(device=DEVICE, timeout_s=20)
    return PolicySender(weights, dtype=torch.bfloat16, transport=transport)  # type: ignore[arg-type]


async def answer(engine: VLLMEngine) -> Completion:
    return await engine.generate(Request("t", 0, PROMPT, SamplingParams(32, seed=engine.version)))


def test_every_update_shows_in_what_is_sampled(loop: Loop, engine: VLLMEngine, weights: Weights) -> None:
    async def body() -> None:
        sending = sender(weights)
        for version in range(1, 5):  # vLLM's loader takes the first, the others are written in place
            await WeightSync(sending, timeout_s=60).push_to(engine, version)
            assert weights.gap(await answer(engine)) < 0.05
            weights.change(version)
            assert weights.gap(await answer(engine)) > 0.2

    loop.run(body())


def test_damage_is_named_and_the_next_update_mends_it(loop: Loop, engine: VLLMEngine, weights: Weights) -> None:
    async def body() -> None:
        await WeightSync(sender(weights), timeout_s=60).push_to(engine, 10)
        with pytest.raises(RunError, match="holds other weights than the policy: version 11"):
            await WeightSync(sender(weights, Damaging), timeout_s=60).push_to(engine, 11)
        weights.change(11)
        await WeightSync(sender(weights), timeout_s=60).push_to(engine, 12)
        assert weights.gap(await answer(engine)) < 0.05

    loop.run(body())


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_a_sleeping_engine(loop: Loop, engine: VLLMEngine, weights: Weights, level: int) -> None:
    async def body() -> None:
        awake = torch.cuda.mem_get_info()[0]
        await engine.sleep(level)
        assert torch.cuda.mem_get_info()[0] > awake + (8 << 30)  # a fifth of the GPU was the engine's
        weights.change(20 + level)
        await WeightSync(sender(weights), timeout_s=60).push_to(engine, 20 + level)
        assert weights.gap(await answer(engine)) < 0.05

    loop.run(body())
