"""Real vLLM, on the CPU: what every engine promises, and what is vLLM's own.

One server serves the whole module: each test attaches a client of its own. Needs vLLM, which CI has in a venv apart.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop import Loop

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed in this environment", allow_module_level=True)

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.contract import test_engine as contract
from tests.contract.test_engine import Stage
from tests.halting import Tearing
from tests.letters import STOP, ask, decode
from treadle.config import ModelConfig, RolloutConfig
from treadle.config.rollout import LimitsConfig
from treadle.engine.native.engine import NativeEngine
from treadle.engine.protocol import ConfirmedWeights, Engine, EngineGone, WeightUpdate
from treadle.engine.vllm.engine import VLLMEngine
from treadle.engine.vllm.process import ServerProcess
from treadle.errors import ConfigError, DeadlineError, EngineFailure, RequestRefused, RunError
from treadle.model.checksum import checksum
from treadle.model.load import load_causal_model
from treadle.types import Request, SamplingParams, StopReason
from treadle.weights import PolicySender, WeightSync
from treadle.weights.shared_memory import SharedMemoryTransport

globals().update({name: value for name, value in vars(contract).items() if name.startswith("test_")})

LIMITS = LimitsConfig(launch_timeout_s=240, request_timeout_s=60, close_timeout_s=40)
ROLLOUT = RolloutConfig(
    name="vllm",
    prompt_length=32,
    response_length=512,
    max_num_seqs=48,
    limits=LIMITS,
    engine_kwargs={"vllm": {"worker_cls": "tests.slow_vllm.SlowWorker"}},
)


def letters_model() -> GPT2LMHeadModel:
    """A model that writes letters by chance, and stops when the text has a certain length."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 600, "n_embd": 32, "n_layer": 1, "n_head": 1}
    module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=STOP, eos_token_id=STOP)).eval()
    enough = len("hello") - 1 + 14
    with torch.no_grad():
        words, places = module.transformer.wte.weight, module.transformer.wpe.weight
        words[STOP] = torch.linspace(-1, 1, 32)
        places[:enough] -= words[STOP]
        places[enough:] += 10 * words[STOP]
    return module


class Weights:
    """A policy that is nothing but its weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters")
    letters_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(loop: Loop, directory: Path) -> Iterator[ServerProcess]:
    model = ModelConfig(path=str(directory))
    made = loop.run(ServerProcess.start(ROLLOUT, model, name="vllm-0"))
    yield made
    loop.run(made.end(LIMITS.close_timeout_s))


class Confirming(VLLMEngine):
    """Where the contract sends no tensors and a made-up word, real ones travel and their own word is proven."""

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        if update.checksum != "checksum":
            return await super().update_weights(update)
        sender = PolicySender(Weights(letters_model()), transport=SharedMemoryTransport(timeout_s=20))  # type: ignore[arg-type]
        await WeightSync(sender, timeout_s=60).push_to(self, update.version)
        return ConfirmedWeights(update.checksum)


@pytest.fixture
def stage(loop: Loop, server: ServerProcess) -> Stage:
    @asynccontextmanager
    async def attached() -> AsyncIterator[Engine]:
        yield await Confirming.attach(ROLLOUT, server, decode=decode)

    return Stage(attached, loop.run, settle_s=0.12, has_model=True)


def play(stage: Stage, body: Callable[[VLLMEngine], Awaitable[None]]) -> None:
    stage.play(body)  # type: ignore[arg-type]


def test_tokens_and_logprobs_are_those_of_the_embedded_engine(stage: Stage) -> None:
    ways = [
        SamplingParams(12, stop_token_ids=(STOP,), seed=3, **keys)
        for keys in ({}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.7, "temperature": 1.3}, {"top_k": 4})
    ]

    async def body(engine: VLLMEngine) -> None:
        native = await NativeEngine.create(ROLLOUT, letters_model())
        for at, sampling in enumerate(ways):
            request = Request(f"t{at}", 0, (104, 101, 108, 108, 111), sampling)
            ours, theirs = await native.generate(request), await engine.generate(request)
            assert ours.ids == theirs.ids, sampling
            assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=2e-5), sampling
        await native.close()

    play(stage, body)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.7, "top_k": 20},
        {"min_p": 0.5},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.5, "model_temperature": 1.0},
    ],
)
def test_filters_and_penalties_give_what_the_embedded_engine_gives(stage: Stage, fields: dict[str, Any]) -> None:
    async def body(engine: Engine) -> None:
        native = await NativeEngine.create(ROLLOUT, letters_model(), decode=decode)
        try:
            for uid in "abcd":
                request = ask(uid=uid, max_tokens=16)
                request = replace(request, sampling=replace(request.sampling, **fields))
                expected, found = await native.generate(request), await engine.generate(request)
                assert found.ids == expected.ids
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
                assert found.processed_logprobs == pytest.approx(expected.processed_logprobs, abs=1e-4)
                assert found.processed_logprobs != found.logprobs
        finally:
            await native.close()

    stage.play(body)


def test_a_stop_string_ends_an_answer_where_the_embedded_engine_ends_it(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        native = await NativeEngine.create(ROLLOUT, letters_model(), decode=decode)
        try:
            request = ask(uid="a", max_tokens=16)
            whole = await native.generate(request)
            stop = decode(whole.ids)[4:6]
            request = replace(request, sampling=replace(request.sampling, stop=(stop, "never said")))
            expected, found = await native.generate(request), await engine.generate(request)
            assert found.ids == expected.ids and found.text == expected.text and found.stop is StopReason.STOP
            assert len(found.ids) < len(whole.ids) and decode(found.ids).endswith(stop) and stop not in found.text
        finally:
            await native.close()

    stage.play(body)


def test_new_weights_show_in_what_is_sampled(stage: Stage) -> None:
    module = letters_model()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    request = ask(max_tokens=12)

    async def body(engine: VLLMEngine) -> None:
        native = await NativeEngine.create(ROLLOUT, module)
        sender = PolicySender(Weights(module), transport=SharedMemoryTransport(timeout_s=20, bucket_bytes=4096))  # type: ignore[arg-type]
        report = await WeightSync(sender, timeout_s=60).push_to(engine, 4)
        assert report.num_bytes > 4096
        ours, theirs = await native.generate(request), await engine.generate(request)
        await native.close()
        assert ours.ids == theirs.ids and set(theirs.versions) == {4}
        assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=2e-5)
        await engine.update_weights(WeightUpdate(0, "checksum", {}))

    play(stage, body)


def test_damage_on_the_way_is_named_with_both_checksums(stage: Stage) -> None:
    class Lying(PolicySender):
        async def publish(self, version: int) -> WeightUpdate:
            update = await super().publish(version)
            return WeightUpdate(version, "0123456789abcdef", update.tensors)

    async def body(engine: VLLMEngine) -> None:
        sender = Lying(Weights(letters_model()), transport=SharedMemoryTransport(timeout_s=20))  # type: ignore[arg-type]
        with pytest.raises(
            RunError, match=r"version 4 has checksum 0123456789abcdef, the engine confirms [0-9a-f]{16}"
        ):
            await WeightSync(sender, timeout_s=60).push_to(engine, 4)
        await engine.update_weights(WeightUpdate(0, "checksum", {}))

    play(stage, body)


def test_a_parcel_that_cannot_be_opened_fails_the_update_and_the_next_one_mends_it(stage: Stage) -> None:
    async def body(engine: VLLMEngine) -> None:
        sender = PolicySender(Weights(letters_model()), transport=SharedMemoryTransport(timeout_s=20))  # type: ignore[arg-type]
        gone = await sender.publish(1)
        await sender.retire(1)
        with pytest.raises(EngineFailure, match="vLLM"):
            await engine.update_weights(gone)
        with pytest.raises(EngineFailure, match="did not arrive as they were sent"):
            await engine.health()
        with pytest.raises(EngineFailure, match="did not arrive as they were sent"):
            await engine.generate(ask())
        await engine.update_weights(WeightUpdate(0, "checksum", {}))
        await engine.health()
        assert (await engine.generate(ask(max_tokens=16))).stop is StopReason.STOP

    play(stage, body)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Request("t", 0, (), SamplingParams(4)), "a prompt of 0 tokens"),
        (Request("t", 0, (1,) * 600, SamplingParams(4)), "a prompt of 600 tokens"),
        (Request("t", 0, (1, 5000), SamplingParams(4)), "the model knows 0 to 127"),
        (Request("t", 0, (1,), SamplingParams(0)), "ask for at least 1"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_leaves(stage: Stage, request_: Request, problem: str) -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(RequestRefused, match=problem):
            await engine.generate(request_)

    play(stage, body)


@pytest.fixture(scope="module")
def calculator(loop: Loop) -> Iterator[VLLMEngine]:
    """A server of a real family: tied embeddings, fused projections, a tokenizer."""
    rollout = RolloutConfig(
        name="vllm",
        prompt_length=64,
        response_length=600,
        max_num_seqs=8,
        limits=LIMITS,
        engine_kwargs={"vllm": {"skip_tokenizer_init": False}},
    )
    model = ModelConfig(path="treadle/tiny-calculator")
    engine: VLLMEngine = loop.run(VLLMEngine.create(rollout, model, name="vllm-1", version=3))
    yield engine
    loop.run(engine.close())


def test_pushed_weights_of_a_tied_and_fused_model_give_the_trainers_logprobs(
    loop: Loop, calculator: VLLMEngine
) -> None:
    model = ModelConfig(path="treadle/tiny-calculator")
    module = load_causal_model(model, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter += 0.05 * parameter.std() * noise
    request = Request("t", 0, tuple(range(10, 30)), SamplingParams(40, seed=2))

    async def body() -> None:
        assert calculator.version == 3
        native = await NativeEngine.create(RolloutConfig(prompt_length=64, response_length=100), module)
        sender = PolicySender(Weights(module), transport=SharedMemoryTransport(timeout_s=20, bucket_bytes=1 << 19))  # type: ignore[arg-type]
        await WeightSync(sender, timeout_s=60).push_to(calculator, 4)
        ours, theirs = await native.generate(request), await calculator.generate(request)
        await native.close()
        assert ours.ids == theirs.ids and set(theirs.versions) == {4}
        assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=5e-5)

    loop.run(body())


def test_a_sleeping_engine_holds_requests_until_it_wakes(loop: Loop, calculator: VLLMEngine) -> None:
    async def body() -> None:
        request, clock = Request("t", 0, (5, 6), SamplingParams(4)), asyncio.get_running_loop().time
        began = clock()
        await calculator.generate(request)
        awake_s = clock() - began
        await calculator.sleep(1)
        held = asyncio.ensure_future(calculator.generate(request))
        await asyncio.sleep(10 * awake_s)  # ten times what it takes to answer when it is awake
        assert not held.done()
        await calculator.wake()
        assert len((await held).ids) == 4

    loop.run(body())


def test_agents_that_speak_http_reach_the_same_weights(loop: Loop, calculator: VLLMEngine) -> None:
    async def body() -> None:
        url = await calculator.serve_openai("policy", api_key="secret")
        assert url == await calculator.serve_openai("policy", api_key="secret")
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            question = {"role": "user", "content": "(41-36)+61="}
            asked = {"model": "policy", "messages": [question], "max_tokens": 8, "logprobs": True}
            beside = Request("beside", 0, (5, 6, 7), SamplingParams(8))
            reply, ours = await asyncio.gather(
                client.post(f"{url}/chat/completions", json=asked, headers={"Authorization": "Bearer secret"}),
                calculator.generate(beside),
            )
            wrong = {"Authorization": "Bearer secrets"}
            for path, headers in (("/v1/models", {}), ("/v1/models", wrong), ("/invocations", {}), ("/tokenize", {})):
                address = url.removesuffix("/v1") + path
                assert (await client.post(address, json=asked, headers=headers)).status_code == 401
        assert reply.status_code == 200
        choice = reply.json()["choices"][0]
        assert choice["message"]["content"]
        assert all(token["logprob"] <= 0 for token in choice["logprobs"]["content"])
        assert len(ours.logprobs) == len(ours.ids)

    loop.run(body())


def test_without_a_tokenizer_the_http_door_says_what_to_set(stage: Stage) -> None:
    async def body(engine: VLLMEngine) -> None:
        with pytest.raises(EngineFailure, match=r"rollout\.engine_kwargs\.vllm\.skip_tokenizer_init=false"):
            await engine.serve_openai(api_key="k")

    play(stage, body)


@pytest.mark.filterwarnings("ignore")  # vLLM's own, when it is imported
def test_logprobs_that_travel_together_reach_their_requests() -> None:
    import numpy
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    from treadle.engine.vllm.packed_logprobs import LogprobUnpacker, WholeLogprobs, pack

    values = numpy.arange(6, dtype=numpy.float32)[:, None]
    step = LogprobsLists(values.astype(numpy.int32), values, numpy.arange(6), [0, 2, 3, 4, 5])
    tokens = [2, 1, 1, 1, 1]
    names = ["treadle-a", "chatcmpl-b", "treadle-c", "treadle-d", "treadle-e"]
    outputs = [
        EngineCoreOutput(name, [7] * count, new_logprobs=WholeLogprobs(step).slice_request(at, count))
        for at, (name, count) in enumerate(zip(names, tokens, strict=True))
    ]
    pack(outputs, step)
    assert [output.request_id for output in outputs if output.new_logprobs] == ["treadle-a", "chatcmpl-b"]
    held: dict[str, list[float]] = {name: [] for name in names}
    reading = LogprobUnpacker(held.get)
    reading.read(outputs[:3])
    del held["treadle-d"]  # aborted before the rest of the step is read
    reading.read(outputs[3:])
    assert held == {"treadle-a": [0.0, 1.0], "chatcmpl-b": [], "treadle-c": [3.0], "treadle-e": [5.0]}
    assert outputs[1].new_logprobs.logprobs.tolist() == [[2.0]]


@pytest.mark.filterwarnings("ignore")
def test_what_is_held_is_put_back_together_from_fused_parameters() -> None:
    from treadle.engine.vllm.weight_transfer import TensorLayout, _locate

    attention = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(4, 10)})
    model = torch.nn.ModuleDict({"attn": attention, "words": torch.nn.Embedding(16, 4)})
    sent = {"words.weight": model.get_parameter("words.weight").detach()[:13].clone()}
    for part in ("weight", "bias"):
        pieces = model.get_parameter(f"attn.qkv_proj.{part}").detach().clone().split([6, 2, 2])
        sent |= {f"attn.{name}_proj.{part}": piece for name, piece in zip("qkv", pieces, strict=True)}
    kinds = {name: TensorLayout(tuple(tensor.shape), tensor.dtype) for name, tensor in sent.items()}
    assert checksum(_locate(model, kinds)) == checksum(sent)
    with torch.no_grad():
        model.get_parameter("attn.qkv_proj.weight")[7, 1] += 1
    assert checksum(_locate(model, kinds)) != checksum(sent)
    attention["qkv_proj"] = torch.nn.Linear(4, 5)  # as one of two workers has it
    assert not _locate(model, kinds)


@pytest.mark.filterwarnings("ignore")
def test_known_places_are_written_and_other_names_refused() -> None:
    from treadle.engine.vllm.weight_transfer import ProvenWeightTransfer

    receiver = ProvenWeightTransfer.__new__(ProvenWeightTransfer)  # vLLM's worker makes the real ones
    fused = torch.zeros(5, 2)
    receiver.places = {"q": fused[:3], "k": fused[3:]}
    new = {"q": torch.ones(3, 2), "k": torch.full((2, 2), 2.0)}
    assert receiver.write(new) == checksum(new)
    assert fused.tolist() == [[1.0, 1.0]] * 3 + [[2.0, 2.0]] * 2
    with pytest.raises(ValueError, match="other names"):
        receiver.write({"q": new["q"]})
    assert not receiver.places  # the next update goes through vLLM's loader


class Sleepy:
    """vLLM's asynchronous engine, as far as an update needs it: keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.broken = ""
        self.engine_core = self

    async def _hear(self, word: str) -> None:
        self.told.append(word)
        await asyncio.sleep(0)
        if word == self.broken:
            raise OSError(f"broken: {word}")

    async def sleep(self, level: int) -> None:
        await self._hear("sleep")

    async def wake_up(self, tags: list[str]) -> None:
        await self._hear(f"wake {tags[0]}")

    async def pause_scheduler_async(self, **options: object) -> None:
        await self._hear("pause")

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, request: object) -> None:
        await self._hear("load")

    async def finish_weight_update(self) -> None: ...

    async def resume_generation(self) -> None:
        await self._hear("resume")

    async def collective_rpc(self, name: str, args: tuple[bytes, ...] = ()) -> list[object]:
        if name == "treadle_write":
            await self._hear("write")
        return [False] if name == "treadle_is_torn" else [("word", True)]


@pytest.mark.filterwarnings("ignore")
def test_the_first_update_is_loaded_later_ones_are_written_and_failed_ones_mended_by_the_loader() -> None:
    from treadle.engine.vllm.async_llm import AsyncLLMSampler

    async def body() -> None:
        llm = Sleepy()
        sampler = AsyncLLMSampler(llm, keyed=True, room=8)
        assert [await sampler.load(b"") for _ in range(2)] == ["word", "word"]
        llm.broken = "write"
        with pytest.raises(EngineFailure, match="broken: write"):
            await sampler.load(b"")
        llm.broken = ""
        await sampler.load(b"")
        assert [word for word in llm.told if word in ("load", "write")] == ["load", "write", "write", "load"]

    asyncio.run(body())


@pytest.mark.filterwarnings("ignore")
def test_weights_wake_what_may_sleep_however_its_sleep_and_earlier_updates_ended() -> None:
    from treadle.engine.vllm.async_llm import AsyncLLMSampler

    async def body() -> None:
        llm = Sleepy()
        sampler = AsyncLLMSampler(llm, keyed=True, room=8)
        sleeping = asyncio.ensure_future(sampler.sleep(1))
        await asyncio.sleep(0)
        sleeping.cancel()
        llm.broken = "load"
        with pytest.raises(EngineFailure, match="broken: load"):
            await sampler.load(b"")
        llm.broken, llm.told = "", []
        await sampler.load(b"")
        assert llm.told == ["wake weights", "pause", "load", "wake kv_cache", "resume"]
        llm.told = []
        await sampler.load(b"")
        assert llm.told == ["pause", "write", "resume"]

    asyncio.run(body())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("version", "known"), [("0.24.0", True), ("0.32.1+cpu", True), ("0.23.9", False), ("1.0", False)]
)
def test_versions_that_nobody_tried_are_refused(version: str, known: bool) -> None:
    from treadle.engine.vllm.async_llm import check_version

    if known:
        return check_version(version)
    with pytest.raises(ConfigError, match=f"vLLM {version} is installed; treadle works with 0.24 to 0.32"):
        check_version(version)


def test_wrong_arguments_are_named_all_at_once(directory: Path) -> None:
    wrong = {"max_num_seq": 3, "model": "x", "enable_expert_parallell": True}
    rollout = RolloutConfig(name="vllm", limits=LIMITS, engine_kwargs={"vllm": wrong})
    with pytest.raises(ConfigError) as caught:
        asyncio.run(VLLMEngine.create(rollout, ModelConfig(path=str(directory))))
    text = str(caught.value)
    assert "rollout.engine_kwargs.vllm.max_num_seq" in text and "did you mean 'max_num_seqs'" in text
    assert "rollout.engine_kwargs.vllm.model: treadle sets this one itself" in text
    assert "enable_expert_parallel'" in text


def test_a_server_that_cannot_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(EngineFailure, match=r"(?s)vllm-0 died while it started: exit status 1.*its last lines:.*Error"):
        asyncio.run(VLLMEngine.create(RolloutConfig(name="vllm", limits=LIMITS), ModelConfig(path=str(tmp_path))))


def test_the_launch_deadline_is_kept(directory: Path) -> None:
    rollout = RolloutConfig(name="vllm", limits=LimitsConfig(launch_timeout_s=0.5, close_timeout_s=1))
    with pytest.raises(DeadlineError, match=r"did not start within rollout\.limits\.launch_timeout_s = 0\.5"):
        asyncio.run(VLLMEngine.create(rollout, ModelConfig(path=str(directory))))


def test_time_in_vllms_queue_is_told_where_its_statistics_are_on(loop: Loop) -> None:
    """One row for two requests: the second waits for the first."""
    sizes = {"prompt_length": 32, "response_length": 96, "max_num_seqs": 1, "max_num_batched_tokens": 256}
    on = {"vllm": {"disable_log_stats": False}}
    rollout = RolloutConfig(name="vllm", limits=LIMITS, engine_kwargs=on, **sizes)

    async def body() -> None:
        engine = await VLLMEngine.create(rollout, ModelConfig(path="treadle/tiny-calculator"))
        asked = [Request("t", sample, (5, 6), SamplingParams(90)) for sample in range(2)]
        first, second = await asyncio.gather(*map(engine.generate, asked))
        assert second.queue_s > max(0.01, first.queue_s) and first.queue_s >= 0, (first.queue_s, second.queue_s)
        await engine.close()

    loop.run(body())


def test_a_server_whose_weights_are_torn_ends_so_that_another_can_take_its_place(loop: Loop, tmp_path: Path) -> None:
    """vLLM's loader cannot begin again: what it has of a layer would count for the next update."""
    rollout = RolloutConfig(name="vllm", prompt_length=32, response_length=32, max_num_seqs=4, limits=LIMITS)
    model = ModelConfig(path="treadle/tiny-calculator")
    module = load_causal_model(model, dtype=torch.float32, device=torch.device("cpu"))

    async def body() -> None:
        engine = await VLLMEngine.create(rollout, model)
        torn = Tearing({name: weight.detach() for name, weight in module.named_parameters()}, tmp_path / "flag")
        with pytest.raises(EngineGone):
            await engine.update_weights(WeightUpdate(1, "checksum", torn))
        assert "exit status 1" in await engine.gone()
        await engine.close()

    loop.run(body())


def test_a_killed_server_fails_its_requests_at_once_and_leaves_nobody(loop: Loop, calculator: VLLMEngine) -> None:
    """The last test with this server."""
    group = calculator._server.process.pid
    long = Request("t", 0, (5, 6), SamplingParams(500))

    async def body() -> None:
        os.kill(group, signal.SIGSTOP)  # a request that is sent now cannot be answered
        running = asyncio.ensure_future(calculator.generate(long))
        await asyncio.wait({running}, timeout=0.5)
        os.kill(group, signal.SIGKILL)
        async with asyncio.timeout(10):
            with pytest.raises(EngineFailure, match="vllm-1 died: killed by SIGKILL"):
                await running
            with pytest.raises(EngineFailure, match="vllm-1 died: killed by SIGKILL"):
                await calculator.health()
            with pytest.raises(EngineFailure, match="vllm-1 died: killed by SIGKILL"):
                await calculator.generate(long)

    loop.run(body())
    limit = time.monotonic() + 10
    while [found for found in _processes() if found[1] == group]:
        assert time.monotonic() < limit, "its children did not go with it"
        time.sleep(0.05)


def _processes() -> list[tuple[int, int, str]]:
    """pid, process group and command of all processes that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if state != "Z":
                found.append((int(entry.name), int(group), command))
    return found
