"""Reward models in a config: what clashes is told with its key, all of it, before anything starts."""

import asyncio
from typing import Any

import pytest

from tests.configs import mistake, rollout_config
from treadle.config import JudgeConfig, RewardConfig, legacy
from treadle.config.parse import dotted, read_words
from treadle.config.rollout import FailureConfig
from treadle.errors import ConfigError
from treadle.reward.scorer import Scorer

TEXT = """
model: {path: somewhere}
reward:
  functions: {right: {path: exact_match}}
  classifiers:
    helpful: {path: models/helpful, weight: 0.5}
  judges:
    fair:
      path: models/judge
      prompt: |
        Rate {{ response }}
        from 0 to 10.
      weight: 0.1
"""


def reward_of(*words: str) -> RewardConfig:
    return rollout_config(*words, text=TEXT).reward


def clashes(*words: str) -> list[tuple[str, str]]:
    """What is wrong with these words, if anything is."""
    try:
        reward_of(*words)
    except ConfigError as error:
        return [(found.key, found.problem) for found in error.mistakes]
    return []


def test_every_part_has_its_weight_under_its_own_name():
    assert reward_of().weights() == {"right": 1.0, "helpful": 0.5, "fair": 0.1}
    assert reward_of().judges["fair"].prompt == "Rate {{ response }}\nfrom 0 to 10.\n"


def test_nothing_clashes_as_long_as_nothing_is_wrong():
    assert clashes() == []


@pytest.mark.parametrize(
    ("word", "key", "why"),
    [
        ("reward.classifiers.right.path=x", "classifiers.right.path", "names must differ"),
        ("reward.judges.helpful={path: x, prompt: y}", "judges.helpful.prompt", "names must differ"),
        ("reward.classifiers.helpful.device=gpu", "classifiers.helpful.device", "cuda:N"),
        ("reward.classifiers.helpful.placement=endpoint", "classifiers.helpful.endpoint.base_url", "is needed"),
        ("reward.classifiers.helpful.max_length=99999", "classifiers.helpful.max_num_batched_tokens", "99999"),
        ("reward.judges.fair.path=null", "judges.fair.path", "engine.name: native"),
        ("reward.judges.fair.engine.name=policy", "judges.fair.path", "its own model"),
        ("reward.judges.fair.engine.name=openai", "judges.fair.engine.openai.base_url", "is needed"),
        ("reward.judges.fair.response_length=8192", "judges.fair.response_length", "no room"),
        ("reward.judges.fair={n: 3, temperature: 0}", "judges.fair.n", "every vote is the same"),
        ("reward.judges.fair.bounds=[1, 0]", "judges.fair.bounds", "not below"),
        ("reward.judges.fair={parser: 'a.b:c', words: {x: 1}}", "judges.fair.words", "parser"),
        ("reward.judges.fair.engine={name: scripted, n_gpus: 1}", "judges.fair.engine.n_gpus", "no GPU"),
        ("reward.judges.fair.engine={n_gpus: 3, tensor_model_parallel_size: 2}", "judges.fair.engine.tensor", "divide"),
    ],
)
def test_keys_that_clash_are_named(word, key, why):
    (found,) = clashes(word)
    assert found[0].startswith(f"reward.{key}")
    assert why in found[1]


def test_a_template_argument_that_nobody_would_read_is_a_mistake():
    words = ["reward.judges.fair.apply_chat_template_kwargs.enable_thinking=false"]
    assert clashes(*words) == []
    asked = [*words, "reward.judges.fair.engine={name: openai, openai: {base_url: 'http://x'}}"]
    assert [key for key, _ in clashes(*asked)] == ["reward.judges.fair.apply_chat_template_kwargs"]


def test_every_clash_is_told_with_its_origin():
    with pytest.raises(ConfigError) as caught:
        reward_of("reward.judges.fair.path=null", "reward.classifiers.helpful.device=gpu")
    text = str(caught.value)
    assert "reward.judges.fair.path" in text and "reward.classifiers.helpful.device" in text
    assert "command line (reward.classifiers.helpful.device=gpu)" in text


def test_a_scorer_refuses_a_section_that_nobody_loaded_through_the_rules():
    reward = RewardConfig(judges={"fair": JudgeConfig(prompt="Rate {{ response }}")})
    with pytest.raises(ConfigError, match=r"judges.fair.path"):
        asyncio.run(Scorer.create(reward))


def test_a_wrong_value_is_a_mistake_of_its_key():
    assert mistake("reward.judges.fair.words.yes=high", text=TEXT).key == "reward.judges.fair.words"
    assert "placement" in mistake("reward.classifiers.helpful.placement=ray", text=TEXT).key


def test_a_judges_engine_is_told_what_of_a_rollout_applies_to_it():
    judge = reward_of("reward.judges.fair.engine={dtype: float32, max_model_len: 4096, replicas: 2}").judges["fair"]
    rollout = judge.rollout(FailureConfig(request_retries=7))
    assert (rollout.name, rollout.dtype, rollout.sequence_length()) == ("native", "float32", 4096)
    assert (rollout.replicas_per_node, rollout.failures.request_retries) == (2, 7)
    assert rollout.limits.request_timeout_s == judge.timeout_s


def test_the_variables_that_hold_keys_are_those_of_endpoints_in_use():
    assert reward_of().api_key_variables() == ()
    words = [
        "reward.classifiers.helpful={placement: endpoint, endpoint: {base_url: 'http://x', api_key_env: A}}",
        "reward.judges.fair.engine={name: openai, openai: {base_url: 'http://x', api_key_env: B}}",
    ]
    assert reward_of(*words).api_key_variables() == ("A", "B")


VERL = {
    "reward.reward_model": "model_path",
    "reward_model": "model.path",
}


def mapped(*words: str) -> dict[str, Any]:
    mistakes: list[Any] = []
    translation = legacy.translate([read_words(words, mistakes)])
    assert not mistakes
    assert translation.mistakes == (), translation.mistakes
    return {dotted(path): leaf.value for path, leaf in translation.layers[-1].items()}


def problem(*words: str) -> str:
    mistakes: list[Any] = []
    (found,) = legacy.translate([read_words(words, mistakes)]).mistakes
    return str(found)


@pytest.mark.parametrize(("old", "path"), VERL.items())
def test_verls_reward_model_is_a_classifier_here(old, path):
    words = [f"{old}.enable=True", f"{old}.{path}=rm", f"{old}.rollout.dtype=bfloat16", f"{old}.rollout.name=vllm"]
    words += [f"{old}.enable_resource_pool=False", f"{old}.nnodes=1", f"{old}.rollout.max_model_len=2048"]
    assert mapped(*words) == {
        "reward.classifiers.reward_model.path": "rm",
        "reward.classifiers.reward_model.device": "cuda",
        "reward.classifiers.reward_model.dtype": "bfloat16",
        "reward.classifiers.reward_model.placement": "thread",
        "reward.classifiers.reward_model.max_length": 2048,
    }


@pytest.mark.parametrize(("old", "path"), VERL.items())
def test_what_verl_says_of_a_reward_model_that_is_off_says_nothing(old, path):
    assert mapped(f"{old}.enable=False", f"{old}.{path}=rm", f"{old}.rollout.n=1", f"{old}.n_gpus_per_node=8") == {}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["reward_model.enable=True"], "reward.judges"),
        (["reward_model.enable=True", "reward_model.model.path=x", "reward_model.n_gpus_per_node=8"], "one device"),
        (["reward_model.enable=True", "reward_model.model.path=x", "reward_model.rollout.load_format=d"], "of its own"),
        (
            [
                "reward.reward_model.enable=True",
                "reward.reward_model.model_path=x",
                "reward.custom_reward_function.path=a/b.py",
            ],
            "write a judge",
        ),
    ],
)
def test_what_verls_reward_model_cannot_be_here_says_what_to_write(words, why):
    assert why in problem(*words)
