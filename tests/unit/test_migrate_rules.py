"""The table of old keys: complete for verl 0.9.1, aimed at real keys, and without dead rules."""

import re
from pathlib import Path

import pytest

from treadle.config.legacy import find_declaration, is_ours
from treadle.migrate.defaults import ALWAYS, BY_RECIPE
from treadle.migrate.rule import BELOW, Converted, NotNeeded, Refused, RuleKind, dtype, kl_in_loss, kl_in_reward
from treadle.migrate.rules import OLDER, TABLE, find_rule

GOLDEN = Path(__file__).parent.parent / "golden"


def read_keys() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    lines = (GOLDEN / "verl_0_9_1_keys.txt").read_text(encoding="utf-8").splitlines()
    path: tuple[str, ...] = ()
    for line in (line for line in lines if not line.startswith("#")):
        name = line.lstrip(" ")
        depth = len(line) - len(name)
        if depth == len(path) and path:
            found = found[:-1] if found and found[-1] == path else found
        path = (*path[:depth], name)
        found.append(path)
    return found


KEYS = read_keys()

WITHOUT_DEFAULT = (
    ".checkpoint.contents",
    ".checkpoint.strict",
    ".optim.grad_clip",
    ".wrap_policy.**",
    ".mixed_precision.param_dtype",
    ".mixed_precision.reduce_dtype",
    ".mixed_precision.buffer_dtype",
    ".reward_kwargs.**",
    ".agent_loop_manager_class",
    ".model.override_config.**",
    ".mm_processor_kwargs.**",
    "hydra.**",
)
"""Keys that verl 0.9.1 reads and no YAML of its own names."""


def aim(text: str) -> tuple[str, ...]:
    """A target of a rule, with a name in place of a subtree."""
    return tuple(f"{text.removesuffix(BELOW)}.anything".split(".") if text.endswith(BELOW) else text.split("."))


def test_the_key_file_holds_all_of_verl() -> None:
    stated = re.search(r"(\d+) in all", (GOLDEN / "verl_0_9_1_keys.txt").read_text(encoding="utf-8"))
    assert stated is not None
    # one key of verl's is a leaf in one file and a section in another
    assert len(KEYS) == int(stated.group(1)) - 1
    assert ("actor_rollout_ref", "rollout", "n") in KEYS


def test_every_default_key_of_verl_has_a_rule() -> None:
    assert [".".join(path) for path in KEYS if find_rule(path) is None] == []


def test_no_rule_speaks_for_a_whole_section_that_has_counterparts() -> None:
    partly_ours = {"actor_rollout_ref", "data", "critic", "algorithm", "reward", "trainer", "rollout", "model"}
    tops = {name.removesuffix(BELOW) for name in TABLE | OLDER if name.endswith(BELOW)}
    assert not tops & (partly_ours | {"actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"})
    assert find_rule(("no_such_section", "key")) is None
    assert find_rule(("data", "no_such_key")) is None


def test_no_rule_is_out_of_reach() -> None:
    for name in TABLE | OLDER:
        path = tuple(name.removesuffix(BELOW).split("."))
        found = find_rule((*path, "anything") if name.endswith(BELOW) else path)
        assert found is not None and found[0] == name, f"{name} is never reached"


def test_every_current_rule_speaks_for_a_key_of_verl() -> None:
    spoken = {found[0] for path in KEYS if (found := find_rule(path)) is not None}
    silent = [name for name in TABLE if name not in spoken and not name.endswith(WITHOUT_DEFAULT)]
    assert silent == []


def test_every_target_is_a_key_of_ours() -> None:
    targets = {target for rule in (TABLE | OLDER).values() for target in rule.targets}
    assert [target for target in targets if not is_ours(aim(target))] == []
    assert len(targets) > 80


def test_keys_that_are_the_same_are_keys_of_ours() -> None:
    same = [name for name, rule in (TABLE | OLDER).items() if rule.kind is RuleKind.SAME]
    assert [name for name in same if not is_ours(aim(name))] == []


def test_a_key_that_is_ours_is_never_moved_elsewhere() -> None:
    ours = [name for name in TABLE | OLDER if is_ours(aim(name)) and not name.endswith("_target_")]
    assert [name for name in ours if (TABLE | OLDER)[name].kind is not RuleKind.SAME] == []


def test_every_key_without_counterpart_says_why_in_a_sentence() -> None:
    reasons = {rule.reason for rule in (TABLE | OLDER).values() if rule.kind is RuleKind.NONE}
    assert [reason for reason in reasons if not re.fullmatch(r"[A-Z].{15,}\.", reason)] == []


def test_verls_defaults_are_values_our_keys_accept_and_differ_from_ours() -> None:
    for default in ALWAYS:
        place = find_declaration(tuple(default.key.split(".")))
        assert place is not None, default.key
        assert place.problem(default.value) is None, default.key
        assert default.value != place.default or default.key == "trainer.mode", default.key
    assert all(is_ours(tuple(item.key.split("."))) for items in BY_RECIPE.values() for item in items)


@pytest.mark.parametrize(
    ("old", "loss", "reward"),
    [
        ("kl", "k1", "k1"),
        ("k1", "k1", "k1"),
        ("k1+", "k1+", "k1"),
        ("mse", "k2", "k2"),
        ("k2+", "k2", "k2"),
        ("low_var_kl", "k3", "k3"),
        ("k3", "k3", "k3"),
        ("low_var_kl+", "k3+", "k3"),
        ("k3+", "k3+", "k3"),
    ],
)
def test_kl_estimators_have_our_names(old: str, loss: str, reward: str) -> None:
    """A plus is about the gradient, which a reward has none of."""
    for convert, new in ((kl_in_loss, loss), (kl_in_reward, reward)):
        answer = convert(old, lambda key, default=None: default)
        assert isinstance(answer, Converted) and answer.value == new


@pytest.mark.parametrize("old", ["abs", "full", "k4", 3, None, ["kl"]])
def test_an_estimator_we_do_not_have_is_refused(old: object) -> None:
    for convert in (kl_in_loss, kl_in_reward):
        assert isinstance(convert(old, lambda key, default=None: default), Refused)


def test_number_formats_have_our_names() -> None:
    assert dtype("bfloat16", lambda key, default=None: default) == Converted("bf16", "bfloat16 is written bf16")
    assert isinstance(dtype("float16", lambda key, default=None: default), Refused)


def test_a_fixed_key_accepts_how_things_are_and_nothing_else() -> None:
    rule = TABLE["actor_rollout_ref.rollout.mode"]
    assert rule.convert is not None
    assert isinstance(rule.convert("async", lambda key, default=None: default), NotNeeded)
    assert isinstance(rule.convert("sync", lambda key, default=None: default), Refused)
