"""Models compute what their authors wrote, in the policy and in the native engine, or are refused by name."""

import asyncio
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.configs import training_config
from tests.rollouts import renderer
from tests.small_models import make_config
from tests.tiny import tiny
from treadle.cluster.local import LocalRuntime
from treadle.cluster.runtime import Networks
from treadle.config import Machine, ModelConfig, RolloutConfig, make_plan
from treadle.config.training import ActorConfig, RolloutCorrectionConfig
from treadle.engine.native.engine import NativeEngine
from treadle.engine.native.parity import check_parity
from treadle.errors import ConfigError, MisuseError
from treadle.model import causal_lm, parity
from treadle.model.causal_lm import prepare_module, recomputing
from treadle.model.fused_layers import find_fused
from treadle.model.load import load_causal_model, load_model_config
from treadle.model.parity import Probe, check_policy_parity, digest
from treadle.model.rope import fix_rope, longest_sequence
from treadle.model.tiny_model import build_small, shrink
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.trainer.step import StepParts
from treadle.types import Completion, Request, SamplingParams

CPU = torch.device("cpu")
CLOSE = 5e-5
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parity, "CACHE", tmp_path / "parity")
    return tmp_path / "parity"


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "phi3-longrope", "llama-dynamic", "qwen2_moe-window", "phimoe-window", "opt", "jetmoe"],
)
def test_policy_and_engine_compute_what_the_authors_wrote(name: str) -> None:
    found = check_parity(make_config(name))
    assert found.problem is None
    assert found.policy.logprobs is not None and found.policy.logprobs < CLOSE
    assert found.policy.gradients is not None and found.policy.gradients < CLOSE
    assert found.engine is not None and found.engine.logprobs is not None and found.engine.logprobs < CLOSE


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "gpt_oss"])
def test_latent_attention_and_sinks_run_in_the_engine_too(name: str) -> None:
    found = check_parity(make_config(name))
    assert found.problem is None and found.engine is not None
    assert found.engine.logprobs is not None and found.engine.logprobs < CLOSE


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("recurrent_gemma", "nats from RecurrentGemmaForCausalLM's own forward"),
        ("bert", "nats from BertLMHeadModel's own forward"),
        ("minimax", "MiniMaxConfig has layers of kind linear_attention"),
        ("phimoe-longrope", "nats from PhimoeForCausalLM's own forward"),
        ("qwen3_next", "has layers of kind linear_attention"),
        ("bloom", "BloomForCausalLM does not let its attention be replaced"),
        ("nemotron", "the model does not hand keyword arguments on to NemotronAttention"),
        ("doge", "DogeAttention builds an attention mask of its own"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(name: str, problem: str) -> None:
    assert problem in str(check_parity(make_config(name)).problem)


@pytest.mark.parametrize("name", ["diffllama", "gemma4_text", "mimo_v2_flash"])
def test_the_engine_may_refuse_what_the_policy_trains(name: str) -> None:
    found = check_parity(make_config(name))
    assert found.policy.problem is None and found.policy.logprobs is not None and found.policy.logprobs < CLOSE
    assert "does not fit the native engine" in str(found.problem)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_rope_that_every_forward_chooses_anew_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "fix_rope", lambda *_: None)
    assert "nats from" in str(check_policy_parity(make_config(name)).problem)


def test_dropout_under_recomputation_is_found_and_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("opt")
    assert config.dropout > 0
    module = prepare_module(build_small(shrink(config)))
    with recomputing(module, True):
        assert not any(getattr(part, "dropout", 0.0) for part in module.modules())
    monkeypatch.setattr(causal_lm, "_drops", lambda name: name == "attention_dropout")
    assert "nats from OPTForCausalLM" in str(check_policy_parity(config).problem)


@pytest.mark.parametrize("name", ["qwen2_moe-window", "phimoe-window"])
def test_a_window_that_is_left_out_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.model.attention._find_window", lambda module: None)
    assert "nats from" in str(check_policy_parity(make_config(name)).problem)


def test_layers_that_scale_their_queries_far_out_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = shrink(make_config("ministral3"))
    config.rope_parameters["original_max_position_embeddings"] = 16384
    module = prepare_module(build_small(config))
    assert find_fused(module, plain=True) == []
    monkeypatch.setattr("treadle.model.layer_parts.position_thresholds", lambda config: ())
    assert find_fused(module, plain=True), "without a look beyond the threshold nobody would see it"


def test_fused_layers_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_policy_parity(make_config("ministral3")).problem is None
    monkeypatch.setattr("treadle.model.layer_parts.position_thresholds", lambda config: ())
    monkeypatch.setattr(parity, "CACHE", Path("/dev/null/nowhere"))
    monkeypatch.setattr("treadle.model.fused_layers._agrees", lambda *_: True)
    assert "fused layers are up to" in str(check_policy_parity(make_config("ministral3")).problem)


def test_frequencies_are_fixed_by_the_runs_longest_sequence() -> None:
    def frequencies(longest: int) -> torch.Tensor:
        module = build_small(shrink(make_config("phi3-longrope")))
        fix_rope(module, longest)
        fix_rope(module, 1)  # the first choice stands
        found: torch.Tensor = module.model.rotary_emb.inv_freq
        return found

    short, long = frequencies(24), frequencies(25)
    assert not torch.equal(short, long)
    assert torch.equal(short, frequencies(2)) and torch.equal(long, frequencies(56))
    with pytest.raises(MisuseError, match="longrope rope: the run's longest sequence must be given"):
        prepare_module(build_small(shrink(make_config("phi3-longrope"))))


def test_rope_is_fixed_where_weights_have_no_memory_yet() -> None:
    with torch.device("meta"):
        module = type(tiny())(shrink(make_config("llama-dynamic")))
    assert prepare_module(module, 56).model.rotary_emb.inv_freq.device.type == "meta"


@pytest.mark.parametrize("longest", [4096, 4097])
def test_both_sides_of_a_threshold_are_proven_each_by_itself(longest: int, cache: Path) -> None:
    config = make_config("phi3-longrope")
    assert Probe(config, longest).longest == (24 if longest == 4096 else 56)
    assert check_parity(config, longest=longest).problem is None
    assert digest("policy", config, 4096) != digest("policy", config, 4097)
    assert digest("policy", config, 4097) == digest("policy", config, 9000)


def test_a_known_config_is_not_proven_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_parity(make_config("llama"))
    monkeypatch.setattr(parity, "Probe", None)
    assert check_parity(make_config("llama")) == found
    assert len(list(cache.iterdir())) == 2
    for file in cache.iterdir():
        file.write_text("{")
    assert check_parity(make_config("llama")).problem is not None, "nothing is believed of a damaged file"


def save(directory: Path, name: str) -> ModelConfig:
    build_small(shrink(make_config(name))).save_pretrained(directory)
    return ModelConfig(path=str(directory))


def test_loading_refuses_by_name_unless_told_otherwise(tmp_path: Path) -> None:
    model = save(tmp_path, "recurrent_gemma")
    with pytest.raises(
        ConfigError, match=r"model\.path.*RecurrentGemmaForCausalLM's own forward(.|\n)*model\.parity_check"
    ):
        load_causal_model(model, dtype=torch.float32, device=CPU, longest=16)
    unproven = ModelConfig(path=model.path, parity_check=False)
    load_causal_model(unproven, dtype=torch.float32, device=CPU, longest=16)


async def start(model: Any, **keys: Any) -> None:
    engine = await NativeEngine.create(RolloutConfig(prompt_length=16, response_length=16), model, **keys)
    await engine.close()


def test_an_engine_refuses_a_module_that_it_would_compute_otherwise() -> None:
    module = build_small(shrink(make_config("gemma4_text")))
    with pytest.raises(ConfigError, match=r"rollout\.name.*Gemma4ForCausalLM does not fit the native engine"):
        asyncio.run(start(module))


def test_sequences_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    tiny(max_position_embeddings=128).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    load_causal_model(model, dtype=torch.float32, device=CPU, longest=128)
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len.*129 tokens, but LlamaConfig is made for 128"):
        load_causal_model(model, dtype=torch.float32, device=CPU, longest=129)
    longer = ModelConfig(path=str(tmp_path), override_config={"max_position_embeddings": 256})
    load_causal_model(longer, dtype=torch.float32, device=CPU, longest=129)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1000),
    ],
)
def test_scaled_rope_says_how_long_sequences_may_be(rope: dict[str, Any], longest: int) -> None:
    config = make_config("llama")
    config.max_position_embeddings = 1000
    config.rope_parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 1000} | rope
    assert longest_sequence(config) == longest


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B"}))
    with pytest.raises(ConfigError, match=r"is a PEFT adapter of Qwen/Qwen3-8B, not a model(.|\n)*as model.adapter"):
        load_model_config(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(("asked", "shared"), [("auto", True), ("bfloat16", True), ("float32", False)])
def test_an_engine_computes_in_the_dtype_that_was_asked_for(asked: str, shared: bool, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    words = (f"model.path={tmp_path}", f"rollout.dtype={asked}", "rollout.prompt_length=16")
    config = training_config(*words, "rollout.response_length=16", "actor.dtype=bf16")
    policy = SinglePolicy.create(
        model=config.model,
        actor=config.actor,
        rollout_correction=config.algorithm.rollout_correction,
        sampling=Sampling.of(config.rollout),
        total_steps=1,
        device=CPU,
    )
    step = StepParts(policy, config.actor, config.algorithm, config.trainer, None, None)

    async def start_beside() -> torch.nn.Module:
        runtime = LocalRuntime(config, make_plan(config, [Machine("here")]), Networks(step), None)
        (engine,) = (await runtime.rollout.start_engines(config.rollout, config.model, renderer(), None)).engines
        await engine.close()
        module: torch.nn.Module = engine._module
        return module

    module = asyncio.run(start_beside())
    assert (module is policy.module) is shared
    assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16 if shared else torch.float32}


def test_dynamic_ntk_beyond_its_trained_length_is_refused_beside_vllm(tmp_path: Path) -> None:
    model = save(tmp_path, "llama-dynamic")  # trained for 24 tokens, stretched to 96

    def create(longest: int, engine: str) -> None:
        SinglePolicy.create(
            model=model,
            actor=ActorConfig(),
            rollout_correction=RolloutCorrectionConfig(),
            sampling=Sampling(1.0, 8, longest, engine),
            total_steps=1,
            device=CPU,
        )

    create(24, "vllm")
    create(40, "native")
    with pytest.raises(ConfigError, match=r"rollout\.name.*vLLM computes dynamic NTK rope beyond 24 tokens otherwise"):
        create(40, "vllm")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "phi3-longrope"])
def test_an_engine_of_such_models_samples_with_the_logprobs_of_a_plain_forward(name: str, device: str) -> None:
    """On a GPU the steps of models that choose experts on the host cannot be recorded: they run without a graph."""
    module = build_small(shrink(make_config(name)))
    reference = deepcopy(module)
    prompt = tuple(range(5, 30))

    async def sample() -> Completion:
        rollout, there = RolloutConfig(prompt_length=30, response_length=20), torch.device(device)
        engine = await NativeEngine.create(rollout, module.to(there), device=there, parity_check=False)
        done = await engine.generate(Request("task", 0, prompt, SamplingParams(20, seed=3), 0))
        again = await engine.generate(Request("task", 0, prompt, SamplingParams(20, seed=3), 0))
        await engine.close()
        assert again.ids == done.ids
        return done

    done = asyncio.run(sample())
    ids = torch.tensor([[*prompt, *done.ids]])
    with torch.no_grad():  # 45 tokens: the module itself chooses the factors that the engine's 50 do
        table = reference(ids, use_cache=False).logits[0].log_softmax(-1)
    expected = [table[at - 1, ids[0, at]].item() for at in range(len(prompt), ids.shape[1])]
    assert list(done.logprobs) == pytest.approx(expected, abs=CLOSE if device == "cpu" else 20 * CLOSE)
