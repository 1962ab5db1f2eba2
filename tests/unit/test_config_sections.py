"""Sections: frozen, typed, described, comparable, and the same in another process."""

import copy
import multiprocessing
import pickle
from collections.abc import Mapping
from typing import ClassVar

import pytest

from tests.configs import rollout_config, training_config
from treadle.config import (
    ActorConfig,
    FSDPActorConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    Section,
    Source,
    key,
    load,
    loads,
)
from treadle.config.rollout import OpenAIConfig
from treadle.config.section import fields_of, types_of
from treadle.config.tree import subclasses
from treadle.config.validate import check_value
from treadle.errors import ConfigError

OURS = [cls for cls in subclasses(Section)[1:] if cls.__module__.startswith("treadle.config.")]
KEYS = [(cls, name) for cls in OURS for name in fields_of(cls)]


def test_every_key_has_a_one_line_description_and_a_default_that_passes_its_own_check():
    assert len(KEYS) > 300
    offenders = []
    for cls, name in KEYS:
        item, where = fields_of(cls)[name], f"{cls.__name__}.{name}"
        if not item.description or "\n" in item.description or item.description.endswith("."):
            offenders.append(f"{where}: its description is {item.description!r}")
        if not item.required:
            checked = check_value(item.default, types_of(cls)[name], item.bounds)
            if (checked.problem, checked.value, type(checked.value)) != (None, item.default, type(item.default)):
                offenders.append(f"{where}: its default {item.default!r} is checked as {checked}")
    assert offenders == []


def test_every_section_says_what_it_is():
    assert [cls.__name__ for cls in OURS if not (cls.__doc__ or "").partition("\n")[0].endswith(".")] == []


def test_nothing_can_be_changed():
    config = load("calculator", ["rollout.openai.extra_body={a: {b: [1]}}", "reward.functions.g.path=math"])
    with pytest.raises(AttributeError, match=r"cannot set RolloutConfig\.n"):
        config.rollout.n = 5
    with pytest.raises(AttributeError, match="cannot set"):
        config.rollout.new = 5
    with pytest.raises(AttributeError, match="cannot delete"):
        del config.rollout.n
    with pytest.raises(AttributeError, match="cannot set"):
        config.rollout = RolloutConfig()
    with pytest.raises(AttributeError):
        config.data.train_files.append("more")
    for values in (config.rollout.openai.extra_body, config.rollout.openai.extra_body["a"], config.reward.functions):
        for change in (
            lambda values=values: values.update(a=1),
            lambda values=values: values.pop("a", None),
            lambda values=values: values.clear(),
            lambda values=values: values.setdefault("z", 1),
            lambda values=values: values.__setitem__("a", 1),
            lambda values=values: values.__delitem__("a"),
            lambda values=values: values.__ior__({"a": 1}),
            lambda values=values: values.popitem(),
        ):
            with pytest.raises(TypeError, match="config does not change"):
                change()
    assert config.rollout.openai.extra_body == {"a": {"b": (1,)}}


def test_what_a_caller_passed_cannot_change_a_section_afterwards():
    options = {"a": [1]}
    section = RolloutConfig(openai=OpenAIConfig(extra_body=options))
    options["a"].append(2)
    options["b"] = 3
    assert section.openai.extra_body == {"a": (1,)}


def test_sections_are_equal_by_class_and_value_not_by_origin():
    assert rollout_config("rollout.n=1") == rollout_config()
    assert hash(rollout_config("rollout.n=1")) == hash(rollout_config())
    assert rollout_config("rollout.n=2") != rollout_config()
    assert ActorConfig() != FSDPActorConfig()
    assert RolloutConfig() != "RolloutConfig()"
    assert len({training_config(), training_config(), rollout_config()}) == 2
    assert hash(RolloutConfig(openai=OpenAIConfig(extra_body={"a": {"b": [1, {"c": 2}]}}))) == hash(
        RolloutConfig(openai=OpenAIConfig(extra_body={"a": {"b": (1, {"c": 2})}}))
    )


def test_a_section_prints_its_values():
    assert repr(OptimConfig(lr=1)).startswith("OptimConfig(lr=1.0, betas=(0.9, 0.999)")


def test_a_section_is_built_by_keyword_and_checked():
    assert RolloutConfig(n=2, temperature=1).temperature == 1.0
    assert LoggingConfig(logger="wandb").logger == ("wandb",)
    with pytest.raises(ConfigError, match=r"ModelConfig\.path: is required"):
        ModelConfig()
    with pytest.raises(ConfigError, match="must be a section"):
        RolloutConfig(limits={"stall_report_s": 5})
    with pytest.raises(ConfigError, match="must be a section"):
        RolloutConfig(limits=RolloutConfig())
    with pytest.raises(TypeError):
        RolloutConfig(2)


def report(config: Section) -> tuple[int, str, str, list[str], str, int]:
    """What another process sees of a config."""
    assert config.rollout.n == 4
    trace = config.trace("rollout.n")
    with pytest.raises(AttributeError):
        config.rollout.n = 5
    return (
        config.rollout.sequence_length(),
        str(config.origin("rollout.n")),
        str(config.origin("rollout.seed")),
        [str(leaf.value) for leaf in trace.overrode],
        config.logging.directory(),
        hash(config.origin("rollout.n")) and 1,
    )


def test_another_process_sees_the_same_values_methods_and_origins():
    config = loads(
        "model: {path: x}\nrollout: {n: 2}\n", "my.yaml", ["rollout.n=4", "rollout.openai.extra_body={a: [1]}"]
    )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seen = pool.apply(report, (config,))
    assert seen == report(config)
    assert seen[1] == "command line (rollout.n=4)"
    assert seen[3] == ["2"]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_config_is_the_same_config(protocol):
    config = load(
        "calculator", ["rollout.n=4", "~rollout.prompt_length", "actor._target_=treadle.config.FSDPActorConfig"]
    )
    again = pickle.loads(pickle.dumps(config, protocol))
    assert again == config
    assert type(again.actor) is FSDPActorConfig
    assert again.trace("rollout.n") == config.trace("rollout.n")
    assert (
        again.trace("rollout.prompt_length").overrode[0].value
        is config.trace("rollout.prompt_length").overrode[0].value
    )
    with pytest.raises(TypeError):
        again.rollout.openai.extra_body["a"] = 1


def test_a_copy_is_equal_and_keeps_its_origins():
    config = load("calculator", ["rollout.n=4"])
    for again in (copy.copy(config), copy.deepcopy(config)):
        assert again == config
        assert again.origin("rollout.n").source is Source.COMMAND_LINE


def test_a_subclass_keeps_and_adds_keys():
    class MyRollout(RolloutConfig):
        """A rollout with one key more."""

        shared: ClassVar[int] = 3
        patience: int = key(5, "how often to try", ge=1)
        n: int = key(2, "samples per task", ge=2)

    assert list(fields_of(MyRollout))[: len(fields_of(RolloutConfig))] == list(fields_of(RolloutConfig))
    assert (MyRollout().patience, MyRollout().n, MyRollout().top_k) == (5, 2, -1)
    assert RolloutConfig().n == 1, "the base class keeps its own default"
    with pytest.raises(ConfigError, match="must be ≥ 2"):
        MyRollout(n=1)
    name = f"{MyRollout.__module__}.{MyRollout.__qualname__}"
    config = rollout_config(f"rollout._target_={name}", "rollout.patience=7")
    assert (config.rollout.patience, config.rollout.n) == (7, 2)


def test_two_bases_merge_their_keys():
    class Timed(Section):
        """Has a deadline."""

        timeout_s: float = key(1.0, "deadline", gt=0)

    class TimedModel(ModelConfig, Timed):
        """A model with a deadline."""

    assert TimedModel(path="x").timeout_s == 1.0
    assert set(fields_of(TimedModel)) == {"timeout_s", *fields_of(ModelConfig)}


def test_a_default_map_can_be_overridden_one_value_at_a_time():
    class Tuned(ModelConfig):
        """A model with options of its own."""

        override_config: Mapping[str, object] = key({"a": {"x": 1, "y": 2}, "b": 3}, "options")

    Tuned._types = {**types_of(ModelConfig)}
    name = f"{Tuned.__module__}.{Tuned.__qualname__}"
    config = rollout_config(f"model._target_={name}", "model.override_config.a.x=9")
    assert config.model.override_config == {"a": {"x": 9, "y": 2}, "b": 3}
    assert config.origin("model.override_config.a.y").source is Source.DEFAULT
    assert config.origin("model.override_config.a.x").source is Source.COMMAND_LINE


@pytest.mark.parametrize(
    "body",
    [
        {"__annotations__": {"n": int}, "n": 4},
        {"n": 4},
        {"__annotations__": {"extra": int}, "extra": 4},
        {"__annotations__": {"extra": int}},
    ],
)
def test_what_looks_like_a_key_but_is_none_is_refused(body):
    with pytest.raises(TypeError, match="is not declared as a key"):
        type("Wrong", (RolloutConfig,), body)
