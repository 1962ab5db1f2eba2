"""Provenance: every leaf knows where it came from, by which detour, and what it overrode."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import ROLLOUT, rollout_config, training_config
from treadle.config import (
    AgentConfig,
    AgentLoopConfig,
    CriticConfig,
    ModelConfig,
    RolloutConfig,
    Source,
    TrainConfig,
    load,
    loads,
)
from treadle.config.rollout import OpenAIConfig
from treadle.config.section import Origin, Section, Unset, fields_of
from treadle.config.show import flatten


def test_a_default_names_its_class_and_key():
    assert str(rollout_config().origin("rollout.limits.stall_report_s")) == "default (LimitsConfig.stall_report_s)"


def test_a_default_that_another_section_sets_names_that_section():
    config = training_config()
    assert config.critic.optim.lr == 1e-5
    assert str(config.origin("critic.optim.lr")) == "default (CriticConfig.optim.lr)"
    assert str(config.origin("critic.optim.betas")) == "default (OptimConfig.betas)"
    assert str(config.origin("actor.optim.lr")) == "default (OptimConfig.lr)"


def test_a_file_gives_name_and_line(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "# a comment\nmodel:\n  path: x\n\nrollout: {n: 2,\n  seed: 3}\ndata:\n  train_files:\n    - a\n    - b\n"
    )
    config = load(path)
    assert str(config.origin("model.path")) == f"{path}:3"
    assert str(config.origin("rollout.n")) == f"{path}:5"
    assert str(config.origin("rollout.seed")) == f"{path}:6"
    assert str(config.origin("data.train_files")) == f"{path}:8"


def test_a_recipe_is_named_as_one():
    assert str(load("calculator").origin("model.path")).startswith("recipe calculator:")


def test_the_command_line_gives_the_word():
    origin = rollout_config("rollout.n=4").origin("rollout.n")
    assert origin.source is Source.COMMAND_LINE
    assert str(origin) == "command line (rollout.n=4)"


def test_an_origin_is_one_line_whatever_was_typed():
    assert str(rollout_config("model.path=a\nb").origin("model.path")) == r"command line (model.path=a\nb)"
    assert len(str(rollout_config("model.path=" + "x" * 9999).origin("model.path"))) < 200


def test_a_map_on_the_command_line_gives_every_leaf_of_it_that_origin():
    config = rollout_config("rollout={n: 4, limits: {stall_report_s: 5}, openai: {extra_body: {a: {b: 1}}}}")
    for key in ("rollout.n", "rollout.limits.stall_report_s", "rollout.openai.extra_body.a.b"):
        assert config.origin(key).source is Source.COMMAND_LINE
    assert config.origin("rollout.seed").source is Source.DEFAULT


def test_a_reference_is_a_detour_from_where_it_was_written():
    config = rollout_config("data.seed=${rollout.seed}", text=ROLLOUT + "rollout: {seed: 5}\n")
    origin = str(config.origin("data.seed"))
    assert origin == "command line (data.seed=${rollout.seed}), reference ${rollout.seed}"


def test_leaves_of_a_free_form_map_have_origins_of_their_own():
    config = rollout_config(
        "rollout.openai.extra_body.a.y=2", text=ROLLOUT + "rollout: {openai: {extra_body: {a: {x: 1}}}}\n"
    )
    assert str(config.origin("rollout.openai.extra_body.a.x")) == "base.yaml:2"
    assert str(config.origin("rollout.openai.extra_body.a.y")) == "command line (rollout.openai.extra_body.a.y=2)"
    assert str(config.origin("rollout.openai.extra_body.a")) == "base.yaml:2"


def test_sections_in_a_map_have_origins_too():
    text = ROLLOUT + "reward: {functions: {f: {path: math}}}\n"
    config = rollout_config("reward.functions.f.weight=2", text=text)
    assert str(config.origin("reward.functions.f.path")) == "base.yaml:2"
    assert config.origin("reward.functions.f.weight").source is Source.COMMAND_LINE
    assert str(config.origin("reward.functions.f.kwargs")) == "default (RewardFunctionConfig.kwargs)"


def test_the_class_of_a_section_has_an_origin():
    config = training_config("actor._target_=treadle.config.FSDPActorConfig")
    assert config.origin("actor._target_").source is Source.COMMAND_LINE
    assert str(config.origin("ref._target_")) == "default (RefConfig._target_)"


def test_what_was_overridden_is_remembered_newest_first(tmp_path):
    for name, n in (("a", 2), ("b", 3)):
        (tmp_path / name).write_text(f"model: {{path: x}}\nrollout: {{n: {n}}}\n")
    trace = load([tmp_path / "a", tmp_path / "b"], ["rollout.n=4", "rollout.n=5"]).trace("rollout.n")
    assert [leaf.value for leaf in trace.overrode] == [4, 3, 2]
    assert [str(leaf.origin) for leaf in trace.overrode] == [
        "command line (rollout.n=4)",
        f"{tmp_path / 'b'}:2",
        f"{tmp_path / 'a'}:2",
    ]


def test_what_was_taken_back_is_remembered():
    trace = rollout_config("~rollout", text=ROLLOUT + "rollout: {n: 2}\n").trace("rollout.n")
    assert trace.origin.source is Source.DEFAULT
    assert [leaf.value for leaf in trace.overrode] == [Unset.UNSET, 2]
    trace = rollout_config("~rollout", "rollout.n=3", text=ROLLOUT + "rollout: {n: 2}\n").trace("rollout.n")
    assert [leaf.value for leaf in trace.overrode] == [Unset.UNSET, 2]


def test_a_map_that_was_emptied_remembers_what_it_held():
    config = rollout_config(
        "rollout.openai.extra_body={}", text=ROLLOUT + "rollout: {openai: {extra_body: {a: 1, b: 2}}}\n"
    )
    assert [leaf.value for leaf in config.trace("rollout.openai.extra_body").overrode] == [1, 2]


def test_a_value_given_in_code_says_so():
    section = RolloutConfig(
        n=4, agent=AgentConfig(loops={"mine": AgentLoopConfig(path="a:B")}), openai=OpenAIConfig(extra_body={"a": 1})
    )
    assert str(section.origin("n")) == "code (RolloutConfig.n)"
    assert str(section.origin("seed")) == "default (RolloutConfig.seed)"
    assert str(section.origin("agent.loops.mine.path")) == "code (AgentLoopConfig.path)"
    assert str(section.origin("openai.extra_body.a")) == "code (OpenAIConfig.extra_body)"
    assert CriticConfig().origin("optim.lr").source is Source.CODE


@pytest.mark.parametrize("key", ["nothing", "rollout.nothing", "rollout.n.x", "rollout.openai.extra_body.zz"])
def test_a_key_that_is_not_there_has_no_origin(key):
    with pytest.raises(KeyError, match="no key"):
        rollout_config("rollout.openai.extra_body.a=1").origin(key)


@pytest.mark.parametrize("key", ["rollout", "rollout.limits", "reward.functions.f"])
def test_a_section_has_no_origin_its_keys_have(key):
    with pytest.raises(KeyError, match="is a section"):
        rollout_config("reward.functions.f.path=math").origin(key)


def every_section(section: Section):
    yield section
    for value in section.values().values():
        for inner in [value] if isinstance(value, Section) else value.values() if isinstance(value, dict) else ():
            if isinstance(inner, Section):
                yield from every_section(inner)


def test_every_leaf_of_a_loaded_config_has_an_origin():
    config = load("calculator", ["actor._target_=treadle.config.FSDPActorConfig"])
    for key in flatten(config):
        assert config.origin(key).source in (Source.DEFAULT, Source.FILE, Source.COMMAND_LINE)
    for section in every_section(config):
        for name in fields_of(type(section)):
            if name in section._traces:
                assert section.origin(name) is section._traces[name].origin


KEYS = ["rollout.n", "rollout.seed", "data.seed", "rollout.limits.stall_report_s", "logging.experiment_name"]


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), st.integers(1, 99)),
    st.dictionaries(st.sampled_from(KEYS), st.integers(1, 99)),
)
def test_an_origin_always_names_the_last_one_who_spoke(in_file, in_words):
    tree: dict[str, dict] = {}
    for key, value in in_file.items():
        node = tree
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    text = ROLLOUT + "".join(f"{name}: {below}\n" for name, below in tree.items())
    config = loads(text, "f", [f"{key}={value}" for key, value in in_words.items()])
    for key in KEYS:
        expected = Source.COMMAND_LINE if key in in_words else Source.FILE if key in in_file else Source.DEFAULT
        assert config.origin(key).source is expected
        history = [leaf.value for leaf in config.trace(key).overrode]
        assert history == ([in_file[key]] if key in in_words and key in in_file else [])


def test_a_training_run_built_in_code_has_origins_all_the_way_down():
    config = TrainConfig(model=ModelConfig(path="x"))
    assert config.origin("model.path").source is Source.CODE
    assert config.origin("actor.optim.lr").source is Source.DEFAULT


def test_a_value_that_is_replaced_has_its_own_origin_and_the_others_keep_theirs():
    config = loads("model: {path: somewhere}\nrollout: {n: 4, gateway: {host: here}}\n", "base.yaml")
    origin = Origin(Source.CODE, "a test")
    changed = config.replaced("rollout.gateway.port", 8000, origin)
    assert (changed.rollout.gateway.port, changed.rollout.gateway.host, changed.rollout.n) == (8000, "here", 4)
    assert changed.origin("rollout.gateway.port") == origin
    assert changed.origin("rollout.gateway.host") == config.origin("rollout.gateway.host")
    assert changed.origin("rollout.n") == config.origin("rollout.n")
    assert config.rollout.gateway.port == 0, "a config does not change"
