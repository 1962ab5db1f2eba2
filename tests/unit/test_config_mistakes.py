"""Mistakes: all of them together, each with key, value, origin and the way out; never a traceback, never a guess."""

import json
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import ROLLOUT, TRAINING, mistake, mistakes
from treadle.config import RolloutConfig, load, loads
from treadle.errors import ConfigError


def file_mistake(path) -> tuple[str, str, str | None]:
    with pytest.raises(ConfigError) as caught:
        load(path)
    (only,) = caught.value.mistakes
    return only.key, only.problem, only.fix


def test_every_mistake_of_every_kind_is_in_one_report_in_reading_order():
    """Files from top to bottom, then the command line, then what nobody gave."""
    text = """
rollout:
  temperatur: 1
  n: many
  top_p: 2
  name: vlm
  limits: 5
  max_model_len: 3
"""
    words = ["rollout._target_=os.system", "rollout.seed=${nowhere}", "modl.path=x", "~data.seed"]
    assert [item.key for item in mistakes(*words, text=text)] == [
        "rollout.temperatur",
        "rollout.n",
        "rollout.top_p",
        "rollout.name",
        "rollout.limits",
        "rollout.max_model_len",
        "rollout._target_",
        "rollout.seed",
        "modl.path",
        "data.seed",
        "model.path",
    ]


def test_files_come_in_the_order_they_were_given(tmp_path):
    (tmp_path / "b.yaml").write_text("rollout:\n  x: 1\n  y: 1\n")
    (tmp_path / "a.yaml").write_text("data:\n  z: 1\n")
    with pytest.raises(ConfigError) as caught:
        load([tmp_path / "b.yaml", tmp_path / "a.yaml"])
    keys = [item.key for item in caught.value.mistakes]
    assert keys == ["rollout.x", "rollout.y", "data.z", "model.path"]


def test_a_mistake_shows_key_problem_origin_and_fix():
    assert str(mistake("rollout.name=vlm")) == (
        "rollout.name: must be one of native, vllm, openai, scripted, got string 'vlm'\n"
        "    from command line (rollout.name=vlm)\n"
        "    did you mean 'vllm'?"
    )


@pytest.mark.parametrize(
    ("word", "problem", "fix"),
    [
        ("rollout.n=2.5", "must be a whole number, got number 2.5", None),
        ("rollout.n=true", "must be a whole number, got boolean true", None),
        ("rollout.n=null", "must be a whole number, got null", None),
        ("rollout.n='8'", "must be a whole number, got string '8'", "write 8 without quotes or spaces"),
        ("rollout.n= 8", "must be a whole number, got string ' 8'", "write 8 without quotes or spaces"),
        ("rollout.n=", "must be a whole number, got string ''", None),
        ("rollout.n==3", "must be a whole number, got string '=3'", None),
        ("rollout.n=[1]", "must be a whole number, got list [1]", None),
        ("rollout.n=0", "must be ≥ 1, got whole number 0", None),
        ("rollout.top_p=0", "must be > 0 and ≤ 1, got number 0.0", None),
        ("rollout.max_model_len=0", "must be ≥ 1, got whole number 0 (null is allowed too)", None),
        ("rollout.temperature=.nan", "must be a number, got number nan", None),
        ("rollout.limits.request_timeout_s=.inf", "must be a number, got number inf", None),
        ("rollout.temperature=1" + "0" * 400, "must be a number, got whole number 1000", None),
        ("rollout.n=1" + "0" * 5000, "cannot be read: Exceeds the limit", None),
        ("rollout.ignore_eos=yes", "must be true or false, got string 'yes'", None),
        ("rollout.ignore_eos=1", "must be true or false, got whole number 1", None),
        ("model.path=null", "must be a string, got null", None),
        ("model.path=[a]", "must be a string, got list ['a']", None),
        ("data.train_files={}", "must be a list, each item a string, got map {}", None),
        ("data.train_files=null", "must be a list, each item a string, got null", None),
        ("data.train_files=[a, [b]]", "item 1: must be a string, got list ['b']", None),
        ("rollout.engine_kwargs=5", "must be a map, got whole number 5", None),
        ("reward.functions=null", "must be a map from names to sections", "write {} for none"),
        ("reward.functions=[]", "must be a map from names to sections", "write {} for none"),
        ("reward.functions.f=3", "is a section (RewardFunctionConfig), not a value; got whole number 3", "path"),
        ("rollout=3", "is a section (RolloutConfig), not a value; got whole number 3", "its keys: name, nnodes"),
        ("rollout.multi_turn.format=hermis", "must be one of hermes, ", "did you mean 'hermes'?"),
        (
            "rollout.multi_turn.tools=[calculate]",
            "item 0: must be one of python, bash, edit, submit, or an import path (package.module:name",
            None,
        ),
        ("rollout.multi_turn.environment=a.b.C", "must be an import path (package.module:name or file.py:name)", None),
        ("logging.logger=[console, wandbb]", "item 1: must be one of console, tensorboard", None),
    ],
)
def test_a_wrong_value_says_what_is_allowed(word, problem, fix):
    found = mistake(word)
    assert found.key == word.partition("=")[0]
    assert found.problem.startswith(problem)
    assert str(found.origin).startswith("command line (")
    assert fix is None or fix in found.fix
    assert len(str(found)) < 1500, "a long value is shortened"


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("rollout.temperatur=1", "did you mean 'rollout.temperature'?"),
        ("rolout.n=4", "did you mean 'rollout.n'?"),
        ("röllout.n=4", "did you mean 'rollout.n'?"),
        ("rollout.limit.stall_report_s=4", "did you mean 'rollout.limits.stall_report_s'?"),
        ("rollout.stall_report_s=4", "did you mean 'rollout.limits.stall_report_s'?"),
        ("reward.functions.f.weigth=4", "did you mean 'reward.functions.f.weight'?"),
        ("foo=1", "the sections: model, data, rollout, reward, logging, cluster"),
        ("cluster.zzzzzz=1", "its keys: backend, address, ray_init"),
        ("+rollout.nn=1", "did you mean 'rollout.n'?"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(word, fix):
    found = [item for item in mistakes(word) if "no such key" in item.problem]
    assert [item.fix for item in found] == [fix]
    assert "(given " in found[0].problem


def test_an_unknown_section_is_one_mistake_however_much_it_holds():
    found = mistake(text=ROLLOUT + "rolout: {n: 3, seed: 4, limits: {stall_report_s: 3}}\n")
    assert (found.key, found.fix) == ("rolout", "did you mean 'rollout'?")
    assert str(found.origin) == "base.yaml:2"


def test_a_key_below_a_plain_value_is_unknown():
    assert mistake("rollout.n.x=3").problem == "no such key: rollout.n is a whole number ≥ 1"
    assert [item.key for item in mistakes("model.path.x=3")] == ["model.path.x"]


def test_a_key_of_another_variant_says_which():
    found = mistake("actor.fsdp_config.fsdp_size=2", text=TRAINING)
    assert found.problem.startswith("ActorConfig has no such key; FSDPActorConfig has it")
    assert found.fix == "set actor._target_=treadle.config.FSDPActorConfig"


def test_dots_in_yaml_keys_are_explained():
    assert mistake(text=ROLLOUT + "rollout.limits.stall_report_s: 3\n").fix == (
        "write its parts nested: rollout: {limits: {stall_report_s: …}}"
    )
    assert mistake(text=ROLLOUT + "reward: {functions: {a.b: {path: math}}}\n").problem == "a name may hold no dot"
    keys = [item.key for item in mistakes(text=ROLLOUT + "reward: {functions: {a.b: {}}}\n")]
    assert keys == ["reward.functions.a.b", "reward.functions.a.b.path"]


@pytest.mark.parametrize(
    "word",
    [
        "rollout._target_=os.system",
        "rollout._target_=treadle.config.ActorConfig",
        "rollout._target_=builtins.dict",
        "rollout._target_=${model.path}",
        "rollout._target_=null",
        "rollout._target_=[treadle.config.RolloutConfig]",
        "rollout._target_={a: 1}",
        "rollout._target_=",
        "model._target_=treadle.config.section.Section",
        "rollout.limits._target_=treadle.config.RolloutConfig",
    ],
)
def test_target_names_only_subclasses_of_the_sections_class(word):
    found = mistake(word)
    assert found.key == word.partition("=")[0]
    assert found.problem.startswith("must name a ")
    assert "treadle.config." in found.problem


def test_the_config_as_a_whole_has_no_target():
    assert "only sections have a class" in mistake("_target_=treadle.config.TrainConfig").problem


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("=", "is not a key"),
        ("=3", "is not a key"),
        (".=3", "is not a key"),
        ("rollout.=3", "is not a key"),
        ("rollout..n=3", "is not a key"),
        (" rollout.n =3", "has spaces around its name"),
        ("rollout. n=3", "is not a key"),
        ("~", "is not a key"),
        ("+", "is not key=value"),
        ("rollout.n", "is not key=value"),
        ("", "is not key=value"),
        ("+++rollout.n=3", "no such key"),
        ("rollout.n={a", "broken YAML"),
        ('model.path="a', "broken YAML"),
        ("model.custom_chat_template={% for m in messages %}", "broken YAML"),
        ("model.path=\udcff", "is not UTF-8 text"),
        ("data.train_files=[{a: 1, a: 2}]", "cannot be read: a is given twice"),
        ("rollout.engine_kwargs={a: 1, a: 2}", "given twice"),
        ("rollout.engine_kwargs={<<: {a: 1}}", "a key must be a plain name"),
    ],
)
def test_a_word_that_is_no_override_is_refused(word, problem):
    found = mistake(word)
    assert problem in found.problem


def test_missing_keys_are_asked_for():
    found = mistake(text="")
    assert (found.key, found.fix) == ("model.path", "set model.path in a file or on the command line")
    assert mistake("rollout.agent.loops.mine.kwargs={}").key == "rollout.agent.loops.mine.path"


def test_nothing_is_called_missing_when_a_source_could_not_be_read(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "nowhere.yaml", ["trainer.mode=fully_async"])
    assert len(caught.value.mistakes) == 1


def test_rules_are_asked_about_the_values_that_are_right():
    """A mistake in one value does not hide a clash between others, and makes none up."""
    keys = {item.key for item in mistakes("rollout.top_p=9", "actor.ppo_mini_batch_size=48", text=TRAINING)}
    assert keys == {"rollout.top_p", "actor.ppo_mini_batch_size"}
    keys = {item.key for item in mistakes("data.train_batch_size=lots", "actor.ppo_mini_batch_size=48", text=TRAINING)}
    assert keys == {"data.train_batch_size"}


@pytest.mark.parametrize(
    ("data", "key", "problem"),
    [
        (b"- a\n- b\n", "", "a config file is a map of sections"),
        (b"just text\n", "", "a config file is a map of sections"),
        (b"model:\n\tpath: x\n", ":2", "broken YAML"),
        (b"model: {path: x}\n---\ndata: {}\n", ":2", "broken YAML: expected a single document"),
        (b"model: {path: caf\xe9}\n", ":1", "is not UTF-8 text: byte 0xe9"),
        (b"a: 1\nmodel: {path: \xff\xfe}\n", ":2", "is not UTF-8 text: byte 0xff"),
        (b"\x7fELF\x02\x01\x01\x00", "", "broken YAML"),
        (b"model: {path: [\n", ":1", "broken YAML"),
        (b"model:\n  path: a: b\n", ":2", "broken YAML: mapping values"),
        (b"model: &m {path: x, override_config: {a: *m}}\n", "", "nested more than 64 deep"),
        (b"model: {path: x, override_config: {a: &a [*a]}}\n", "", "nested more than 64 deep"),
        (b"[" * 200_000, "", "nested more than 64 deep"),
        (b"{a: " * 200_000, "", "nested more than 64 deep"),
        (b"a: " + b"x" * 5_000_000, "", "is over 4 MB"),
    ],
)
def test_a_file_that_is_no_config_is_one_mistake(tmp_path, data, key, problem):
    path = tmp_path / "a.yaml"
    path.write_bytes(data)
    found = file_mistake(path)
    assert found[0] == f"{path}{key}"
    assert found[1].startswith(problem)


def test_repeated_aliases_do_not_blow_up(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]" for at in range(1, 10)]
    path = tmp_path / "a.yaml"
    path.write_text("\n".join(lines))
    assert "more than 200,000 values" in file_mistake(path)[1]


def test_tabs_are_named(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("model:\n\tpath: x\n")
    assert file_mistake(path)[2] == "indent with spaces, not tabs"


def test_an_unquoted_reference_in_a_list_is_explained():
    assert "needs quotes" in mistake(text=ROLLOUT + "data: {train_files: [${model.path}]}\n").fix


def test_missing_files_name_what_is_there(tmp_path, monkeypatch):
    (tmp_path / "grpo.yaml").write_text(ROLLOUT)
    assert file_mistake(tmp_path / "gppo.yaml")[2] == f"did you mean '{tmp_path / 'grpo.yaml'}'?"
    monkeypatch.chdir(tmp_path)
    assert file_mistake("calculater")[1:] == ("no such file or recipe", "did you mean 'calculator'?")
    assert file_mistake("zzz")[2].startswith("give a YAML file or a recipe: calculator")
    assert file_mistake(".")[1:] == ("is a directory", "give a file: grpo.yaml")


def test_files_that_cannot_be_opened_say_why(tmp_path):
    assert "too long" in file_mistake("x" * 300)[1]
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert file_mistake(loop)[1]
    if os.getuid():
        closed = tmp_path / "closed.yaml"
        closed.write_text(ROLLOUT)
        closed.chmod(0)
        assert "Permission denied" in file_mistake(closed)[1]


def test_duplicate_keys_name_both_places():
    found = mistakes(text="model: {path: x}\nrollout:\n  n: 1\n  n: 2\nmodel: {path: y}\n")
    assert [(item.key, item.problem, str(item.origin)) for item in found] == [
        ("rollout.n", "given twice, first at base.yaml:3", "base.yaml:4"),
        ("model", "given twice, first at base.yaml:1", "base.yaml:5"),
    ]


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system [ls]", "!!timestamp 2020-01-01", "!!binary aGk=", "!x y"]
)
def test_tags_run_nothing_and_are_refused(tag):
    found = mistake(text=ROLLOUT + f"rollout: {{engine_kwargs: {{a: {tag}}}}}\n")
    assert found.problem.startswith("cannot be read: there is no tag")


def test_a_python_caller_hears_the_class_and_key():
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(n=0, temprature=1)
    assert [item.key for item in caught.value.mistakes] == ["RolloutConfig.temprature", "RolloutConfig.n"]
    assert caught.value.mistakes[0].fix == "did you mean 'temperature'?"
    assert isinstance(caught.value, ValueError)


def test_a_config_error_travels_between_processes():
    with pytest.raises(ConfigError) as caught:
        loads("a: 1\nb: 2\n")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.mistakes == caught.value.mistakes


@settings(deadline=None)
@given(st.text(max_size=60))
def test_no_text_crashes_the_loader(text):
    try:
        loads(text)
    except ConfigError as error:
        assert str(error)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_crash_the_loader(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(data)
    try:
        load(path)
    except ConfigError as error:
        assert str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab.${}~ ", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_", max_size=2), inner, max_size=3),
)
PLACES = ["rollout", "rollout.engine_kwargs", "reward.functions", "reward.functions.f", "rollout.n", "model"]


@settings(deadline=None)
@given(VALUES, st.sampled_from(PLACES))
def test_no_value_anywhere_crashes_the_loader(value, key):
    try:
        loads(ROLLOUT, overrides=[f"{key}={json.dumps(value)}"])
    except ConfigError as error:
        assert str(error)
