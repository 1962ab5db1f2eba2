"""LoRA on one device: what trains, what is saved, what the reference and an engine see, and what is refused."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.policies import CPU, make_actor, make_policy, save_tiny_model, weights
from tests.sharded import make_batch, ragged
from treadle.algorithm.advantage_inputs import rows_of
from treadle.config import loads
from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.config.training import LoraConfig, OptimConfig, RefConfig, RolloutCorrectionConfig
from treadle.engine.native.engine import NativeEngine
from treadle.errors import ConfigError, RunError
from treadle.model.checksum import checksum
from treadle.model.load import load_causal_model
from treadle.model.lora import LoraSettings, find_targets
from treadle.model.peft_files import StoredAdapter, read_adapter, write_adapter
from treadle.policy.policy import Sampling, SinglePolicy
from treadle.policy.reference import FrozenReference, SingleReference
from treadle.weights.sync import PolicySender, WeightSync

FAST = OptimConfig(lr=1e-2)
FP32 = RefConfig(dtype="fp32")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make_lora(base: Path, *, adapter: Path | None = None, **keys: Any) -> SinglePolicy:
    """`keys` are the actor's; a rank of 4 unless they say otherwise."""
    if adapter is None:
        return make_policy(base, **{"lora": LoraConfig(r=4), "optim": FAST} | keys)
    return SinglePolicy.create(
        model=ModelConfig(path=str(base), adapter=str(adapter)),
        actor=make_lora(base, **keys)._actor,
        rollout_correction=RolloutCorrectionConfig(),
        sampling=Sampling(1.0, response_length=16),
        total_steps=10,
        device=CPU,
    )


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


def test_only_modules_with_an_adapter_change_and_the_state_is_theirs(base: Path) -> None:
    policy = make_lora(
        base, lora=LoraConfig(r=2, target_modules=("q_proj",), exclude_modules=("layers.1.self_attn.q_proj",))
    )
    before = weights(policy)
    metrics = policy.train(make_batch(ragged(1)))
    assert changed(before, policy.tensors()) == {"model.layers.0.self_attn.q_proj.weight"}
    state = policy._optimizer.state()
    assert {name.rpartition(".")[0] for name in state} == {
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_B.weight",
    }
    assert metrics["actor/grad_norm"] > 0


def test_a_new_adapter_has_no_effect_before_it_trains(base: Path) -> None:
    policy, plain = make_lora(base), make_policy(base)
    assert not changed(weights(plain), policy.tensors())
    rows = rows_of(ragged(3))
    assert torch.equal(policy.logprobs(rows), plain.logprobs(rows))


def test_gradients_are_clipped_over_the_adapters(base: Path) -> None:
    gaps = []
    for grad_clip in (1e-6, 100.0):
        policy = make_lora(base, grad_clip=grad_clip, optim=OptimConfig(lr=1e-2, betas=(0.0, 0.0), weight_decay=0.0))
        policy.train(make_batch(ragged(1)))
        gaps.append(policy._optimizer.state()["model.layers.0.self_attn.q_proj.lora_B.weight.exp_avg"].norm())
    assert gaps[0] < 1e-5 < gaps[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_weights_train_under_fp32_adapters(base: Path, recompute: bool) -> None:
    policy = make_lora(base, dtype="bf16", recompute=recompute)
    assert {tensor.dtype for tensor in policy.tensors().values()} == {torch.bfloat16}
    before = weights(policy)
    policy.train(make_batch(ragged(1)))
    assert len(changed(before, policy.tensors())) == 14
    for name, tensor in policy._optimizer.weights.full.items():
        assert tensor.dtype == torch.float32, name
    wide = make_lora(base)
    wide.train(make_batch(ragged(1)))
    narrow, right = policy._optimizer.state(), wide._optimizer.state()
    for name in right:
        if name.endswith("lora_B.weight.exp_avg"):  # of the gradient, in bf16's precision
            assert (narrow[name] - right[name]).norm() < 0.25 * right[name].norm(), name


def test_the_reference_is_the_frozen_model_and_has_no_weights_of_its_own(base: Path) -> None:
    policy = make_lora(base)
    reference = policy.frozen_reference(FP32)
    assert isinstance(reference, FrozenReference)
    rows = rows_of(ragged(3))
    expected = SingleReference.create(
        model=ModelConfig(path=str(base)), ref=FP32, temperature=1.0, device=CPU
    ).logprobs(rows)
    policy.train(make_batch(ragged(1)))
    trained, before = policy.logprobs(rows), weights(policy)
    assert torch.equal(reference.logprobs(rows), expected)
    assert not torch.equal(trained, expected)
    assert not changed(before, policy.tensors()), "the adapters are back, bit for bit"
    assert torch.equal(policy.logprobs(rows), trained)


def test_a_reference_that_follows_or_computes_in_another_dtype_has_its_own_weights(base: Path) -> None:
    assert make_lora(base).frozen_reference(RefConfig(dtype="fp32", sync_freq=2)) is None
    assert make_lora(base).frozen_reference(RefConfig(dtype="bf16")) is None
    assert make_policy(base).frozen_reference(FP32) is None


def test_a_checkpoint_is_small_and_goes_on_bit_for_bit(base: Path, tmp_path: Path) -> None:
    whole = make_lora(base)
    for seed in range(4):
        whole.train(make_batch(ragged(seed)))
    first = make_lora(base)
    for seed in range(2):
        first.train(make_batch(ragged(seed)))
    first.save(tmp_path / "checkpoint")
    names = {path.name for path in (tmp_path / "checkpoint").rglob("*.safetensors")}
    assert names == {"adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors"}
    second = make_lora(base)
    second.restore(tmp_path / "checkpoint")
    assert second.version == 2
    for seed in range(2, 4):
        second.train(make_batch(ragged(seed)))
    assert checksum(dict(second.tensors())) == checksum(dict(whole.tensors()))


def test_a_checkpoint_of_other_frozen_weights_is_refused(base: Path, tmp_path: Path) -> None:
    make_lora(base).save(tmp_path / "checkpoint")
    torch.manual_seed(1)
    other = save_tiny_model(tmp_path / "other", initializer_range=0.2)
    with pytest.raises(RunError, match="trained beside other frozen weights"):
        make_lora(other).restore(tmp_path / "checkpoint")
    with pytest.raises(RunError, match="LoraSettings"):
        make_lora(base, lora=LoraConfig(r=5)).restore(tmp_path / "checkpoint")
    make_policy(base).save(tmp_path / "full")
    with pytest.raises(RunError, match="trained all parameters"):
        make_lora(base).restore(tmp_path / "full")


def test_training_goes_on_from_an_adapter_and_the_reference_is_where_it_began(base: Path, tmp_path: Path) -> None:
    first = make_lora(base, lora=LoraConfig(r=4, alpha=5.0, target_modules=("q_proj", "up_proj")))
    first.train(make_batch(ragged(1)))
    first.save(tmp_path / "adapter")
    second = make_lora(base, adapter=tmp_path / "adapter")
    rows = rows_of(ragged(3))
    start = first.logprobs(rows)
    assert torch.equal(second.logprobs(rows), start)
    reference = second.frozen_reference(FP32)
    assert reference is not None
    second.train(make_batch(ragged(2)))
    assert torch.equal(reference.logprobs(rows), start)
    assert not torch.equal(second.logprobs(rows), start)
    merged = load_causal_model(
        ModelConfig(path=str(base), adapter=str(tmp_path / "adapter")), dtype=torch.float32, device=CPU
    )
    assert not changed(dict(first.tensors()), {name: tensor.detach() for name, tensor in merged.named_parameters()})


def test_keys_that_say_something_else_than_the_adapter_are_refused(base: Path, tmp_path: Path) -> None:
    make_lora(base, lora=LoraConfig(r=4, target_modules=("q_proj",))).save(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"actor\.lora\.r: the adapter of model\.adapter has 4"):
        make_lora(base, adapter=tmp_path / "adapter", lora=LoraConfig(r=8))
    with pytest.raises(ConfigError, match="is of other modules"):
        make_lora(base, adapter=tmp_path / "adapter", lora=LoraConfig(r=4, target_modules=("k_proj",)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"use_dora": True}, "use_dora True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 0}, "r 0"),
        ({"something_new": 3}, "something_new 3"),
    ],
)
def test_an_adapter_with_what_treadle_lacks_is_refused_by_name(
    base: Path, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    make_lora(base).save(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=problem) as caught:
        read_adapter(str(tmp_path))
    assert caught.value.mistakes[0].key == "model.adapter"


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    make_lora(save_tiny_model(tmp_path / "wide", hidden_size=32)).save(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"has factors of \[4, 32\] and \[32, 4\], but the model needs .*\[16, 4\]"):
        make_lora(base, adapter=tmp_path / "adapter")
    make_lora(save_tiny_model(tmp_path / "deep", num_hidden_layers=3)).save(tmp_path / "adapter-2")
    with pytest.raises(ConfigError, match=r"has no linear module model\.layers\.2\."):
        load_causal_model(
            ModelConfig(path=str(base), adapter=str(tmp_path / "adapter-2")), dtype=torch.float32, device=CPU
        )


def test_an_adapter_that_unties_the_output_layer_is_refused_beside_vllm(tmp_path: Path) -> None:
    """vLLM keeps the layer tied and drops the weights that it is sent for it, without a word."""

    def create(adapter: Path, engine: str) -> SinglePolicy:
        return SinglePolicy.create(
            model=ModelConfig(path=str(tmp_path / "tied"), adapter=str(adapter)),
            actor=make_actor(),
            rollout_correction=RolloutCorrectionConfig(),
            sampling=Sampling(1.0, response_length=16, engine=engine),
            total_steps=10,
            device=CPU,
        )

    tied = save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    make_lora(tied).save(tmp_path / "inner")
    create(tmp_path / "inner", "vllm")
    module = AutoModelForCausalLM.from_pretrained(tied)
    layer = module.lm_head
    factors = {"lm_head": (torch.ones(2, layer.in_features), torch.ones(layer.out_features, 2))}
    write_adapter(tmp_path / "output", module, StoredAdapter(LoraSettings(2, 4.0), factors, None))
    create(tmp_path / "output", "native")
    with pytest.raises(ConfigError, match=r"model\.adapter.*changes the output layer, which vLLM ties"):
        create(tmp_path / "output", "vllm")


def test_tensors_that_are_no_factors_are_refused(base: Path, tmp_path: Path) -> None:
    make_lora(base).save(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="lm_head"):
        read_adapter(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match="no PEFT adapter could be read"):
        read_adapter(str(tmp_path))


def test_unknown_modules_are_named_with_their_neighbours(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'q_proj'.*k_proj.*all-linear"):
        make_lora(base, lora=LoraConfig(r=4, target_modules=("q_prj",)))
    with pytest.raises(ConfigError, match="the output layer cannot have an adapter"):
        make_lora(base, lora=LoraConfig(r=4, target_modules=("lm_head",)))
    with pytest.raises(ConfigError, match="no plain linear module but Embedding"):
        make_lora(base, lora=LoraConfig(r=4, target_modules=("embed_tokens",)))
    with pytest.raises(ConfigError, match="no module is left"):
        make_lora(base, lora=LoraConfig(r=4, exclude_modules=("all-linear",)))


@pytest.mark.parametrize("r", [0, -3])
def test_a_rank_below_one_is_refused(r: int) -> None:
    with pytest.raises(ConfigError, match=r"LoraConfig\.r"):
        LoraConfig(r=r)


MINIMAL = """
model: {path: treadle/tiny-calculator}
rollout: {n: 2}
data: {train_files: treadle.recipes.calculator.tasks:train, train_batch_size: 32}
actor: {ppo_mini_batch_size: 32, optim: {lr: 1.0e-4}}
reward: {functions: {answer: {path: number_match}}}
trainer: {total_training_steps: 1}
"""


def test_keys_without_a_rank_and_narrow_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor\.lora\.alpha.*no adapter trains"):
        loads(MINIMAL, "x.yaml", ("actor.lora.alpha=3",))
    with pytest.raises(ConfigError, match=r"actor\.model_dtype.*train in fp32"):
        loads(MINIMAL, "x.yaml", ("actor.lora.r=4", "actor.model_dtype=bf16"))
    with pytest.warns(match=r"actor\.optim\.lr"):
        loads(MINIMAL.replace(", optim: {lr: 1.0e-4}", ""), "x.yaml", ("actor.lora.r=4",))


def test_an_engine_has_the_merged_weights_and_other_ones_are_refused(base: Path) -> None:
    policy = make_lora(base)
    policy.train(make_batch(ragged(1)))

    async def push() -> None:
        rollout = RolloutConfig(prompt_length=16, response_length=16, dtype="float32")
        engine = await NativeEngine.create(rollout, ModelConfig(path=str(base)))
        try:
            sync = WeightSync(PolicySender(policy), timeout_s=60)
            report = await sync.push_to(engine, policy.version)
            assert report.checksum == checksum(dict(policy.tensors()))
            assert not changed(dict(policy.tensors()), dict(engine._module.state_dict()))

            class Unmerged(PolicySender):
                """Confirms the merged weights and sends the frozen ones: what a lost adapter would look like."""

                async def publish(self, version: int) -> Any:
                    from dataclasses import replace

                    update = await super().publish(version)
                    frozen = make_policy(base).tensors()
                    return replace(update, tensors=frozen)

            with pytest.raises(RunError, match="holds other weights than the policy"):
                await WeightSync(Unmerged(policy), timeout_s=60).push_to(engine, policy.version)
        finally:
            await engine.close()

    asyncio.run(push())


def test_scales_are_pefts() -> None:
    assert LoraSettings.of(LoraConfig(r=8)).scale == 2.0
    assert LoraSettings.of(LoraConfig(r=16, alpha=32.0)).scale == 2.0
    assert LoraSettings.of(LoraConfig(r=16, alpha=32.0, use_rslora=True)).scale == 8.0


def test_the_same_seed_gives_the_same_start(base: Path) -> None:
    def start(seed: int) -> Tensor:
        return (
            make_lora(base, lora=LoraConfig(r=4, seed=seed))
            ._optimizer.weights.full["model.layers.0.mlp.up_proj.lora_A.weight"]
            .detach()
        )

    assert torch.equal(start(1), start(1)) and not torch.equal(start(1), start(2))
    assert start(1).abs().max() <= 0.25 < start(1).abs().max() * 1.1


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_left_out_by_name_and_never_in_silence(family: str) -> None:
    module = tiny_experts(family)
    with pytest.raises(
        ConfigError, match=r"target_modules.*mlp\.experts and 1 more: [\d,]+ of [\d,]+ parameters"
    ) as it:
        find_targets(module, LoraConfig(r=2))
    assert "actor.lora.exclude_modules=[experts]" in str(it.value)
    chosen = find_targets(module, LoraConfig(r=2, exclude_modules=("experts",)))
    assert chosen and not any("experts" in name for name in chosen)
    assert find_targets(module, LoraConfig(r=2, target_modules=("q_proj", "v_proj"))).keys() < chosen.keys()
    for name in ("experts", "gate_up_proj"):
        with pytest.raises(ConfigError, match="tensors of three dimensions"):
            find_targets(module, LoraConfig(r=2, target_modules=(name,)))


def tiny_experts(family: str) -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 61, "moe_intermediate_size": 8}
    sizes |= {"num_experts": 4, "num_local_experts": 4}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
