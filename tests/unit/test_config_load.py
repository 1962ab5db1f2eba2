"""Loading: defaults, then files left to right, then `key=value` words; references resolved once."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import ROLLOUT, mistake, mistakes, rollout_config, training_config
from treadle.config import Config, FSDPActorConfig, ModelConfig, TrainConfig, load, loads, to_yaml
from treadle.config.explain import explain
from treadle.config.load import recipe_names
from treadle.config.section import Leaf, Origin
from treadle.config.show import flatten
from treadle.config.tree import leaves_of, merge
from treadle.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_then_files_left_to_right_then_words(tmp_path):
    first = write(tmp_path / "a.yaml", "model: {path: a}\nrollout: {n: 2, seed: 7, top_k: 5}\n")
    second = write(tmp_path / "b.yaml", "rollout: {n: 3, seed: 8}\n")
    config = load([first, second], ["rollout.n=4"])
    assert (config.rollout.n, config.rollout.seed, config.rollout.top_k) == (4, 8, 5)
    assert config.rollout.temperature == 1.0
    assert config.model.path == "a"


def test_one_file_needs_no_list_and_one_word_neither(tmp_path):
    path = write(tmp_path / "a.yaml", ROLLOUT)
    assert load(path, "rollout.n=3").rollout.n == 3
    assert load(str(path)).rollout.n == 1


def test_a_recipe_loads_by_name_and_a_file_of_that_name_wins(tmp_path, monkeypatch):
    assert isinstance(load("calculator"), TrainConfig)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calculator").mkdir()
    assert isinstance(load("calculator"), TrainConfig), "a directory is no config"
    (tmp_path / "calculator").rmdir()
    write(tmp_path / "calculator", ROLLOUT)
    assert load("calculator").model.path == "somewhere"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name):
    load(name)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("rollout.n=3", 3),
        ("rollout.temperature=1", 1.0),
        ("rollout.temperature=1e-4", 1e-4),
        ("rollout.temperature=.5", 0.5),
        ("rollout.max_num_seqs=1_000", 1000),
        ("rollout.n=010", 10),
        ("rollout.n=0x10", 16),
        ("rollout.ignore_eos=true", True),
        ("rollout.max_model_len=null", None),
        ("rollout.max_model_len=~", None),
        ("data.train_files=[a.jsonl, b.jsonl]", ("a.jsonl", "b.jsonl")),
        ("data.train_files=a.jsonl", ("a.jsonl",)),
        ("data.train_files=[]", ()),
        ("rollout.engine_kwargs={vllm: {a: [1, {b: null}]}}", {"vllm": {"a": (1, {"b": None})}}),
        ("model.path=a b=c=d", "a b=c=d"),
        ("model.path= spaces ", " spaces "),
        ("model.path=", ""),
        ("model.path='quoted # no comment'", "quoted # no comment"),
        ("model.path=plain # no comment", "plain # no comment"),
        ("model.path=yes", "yes"),
        ("model.path=007", "007"),
        ("model.path=1e-4", "1e-4"),
        ("model.path=true", "true"),
        ("model.path=2020-01-01", "2020-01-01"),
        ("model.path=ünïcödé/模型", "ünïcödé/模型"),
        ("model.path=line\nbreak", "line\nbreak"),
    ],
)
def test_words_give_numbers_booleans_null_lists_maps_and_strings(word, value):
    key = word.partition("=")[0]
    assert flatten(rollout_config(word))[key] == value


def test_strings_keep_their_digits_in_lists_and_maps_too():
    config = rollout_config(
        "rollout.multi_turn.mcp_servers.files.command=[serve, --port, 08000, --debug, true]",
        "rollout.multi_turn.mcp_servers.files.env={PORT: 08000}",
    )
    server = config.rollout.multi_turn.mcp_servers["files"]
    assert server.command == ("serve", "--port", "08000", "--debug", "true")
    assert server.env == {"PORT": "08000"}


def test_a_later_word_wins_over_an_earlier_one():
    assert rollout_config("rollout.n=2", "rollout.n=3").rollout.n == 3
    assert rollout_config(
        "rollout.openai.extra_body.a=1", "rollout.openai.extra_body={b: 2}"
    ).rollout.openai.extra_body == {
        "a": 1,
        "b": 2,
    }
    assert rollout_config(
        "rollout.openai.extra_body.a=1", "rollout.openai.extra_body.a.b=2"
    ).rollout.openai.extra_body == {"a": {"b": 2}}


def test_maps_merge_by_key_and_lists_are_replaced():
    base = "model: {path: x}\nrollout: {openai: {extra_body: {a: {x: 1}, b: [1, 2]}}}\n"
    config = loads(base, overrides=["rollout.openai.extra_body={a: {y: 2}, b: [3]}"])
    assert config.rollout.openai.extra_body == {"a": {"x": 1, "y": 2}, "b": (3,)}


def test_an_empty_map_empties_a_map():
    base = "model: {path: x}\nrollout: {openai: {extra_body: {a: 1}}}\nreward: {functions: {f: {path: math}}}\n"
    assert loads(base, overrides=["rollout.openai.extra_body={}"]).rollout.openai.extra_body == {}
    assert loads(base, overrides=["reward.functions={}"]).reward.functions == {}
    assert loads(base, overrides=["reward.functions={}", "reward.functions.g.path=math"]).reward.functions.keys() == {
        "g"
    }


def test_an_empty_section_says_nothing_but_that_it_is_there():
    assert isinstance(loads("model: {path: x}\ndata:\nrollout: {}\n"), Config)
    words = ("data.train_files=a", "rollout.n=2", "reward.functions.answer.path=exact_match")
    assert isinstance(rollout_config("trainer={}", *words), TrainConfig)
    assert isinstance(rollout_config("trainer=null", *words), TrainConfig)


def test_emptying_a_section_from_the_command_line_is_refused_where_it_would_do_nothing():
    found = mistake("rollout={}", text="model: {path: x}\nrollout: {n: 2}\n")
    assert (found.key, found.fix) == ("rollout", "write ~rollout to take back what was said before")


def test_a_tilde_takes_back_what_files_say():
    text = "model: {path: x}\nrollout: {n: 2, limits: {stall_report_s: 5}}\ntrainer: {}\n"
    assert rollout_config("~rollout.n", "~trainer", text=text).rollout.n == 1
    config = rollout_config("~rollout", "~trainer", text=text)
    assert config.rollout.limits.stall_report_s == 60
    assert not isinstance(config, TrainConfig)
    assert rollout_config("~trainer", "~rollout.n", "+rollout.n=4", "++rollout.seed=1", text=text).rollout.n == 4


def test_a_tilde_needs_something_to_take_back():
    assert "cannot be taken back" in mistake("~rollout.n").problem
    assert mistake("~rollout.n=4").fix == "write ~rollout.n"


def test_a_stand_alone_rollout_has_no_training_sections():
    config = rollout_config()
    assert type(config) is Config
    for name in ("trainer", "actor", "ref", "critic", "algorithm", "checkpoint"):
        assert not hasattr(config, name)


def test_a_training_section_without_a_trainer_is_refused_once_with_the_way_out():
    found = mistake("actor.optim.lr=1", "actor.ppo_epochs=2")
    assert found.key == "actor"
    assert "no trainer section" in found.problem
    assert "trainer: {}" in found.fix


def test_target_picks_a_variant_and_its_own_keys_and_defaults():
    config = training_config("actor._target_=treadle.config.FSDPActorConfig", "actor.fsdp_config.fsdp_size=1")
    assert type(config.actor) is FSDPActorConfig
    assert config.actor.fsdp_config.fsdp_size == 1
    same = training_config("actor._target_=treadle.config.training.FSDPActorConfig")
    assert type(same.actor) is FSDPActorConfig


def test_a_class_of_ones_own_can_be_named_once_it_is_imported():
    class QuantisedModel(ModelConfig):
        """A model with fewer bits."""

    name = f"{QuantisedModel.__module__}.{QuantisedModel.__qualname__}"
    config = rollout_config(f"model._target_={name}")
    assert type(config.model) is QuantisedModel
    assert type(loads(to_yaml(config)).model) is QuantisedModel


def test_yaml_means_what_version_1_2_says():
    text = "model: {path: no}\nlogging: {experiment_name: on, project_name: 1:30}\nrollout: {temperature: 1e-1}\n"
    config = loads(text)
    assert (config.model.path, config.logging.experiment_name, config.logging.project_name) == ("no", "on", "1:30")
    assert config.rollout.temperature == 0.1


def test_anchors_and_aliases_work():
    text = "model: {path: x}\nreward:\n  functions:\n    a: &f {path: math, weight: 2}\n    b: *f\n"
    functions = loads(text).reward.functions
    assert functions["a"] == functions["b"]


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: {path: x}\r\nrollout:\r\n  n: 3\r\n")
    config = load(path)
    assert config.rollout.n == 3
    assert str(config.origin("rollout.n")) == f"{path}:3"


def test_a_reference_takes_value_and_type():
    config = rollout_config("rollout.seed=7", "data.seed=${rollout.seed}", "rollout.val_kwargs.n=${data.seed}")
    assert config.data.seed == config.rollout.val_kwargs.n == 7


def test_a_reference_reaches_defaults_lists_maps_and_sections_in_maps():
    config = rollout_config(
        "rollout.max_num_seqs=${rollout.max_num_batched_tokens}",
        "data.train_files=[a, b]",
        "data.val_files=${data.train_files}",
        "rollout.engine_kwargs={vllm: {b: 1}}",
        "rollout.openai.extra_body=${rollout.engine_kwargs}",
        "reward.functions.f.path=math",
        "reward.functions.g.path=${reward.functions.f.path}",
    )
    assert config.rollout.max_num_seqs == 8192
    assert config.data.val_files == ("a", "b")
    assert config.rollout.openai.extra_body == {"vllm": {"b": 1}}
    assert config.reward.functions["g"].path == "math"


def test_a_reference_inside_text_takes_the_text():
    config = rollout_config(
        "rollout.temperature=0.70",
        "logging.experiment_name=t${rollout.temperature}-n${rollout.n}-${data.shuffle}",
        "data.train_files=['${model.path}/a', '${model.path}']",
    )
    assert config.logging.experiment_name == "t0.70-n1-true"
    assert config.data.train_files == ("somewhere/a", "somewhere")


def test_a_string_key_takes_a_number_by_reference_from_a_file_or_a_default_alike():
    assert rollout_config("logging.experiment_name=${rollout.n}").logging.experiment_name == "1"
    assert rollout_config("rollout.n=02", "logging.experiment_name=${rollout.n}").logging.experiment_name == "02"


def test_a_doubled_dollar_is_no_reference():
    config = rollout_config("model.path=$${HOME}/model", "logging.experiment_name=${model.path}")
    assert config.model.path == "${HOME}/model"
    assert config.logging.experiment_name == "${HOME}/model"
    assert str(config.origin("model.path")) == "command line (model.path=$${HOME}/model)"


@pytest.mark.parametrize(
    ("words", "circle"),
    [
        (["rollout.n=${rollout.n}"], "rollout.n → rollout.n"),
        (["rollout.n=${rollout.seed}", "rollout.seed=${rollout.n}"], "rollout.n → rollout.seed → rollout.n"),
        (
            ["rollout.n=${data.seed}", "rollout.seed=${rollout.n}", "data.seed=${rollout.seed}"],
            "data.seed → rollout.seed → rollout.n → data.seed",
        ),
        (
            ["rollout.openai.extra_body.a=${rollout.openai.extra_body}"],
            "rollout.openai.extra_body.a → rollout.openai.extra_body.a",
        ),
    ],
)
def test_a_circle_of_references_is_one_mistake_that_draws_it(words, circle):
    assert mistake(*words).problem == f"refers to itself: {circle}"


@pytest.mark.parametrize(
    ("word", "problem", "fix"),
    [
        ("rollout.n=${rollout}", "${rollout} is a whole section", "refer to one of its keys"),
        ("rollout.n=${rollout.nn}", "${rollout.nn} is no key with a value", "did you mean 'rollout.n'?"),
        ("rollout.n=${data.train_files.0}", "${data.train_files.0} is no key with a value", None),
        ("rollout.n=${oc.env:N}", "${oc.env:N}: only ${section.key} is understood", "give rollout.n=… on"),
        ("model.path=${}", "${} is no key with a value", "write $${…} for text"),
        ("model.path=a${rollout.max_model_len}", "${rollout.max_model_len} is null", None),
        ("model.path=a${data.train_files}", "${data.train_files} is list ()", None),
    ],
)
def test_a_reference_to_nothing_says_why(word, problem, fix):
    found = mistake(word)
    assert found.problem.startswith(problem)
    assert fix is None or fix in found.fix


def test_a_reference_that_leads_to_a_mistake_does_not_repeat_it():
    assert [item.key for item in mistakes("rollout.n=${rollout.seed}", "rollout.seed=${nowhere}")] == ["rollout.seed"]


LEAVES = sorted(key for key, value in flatten(rollout_config()).items() if key != "model.path")
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)
SCALARS = st.one_of(
    st.integers(-3, 9).map(str),
    st.floats(allow_nan=True).map(str),
    st.sampled_from(
        ["true", "null", "yes", "[]", "{}", "[a, 1]", "{a: 1}", "${rollout.n}", "${", "'", '"a"', "~", "="]
    ),
    TEXT,
)
KEYS = st.one_of(
    st.sampled_from(LEAVES),
    st.sampled_from(["rollout", "model", "trainer", "reward.functions", "reward.functions.f.path", "rollout._target_"]),
    TEXT,
)


@settings(deadline=None)
@given(KEYS, SCALARS)
def test_any_word_sets_exactly_the_leaf_it_names_or_is_an_error(key, value):
    word = f"{key}={value}"
    before = flatten(rollout_config())
    try:
        config = rollout_config(word)
    except ConfigError:
        return
    name = key.lstrip("+")
    after = flatten(config)
    for other in before.keys() | after.keys():
        if other == name or other.startswith(f"{name}."):
            continue
        assert after.get(other, "gone") == before.get(other, "gone"), f"{word!r} changed {other}"
        assert word not in str(config.origin(other))
    if name in after and not (isinstance(after[name], dict) and after[name]):
        assert config.origin(name).source == "command line"
        assert config.origin(name).place == word


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["rollout.n", "rollout.seed", "data.seed"]), st.integers(1, 9)), max_size=6))
def test_the_last_word_for_a_key_is_the_one_that_counts(pairs):
    config = rollout_config(*(f"{key}={value}" for key, value in pairs))
    for key, value in dict(pairs).items():
        assert flatten(config)[key] == value


PATHS = st.sampled_from([("a",), ("b", "c"), ("b", "d"), ("e", "f", "g"), ("e", "f", "h")])
LAYERS = st.dictionaries(PATHS, st.integers(), max_size=4)


def layer(values, name):
    return {path: Leaf(value, Origin.file(name, 1)) for path, value in values.items()}


def laid(*layers):
    merged = merge(layers, lambda path: False, [])
    return {path: (leaf.value, leaf.origin.place) for path, leaf in leaves_of(merged.tree)}


def flat(*layers):
    return dict(leaves_of(merge(layers, lambda path: False, []).tree))


@settings(deadline=None)
@given(LAYERS, LAYERS, LAYERS)
def test_merging_is_associative_and_the_last_writer_wins(a, b, c):
    first, second, third = layer(a, "a"), layer(b, "b"), layer(c, "c")
    whole = laid(first, second, third)
    assert whole == laid(flat(first, second), third)
    assert whole == laid(first, flat(second, third))
    for path, leaf in third.items():
        assert whole[path] == (leaf.value, "c:1")


@settings(deadline=None)
@given(st.integers(0, 2**40), st.permutations(["rollout.seed", "data.seed", "actor.data_loader_seed"]))
def test_a_chain_of_references_ends_in_the_value_at_its_end(value, chain):
    last, middle, first = chain
    config = training_config(f"{first}=${{{middle}}}", f"{last}={value}", f"{middle}=${{{last}}}")
    assert flatten(config)[first] == flatten(config)[middle] == value
    assert str(config.origin(first)).endswith(f"reference ${{{middle}}}")


def test_a_large_file_loads_in_reasonable_time(tmp_path):
    body = "\n".join(f"    k{at}: {at}" for at in range(5_000))
    config = load(write(tmp_path / "big.yaml", f"model: {{path: x}}\nrollout:\n  openai:\n   extra_body:\n{body}\n"))
    assert len(config.rollout.openai.extra_body) == 5_000


def test_what_other_yaml_readers_see_is_what_we_see():
    """A resolved config is plain YAML: other tools read the same numbers and names."""
    config = load("calculator")
    other = yaml.safe_load(to_yaml(config))
    assert other["rollout"]["n"] == config.rollout.n
    assert json.loads(json.dumps(other["data"]["train_files"])) == list(config.data.train_files)
    assert explain(config, "rollout.n").value == other["rollout"]["n"]
