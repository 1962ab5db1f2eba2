"""Old spellings in config layers: what they become, what is said about them, and what is refused."""

import subprocess
import sys
from typing import Any

import pytest

from treadle.config import LegacyKeyWarning, legacy, loads
from treadle.config.legacy import Translation
from treadle.config.parse import UNSET, Layer, dotted, read_text, read_words


def words(*items: str) -> Layer:
    mistakes: list[Any] = []
    layer = read_words(items, mistakes)
    assert not mistakes, mistakes
    return layer


def text(yaml: str) -> Layer:
    mistakes: list[Any] = []
    layer = read_text(yaml, "old.yaml", mistakes)
    assert not mistakes, mistakes
    return layer


def translate(*items: str) -> Translation:
    return legacy.translate([words(*items)])


def values(translation: Translation, layer: int = -1) -> dict[str, Any]:
    return {dotted(path): leaf.value for path, leaf in translation.layers[layer].items()}


def mapped(*items: str) -> dict[str, Any]:
    translation = translate(*items)
    assert translation.mistakes == (), translation.mistakes
    return values(translation)


def problem(*items: str) -> str:
    (mistake,) = translate(*items).mistakes
    return str(mistake)


def test_a_config_of_ours_is_handed_back_as_it_is() -> None:
    layer = words("rollout.n=4", "algorithm.kl_penalty=k2", "rollout.engine_kwargs.vllm.anything=1")
    translation = legacy.translate([layer])
    assert translation.layers[0] is layer
    assert (translation.warnings, translation.mistakes) == ((), ())


def test_the_tables_are_not_imported_for_a_config_of_ours() -> None:
    code = (
        "import sys; from treadle.config import legacy; from treadle.config.parse import read_words;"
        "legacy.translate([read_words(['rollout.n=4', 'actor._target_=treadle.config.FSDPActorConfig'], [])]);"
        "assert not [name for name in sys.modules if name.startswith('treadle.migrate')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("actor_rollout_ref.rollout.n=4", True),
        ("+actor_rollout_ref.model.override_config.x=1", True),
        ("data.max_prompt_length=4", True),
        ("actor._target_=verl.workers.config.FSDPActorConfig", True),
        ("actor_rollout_ref.rollout.temperatur=1", True),
        ("rollout.n=4", False),
        ("algorithm.kl_penalty=kl", False),
        ("rollout.temperatur=1", False),
        ("something.else=1", False),
    ],
)
def test_a_layer_is_legacy_when_a_key_is_verls_and_not_ours(word: str, expected: bool) -> None:
    assert legacy.is_legacy(words(word)) is expected


def test_a_moved_key_keeps_its_value_and_remembers_its_way() -> None:
    translation = translate("actor_rollout_ref.rollout.n=5")
    ((path, leaf),) = translation.layers[0].items()
    assert (path, leaf.value, leaf.text) == (("rollout", "n"), 5, "5")
    assert str(leaf.origin) == ("command line (actor_rollout_ref.rollout.n=5), legacy key actor_rollout_ref.rollout.n")
    (warning,) = translation.warnings
    assert "actor_rollout_ref.rollout.n" in warning and "rollout.n here" in warning and "command line" in warning


def test_there_is_one_warning_per_old_key_however_many_layers_give_it() -> None:
    old = text("actor_rollout_ref: {rollout: {n: 4}}")
    translation = legacy.translate([old, words("actor_rollout_ref.rollout.n=5")])
    (warning,) = translation.warnings
    assert "command line" in warning
    assert values(translation, 0) == {"rollout.n": 4} and values(translation, 1) == {"rollout.n": 5}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_hydras_prefixes_make_no_difference(prefix: str) -> None:
    assert mapped(f"{prefix}data.apply_chat_template_kwargs.enable_thinking=False") == {
        "model.apply_chat_template_kwargs.enable_thinking": False
    }


def test_taking_back_an_old_key_takes_back_the_new_one() -> None:
    old = text("actor_rollout_ref: {rollout: {n: 4, response_length: 9}}")
    translation = legacy.translate([old, words("~actor_rollout_ref.rollout.n")])
    assert values(translation, 1) == {"rollout.n": UNSET}
    assert translation.mistakes == ()


def test_taking_back_a_whole_section_takes_back_what_came_from_it() -> None:
    old = text("actor_rollout_ref: {rollout: {multi_turn: {enable: true, format: hermes}, n: 2}}")
    translation = legacy.translate([old, words("~actor_rollout_ref.rollout.multi_turn")])
    assert values(translation, 1) == {"rollout.multi_turn.format": UNSET}


def test_a_key_without_counterpart_that_is_taken_back_is_no_mistake() -> None:
    old = text("actor_rollout_ref: {rollout: {n: 2}, nccl_timeout: 600}")
    assert len(legacy.translate([old]).mistakes) == 1
    assert legacy.translate([old, words("~actor_rollout_ref.nccl_timeout")]).mistakes == ()


def test_old_and_new_spelling_together_are_refused_with_both_origins() -> None:
    translation = legacy.translate([text("rollout: {n: 4}"), words("actor_rollout_ref.rollout.n=4")])
    (mistake,) = translation.mistakes
    assert mistake.key == "rollout.n" and "both spellings" in mistake.problem
    assert "old.yaml:1" in str(mistake) and "command line (actor_rollout_ref.rollout.n=4)" in str(mistake)


@pytest.mark.parametrize(
    "pair",
    [
        ("rollout.n=4", "actor_rollout_ref.rollout.n=4"),
        ("model.path=m", "actor_rollout_ref.model.path=m"),
        ("rollout.prompt_length=4", "data.max_prompt_length=4"),
        ("checkpoint.save_freq=4", "trainer.save_freq=4"),
    ],
)
def test_both_spellings_on_one_command_line_are_refused_even_if_equal(pair: tuple[str, str]) -> None:
    assert "both spellings" in problem(*pair)
    assert "both spellings" in problem(*reversed(pair))


def test_two_old_keys_that_mean_one_of_ours_may_agree() -> None:
    assert mapped("data.max_prompt_length=64", "actor_rollout_ref.rollout.prompt_length=64") == {
        "rollout.prompt_length": 64
    }


def test_two_old_keys_that_disagree_are_refused_with_both_names() -> None:
    said = problem("data.max_prompt_length=64", "actor_rollout_ref.rollout.prompt_length=65")
    assert "data.max_prompt_length = 64" in said and "actor_rollout_ref.rollout.prompt_length = 65" in said


def test_a_later_layer_settles_what_two_old_keys_say() -> None:
    old = text("data: {max_prompt_length: 64}\nactor_rollout_ref: {rollout: {prompt_length: 65}}")
    assert legacy.translate([old]).mistakes != ()
    assert legacy.translate([old, words("data.max_prompt_length=65")]).mistakes == ()


def test_a_key_without_counterpart_is_refused_with_the_reason() -> None:
    said = problem("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")
    assert "no counterpart" in said and "no Megatron backend" in said and "command line" in said


def test_a_mistyped_old_key_is_refused_with_the_nearest() -> None:
    assert "did you mean 'temperature'?" in problem("actor_rollout_ref.rollout.temperatur=1")


def test_a_key_that_is_nobodys_is_left_for_the_loader() -> None:
    translation = translate("actor_rollout_ref.rollout.n=4", "rollout.temperatur=1")
    assert values(translation) == {"rollout.n": 4, "rollout.temperatur": 1}
    assert translation.mistakes == ()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", {"actor.kl_loss_type": "k3"}),
        ("actor_rollout_ref.actor.kl_loss_type=k3+", {"actor.kl_loss_type": "k3+"}),
        ("actor_rollout_ref.actor.tau_neg=1.2", {"actor.policy_loss.tau_neg": 1.2}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv", {"actor.policy_loss.loss_mode": "dppo_tv"}),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=linear", {"actor.optim.lr_scheduler_type": "linear"}),
        ("actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", {"actor.dtype": "bf16"}),
        ("actor_rollout_ref.rollout.do_sample=False", {"rollout.temperature": 0.0}),
        ("actor_rollout_ref.rollout.do_sample=True", {}),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=False", {"rollout.val_kwargs.temperature": 0.0}),
        ("actor_rollout_ref.rollout.name=hf", {"rollout.name": "native"}),
        ("actor_rollout_ref.rollout.top_k=0", {"rollout.top_k": -1}),
        ("actor_rollout_ref.rollout.mode=async", {}),
        ("actor_rollout_ref.rollout.n_gpus_per_node=8", {}),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", {"actor.optim.lr_scheduler_type": "cosine"}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=clip-cov", {"actor.policy_loss.loss_mode": "clip_cov"}),
        ("data.filter_overlong_prompts=True", {"rollout.overlong_prompts": "drop"}),
        ("data.truncation=left", {"rollout.overlong_prompts": "truncate_left"}),
        ("trainer.default_local_dir=out", {"logging.run_dir": "out"}),
        ("trainer.logger=console", {"logging.logger": ["console"]}),
        ("trainer.logger=[console,file]", {"logging.logger": ["console"]}),
        ("trainer.save_freq=0", {"checkpoint.save_freq": -1}),
        ("trainer.v1.trainer_mode=separate_async", {"trainer.mode": "fully_async"}),
        ("critic.model.path=v", {"critic.path": "v"}),
        ("reward_model.max_rpm=120", {"reward.rate_limit_per_s": 2.0}),
        (
            "custom_reward_function.path=recipe/r1/score.py",
            {"reward.functions.custom.path": "recipe/r1/score.py:compute_score"},
        ),
        ("trainer.project_name=007", {"logging.project_name": 7}),
        ("actor_rollout_ref.model.lora_rank=0", {}),
        ("actor_rollout_ref.model.lora_rank=32", {"actor.lora.r": 32, "actor.lora.alpha": 16}),
        ("actor_rollout_ref.model.lora_alpha=32", {}),
        ("actor_rollout_ref.model.lora_adapter_path=/adapters/a", {"model.adapter": "/adapters/a"}),
    ],
)
def test_values_are_spelled_our_way(word: str, expected: dict[str, Any]) -> None:
    assert repr(mapped(word)) == repr(expected), "False is not 0.0"


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("actor_rollout_ref.actor.kl_loss_type=abs", "use k1, k2 or k3"),
        ("actor_rollout_ref.actor.strategy=megatron", "FSDP2"),
        ("actor_rollout_ref.rollout.name=sglang", "no SGLang engine"),
        ("actor_rollout_ref.rollout.mode=sync", "always asynchronous"),
        ("critic.model.lora_rank=32", "Only the policy has adapters"),
        ("actor_rollout_ref.model.lora.rank=32", "Megatron's adapters"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size=32", "actor.ppo_max_token_len_per_gpu"),
        ("trainer.v1.trainer_mode=colocate_async", "devices of its own"),
        ("custom_reward_function.path=/abs/score.txt", "package.module:function"),
        ("reward_model.enable=True", "reward function"),
        ("data.max_length=5", "fine-tuning"),
        ("hydra.run.dir=x", "no Hydra"),
        ("actor@actor_rollout_ref.actor=dp_actor", "no Hydra"),
    ],
)
def test_values_that_cannot_be_spelled_are_refused(word: str, why: str) -> None:
    assert why in problem("actor_rollout_ref.rollout.n=4", word)


def test_words_of_verl_are_understood_in_keys_that_are_spelled_alike() -> None:
    old = text(
        "actor_rollout_ref: {rollout: {n: 4}}\nalgorithm: {kl_penalty: kl, rollout_correction: {rollout_is: null}}"
    )
    translation = legacy.translate([old, words("algorithm.kl_penalty=mse")])
    assert values(translation, 0)["algorithm.kl_penalty"] == "k1"
    assert values(translation, 0)["algorithm.rollout_correction.rollout_is"] == "none"
    assert values(translation, 1) == {"algorithm.kl_penalty": "k2"}


def test_our_own_layers_keep_values_that_mean_something_else_in_verl() -> None:
    ours = text("algorithm: {rollout_correction: {rollout_is: null}}")
    translation = legacy.translate([ours, words("actor_rollout_ref.rollout.n=4")])
    assert values(translation, 0) == {"algorithm.rollout_correction.rollout_is": None}


def test_bounds_in_one_string_become_two_keys() -> None:
    found = mapped("actor_rollout_ref.rollout.n=2", "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0")
    assert found["algorithm.rollout_correction.rollout_rs_threshold"] == 2.0
    assert found["algorithm.rollout_correction.rollout_rs_threshold_lower"] == 0.5


def test_a_micro_batch_of_sequences_becomes_a_token_budget() -> None:
    found = mapped(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "data.max_prompt_length=100",
        "data.max_response_length=200",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9",
    )
    assert found["actor.ppo_max_token_len_per_gpu"] == 4 * 300


def test_with_dynamic_batches_the_token_budget_counts() -> None:
    found = mapped(
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000",
    )
    assert found == {"actor.ppo_max_token_len_per_gpu": 9000}


def test_a_sharded_section_gets_its_class() -> None:
    found = mapped("actor_rollout_ref.actor.fsdp_config.param_offload=True", "critic.fsdp.fsdp_size=2")
    assert found["actor._target_"] == "treadle.config.FSDPActorConfig"
    assert found["critic._target_"] == "treadle.config.FSDPCriticConfig"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("actor_rollout_ref.actor._target_=verl.workers.config.FSDPActorConfig", {"actor._target_": "FSDPActorConfig"}),
        ("actor_rollout_ref.ref._target_=verl.workers.config.FSDPActorConfig", {"ref._target_": "FSDPRefConfig"}),
        ("actor_rollout_ref.actor.strategy=fsdp2", {"actor._target_": "FSDPActorConfig"}),
        ("actor._target_=verl.workers.config.FSDPActorConfig", {"actor._target_": "FSDPActorConfig"}),
        ("rollout._target_=verl.workers.config.RolloutConfig", {}),
        ("actor_rollout_ref.rollout.agent._target_=verl.workers.config.AgentLoopConfig", {}),
    ],
)
def test_classes_of_verl_are_replaced_by_ours(word: str, expected: dict[str, str]) -> None:
    assert mapped(word) == {key: f"treadle.config.{name}" for key, name in expected.items()}


def test_our_own_class_stays_beside_old_keys() -> None:
    found = mapped("actor_rollout_ref.rollout.n=2", "critic._target_=treadle.config.FSDPCriticConfig")
    assert found["critic._target_"] == "treadle.config.FSDPCriticConfig"


def test_arguments_for_ray_choose_ray() -> None:
    assert mapped("ray_kwargs.ray_init.num_cpus=8") == {"cluster.ray_init.num_cpus": 8, "cluster.backend": "ray"}


def test_a_value_that_is_not_given_is_not_written() -> None:
    assert mapped("actor_rollout_ref.rollout.name=???", "actor_rollout_ref.rollout.n=2") == {"rollout.n": 2}


def test_a_reference_to_a_key_that_is_given_becomes_a_reference_to_the_new_key() -> None:
    found = mapped(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}",
    )
    assert found["ref.log_prob_max_token_len_per_gpu"] == "${actor.ppo_max_token_len_per_gpu}"


def test_references_inside_text_are_translated_one_by_one() -> None:
    found = mapped(
        "trainer.project_name=p", "trainer.default_local_dir=out/${trainer.project_name}/${trainer.experiment_name}"
    )
    # the second key is not given, so what verl assumes for it is written
    assert found["logging.run_dir"] == "out/${logging.project_name}/gsm8k"


def test_a_copy_of_the_same_key_is_not_written_twice() -> None:
    old = text(
        "data: {max_prompt_length: 64}\nactor_rollout_ref: {rollout: {prompt_length: '${data.max_prompt_length}'}}"
    )
    assert values(legacy.translate([old])) == {"rollout.prompt_length": 64}


def test_a_selection_takes_what_is_given_or_else_its_fallback() -> None:
    key, source = (
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )
    assert mapped(f"{key}=${{oc.select:{source},4096}}") == {"ref.log_prob_max_token_len_per_gpu": 4096}
    assert mapped(f"{key}=${{oc.select:{source},16384}}") == {}, "our default needs no saying"
    found = mapped(f"{key}=${{oc.select:{source},4096}}", f"{source}=7")
    assert found["ref.log_prob_max_token_len_per_gpu"] == "${actor.ppo_max_token_len_per_gpu}"


def test_selections_and_siblings_nest() -> None:
    old = text(
        "critic:\n"
        "  ppo_max_token_len_per_gpu: 5000\n"
        "  forward_max_token_len_per_gpu: ${.ppo_max_token_len_per_gpu}\n"
        "  loss_agg_mode: ${oc.select:a.b,${oc.select:c.d,seq-mean-token-sum}}\n"
    )
    assert values(legacy.translate([old])) == {
        "critic.ppo_max_token_len_per_gpu": 5000,
        "critic.loss_agg_mode": "seq-mean-token-sum",
    }


def test_a_reference_to_a_converted_key_takes_the_converted_value() -> None:
    found = mapped(
        "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=${actor_rollout_ref.actor.strategy}"
    )
    assert found["ref._target_"] == "treadle.config.FSDPRefConfig"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${oc.env:HOME}", "environment"),
        ("${now:%Y}", "resolver now"),
        ("${nobody.knows}", "not given"),
        ("${trainer.default_local_dir}", "refers to itself"),
        ("${trainer.project_name", "not closed"),
    ],
)
def test_interpolations_that_have_no_value_are_refused(value: str, why: str) -> None:
    assert why in problem(f"trainer.default_local_dir={value}")


def test_the_asynchronous_recipe_is_recognised_by_its_section() -> None:
    old = text(
        "async_training: {staleness_threshold: 0.1, require_batches: 2, partial_rollout: false}\n"
        "rollout: {n: 4, nnodes: 1, n_gpus_per_node: 2, total_rollout_steps: 6400}\n"
        "data: {train_batch_size: 0}\n"
        "actor_rollout_ref: {rollout: {n: 16}, actor: {ppo_mini_batch_size: 32}}\n"
    )
    translation = legacy.translate([old])
    assert translation.mistakes == ()
    assert values(translation) == {
        "trainer.max_staleness": 4,
        "data.train_batch_size": 64,
        "trainer.on_weight_update": "drop",
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 2,
        "trainer.total_training_steps": 100,
        "rollout.n": 16,
        "actor.ppo_mini_batch_size": 32,
        "trainer.mode": "fully_async",
    }


def test_the_loader_takes_old_keys_with_a_warning_and_remembers_them() -> None:
    yaml = (
        "actor_rollout_ref: {model: {path: m}, rollout: {n: 4}}\ndata: {train_files: a.jsonl}\ntrainer: {nnodes: 1}\n"
    )
    with pytest.warns(LegacyKeyWarning, match="actor_rollout_ref") as caught:
        config = loads(yaml, "old.yaml", ["actor_rollout_ref.rollout.n=8", "reward.functions.answer.path=exact_match"])
    assert config.rollout.n == 8
    assert "legacy key actor_rollout_ref.rollout.n" in str(config.origin("rollout.n"))
    assert len(caught) == 2
