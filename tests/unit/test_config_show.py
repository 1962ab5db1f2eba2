"""A config as YAML, explained and compared; secrets are written nowhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import ROLLOUT, rollout_config, training_config
from treadle.config import AgentLoopConfig, ModelConfig, RolloutConfig, diff, explain, load, loads, to_yaml
from treadle.config.explain import Explanation, SectionOverview
from treadle.config.rollout import OpenAIConfig
from treadle.config.root import Config
from treadle.config.show import ABSENT, HIDDEN, Difference, as_yaml, flatten, hide_in_words, hide_secret
from treadle.errors import ConfigError

NASTY = [
    "yes",
    "no",
    "on",
    "true",
    "null",
    "~",
    "",
    " ",
    " a",
    "a ",
    "1e-4",
    "007",
    "0x1F",
    "1_000",
    ".5",
    ".inf",
    "1:30",
    "2020-01-01",
    "a: b",
    "a #b",
    "#",
    "- a",
    "[a]",
    "{a}",
    "a,b",
    "'",
    '"',
    "it's",
    'say "hi"',
    "back\\slash",
    "\\n",
    "%",
    "@a",
    "`a`",
    "!tag",
    "&a",
    "*a",
    "|",
    ">",
    "?",
    "? a",
    "---",
    "...",
    "a\nb",
    "\n",
    "a\n",
    "a\r\nb",
    "\t",
    "a\tb",
    "\x07",
    "\x85",
    "\u2028",
    "\ufeff",
    "ünïcödé 模型 🦊",
    "${",
    "${}",
    "${model.path}",
    "$${model.path}",
    "$$${a}",
    "${a${b}}",
    "a$",
    "{{ messages }}",
    "{% for m in messages %}",
    "<<",
    "=",
]


@pytest.mark.parametrize("text", NASTY)
def test_a_nasty_string_survives_wherever_it_stands(text):
    config = Config(
        model=ModelConfig(path=text, override_config={text or "x": text, "list": [text, {"k": text}]}),
        rollout=RolloutConfig(openai=OpenAIConfig(extra_body={"a": {"b": text}})),
    )
    assert loads(to_yaml(config)) == config
    assert loads(to_yaml(config, origins=True)) == config


TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)
NAMES = TEXT.filter(bool)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=3), VALUES)
def test_any_config_loads_again_from_its_yaml(options, value):
    model = ModelConfig(path="x", override_config=options)
    config = Config(model=model, rollout=RolloutConfig(openai=OpenAIConfig(extra_body={"v": value})))
    again = loads(to_yaml(config))
    assert again == config
    assert loads(to_yaml(again, origins=True)) == config


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(NASTY) | TEXT, max_size=4))
def test_lists_of_strings_load_again(items):
    text = f"model: {{path: x}}\ndata: {{train_files: {as_yaml(tuple(items))}}}\n"
    assert loads(text).data.train_files == tuple(items)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["actor._target_=treadle.config.FSDPActorConfig", "actor.optim.betas=[0.8, 0.9]", "actor.clip_ratio_low=0"],
        ["reward.functions={a: {path: math, weight: -1}, b: {path: x.y:z, kwargs: {k: [1, {l: null}]}}}"],
        ["rollout.agent.loops.mine.path=a:B", "rollout.multi_turn.mcp_servers.m.command=[a, '1']"],
        ["logging.logger=[console, wandb]", "data.seed=${rollout.seed}"],
    ],
)
def test_a_loaded_config_loads_again_from_its_yaml(words):
    config = load("calculator", words)
    assert loads(to_yaml(config)) == config
    assert loads(to_yaml(config, origins=True)) == config
    assert type(loads(to_yaml(config)).actor) is type(config.actor)


def test_a_variant_inside_a_map_of_sections_loads_again():
    class PatientLoop(AgentLoopConfig):
        """A loop that waits."""

    name = f"{PatientLoop.__module__}.{PatientLoop.__qualname__}"
    config = rollout_config(f"rollout.agent.loops.mine={{_target_: {name}, path: a:B}}")
    assert type(config.rollout.agent.loops["mine"]) is PatientLoop
    assert loads(to_yaml(config)) == config


def test_origins_stand_beside_every_value():
    text = to_yaml(rollout_config("rollout.n=4", "rollout.openai.extra_body={a: 1}"), origins=True)
    assert "  n: 4  # command line (rollout.n=4)" in text
    assert "  seed: 42  # default (RolloutConfig.seed)" in text
    assert "    extra_body: {a: 1}  # command line (rollout.openai.extra_body={a: 1})" in text
    lines = [line for line in text.splitlines() if not line.endswith(":")]
    assert all("  # " in line for line in lines)


def test_explain_a_key():
    config = loads(ROLLOUT + "rollout: {n: 2}\n", "my.yaml", ["rollout.n=4"])
    assert str(explain(config, "rollout.n")) == (
        "rollout.n = 4\n"
        "  samples per task\n"
        "  type      a whole number ≥ 1\n"
        "  origin    command line (rollout.n=4)\n"
        "  overrode  2 from my.yaml:2"
    )


def test_explain_says_which_values_are_allowed():
    assert "one of native, vllm, openai, scripted" in str(explain(rollout_config(), "rollout.name"))
    assert "grpo, gdpo, dr_grpo" in str(explain(training_config(), "algorithm.adv_estimator"))
    assert "an import path" in str(explain(training_config(), "algorithm.adv_estimator"))


def test_explain_what_was_taken_back():
    config = rollout_config("~rollout.n", text=ROLLOUT + "rollout: {n: 2}\n")
    assert explain(config, "rollout.n").overrode == (
        "everything before command line (~rollout.n)",
        "2 from base.yaml:2",
    )


def test_explain_reaches_into_maps():
    config = rollout_config(
        "rollout.engine_kwargs={vllm: {a.b: {c: 1}, d: 2}}", "reward.functions.f={path: math, kwargs: {k: 3}}"
    )
    assert explain(config, "rollout.engine_kwargs.vllm.a.b.c").value == 1
    assert explain(config, "rollout.engine_kwargs.vllm").value == {"a.b": {"c": 1}, "d": 2}
    assert explain(config, "reward.functions.f.path").value == "math"
    assert explain(config, "reward.functions.f.kwargs.k").value == 3


def test_explain_the_class_of_a_section():
    config = training_config("actor._target_=treadle.config.FSDPActorConfig")
    explained = explain(config, "actor._target_")
    assert explained.value == "treadle.config.FSDPActorConfig"
    assert explained.origin.startswith("command line")


def test_explain_a_section_lists_its_keys():
    overview = explain(rollout_config("rollout.limits.stall_report_s=5"), "rollout.limits")
    assert isinstance(overview, SectionOverview)
    assert [item.key for item in overview.keys][:2] == [
        "rollout.limits.session_timeout_s",
        "rollout.limits.session_tool_time_s",
    ]
    text = str(overview)
    assert "  stall_report_s = 5.0  # command line (rollout.limits.stall_report_s=5)" in text
    assert "      report what is being waited for after this long (a number > 0)" in text


def test_explain_a_section_names_the_sections_in_it():
    overview = explain(rollout_config(), "rollout")
    assert ("limits", "deadlines") in overview.sections
    assert "limits: section" in str(overview)


def test_explain_a_map_of_sections_names_them():
    config = rollout_config("reward.functions.f.path=math")
    assert explain(config, "reward.functions").sections == (("f", "One reward function and its share of the sum"),)
    assert explain(config, "reward.functions.f").keys[0].value == "math"


def test_everything_can_be_explained():
    config = load("calculator")
    keys = [*flatten(config), "model", "rollout.agent", "actor.optim", "reward.functions"]
    assert len(keys) > 200
    explained = {key: explain(config, key) for key in keys}
    assert [key for key, found in explained.items() if not str(found).startswith(key)] == []
    assert all(isinstance(found, Explanation | SectionOverview) for found in explained.values())


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("rollout.nn", "did you mean 'rollout.n'?"),
        ("actor_rollout_ref.rollout.n", "did you mean 'rollout.n'?"),
        ("rollout.limitz", "did you mean 'rollout.limits'?"),
        ("reward.functions.g", None),
        ("rollout.n.x", None),
        ("data.train_files.0", None),
        ("", None),
        (".", None),
    ],
)
def test_explain_an_unknown_key_names_the_nearest(key, fix):
    with pytest.raises(ConfigError) as caught:
        explain(rollout_config("reward.functions.f.path=math"), key)
    (mistake,) = caught.value.mistakes
    assert mistake.problem == "no such key"
    assert fix is None or mistake.fix == fix


def test_diff_names_the_keys_that_differ():
    left = training_config("rollout.n=4", "reward.functions.f.path=math")
    right = training_config("actor._target_=treadle.config.FSDPActorConfig", "data.train_files=[a, b]")
    found = {item.key: item for item in diff(left, right)}
    assert found["rollout.n"] == Difference("rollout.n", 4, 8)
    assert found["reward.functions.f.path"].right is ABSENT
    assert found["actor._target_"].left is ABSENT
    assert found["actor.fsdp_config.fsdp_size"].right == -1
    assert str(found["data.train_files"]) == "data.train_files: [tasks.jsonl] → [a, b]"
    assert str(found["reward.functions.f.path"]) == "reward.functions.f.path: math → (absent)"


def test_diff_of_equal_configs_is_empty_wherever_the_values_came_from():
    assert diff(rollout_config("rollout.n=1"), rollout_config()) == []


def test_diff_of_training_and_stand_alone_counts_the_training_sections_as_absent():
    keys = {item.key: item for item in diff(rollout_config(), training_config())}
    assert keys["trainer.mode"].left is ABSENT


CONFIG = """
model: {path: unused}
rollout:
  multi_turn:
    mcp_servers:
      search: {command: [python, server.py], env: {SEARCH_TOKEN: s3cret, MODE: deep}}
  openai: {base_url: "http://me:s3cret@host:8000/v1", extra_body: {api_key: s3cret, max_tokens: 7}}
"""


def test_the_config_of_a_run_directory_has_no_secret_and_still_loads():
    config = loads(CONFIG)
    text = to_yaml(config, origins=True, secrets=False)
    assert "s3cret" not in text and "deep" not in text and text.count(HIDDEN) == 4
    assert "max_tokens: 7" in text and "api_key_env: OPENAI_API_KEY" in text
    assert loads(text).rollout.multi_turn.mcp_servers["search"].command == ("python", "server.py")
    assert "s3cret" in to_yaml(config), "where it is asked for, a config is shown whole"


def test_trackers_and_command_lines_have_none_either():
    shown = {name: hide_secret(name, value) for name, value in flatten(loads(CONFIG)).items()}
    assert "s3cret" not in str(shown)
    words = ["rollout.multi_turn.mcp_servers.search.env.KEY=s3cret", "rollout.openai.extra_body.api_key=s3cret"]
    assert "s3cret" not in str(hide_in_words(words))
    assert hide_in_words(["rollout.openai.api_key_env=MY_KEY", "rollout.n=4", "my.yaml"]) == [
        "rollout.openai.api_key_env=MY_KEY",
        "rollout.n=4",
        "my.yaml",
    ]


def test_a_secret_that_changed_can_be_told():
    one, two = (hide_secret("x.env", {"A": value}, digest=True) for value in ("one", "two"))
    assert one != two and "one" not in str(one)
