"""`reward`, and its older spellings `reward_model`, `custom_reward_function` and `sandbox_fusion`."""

from typing import Any

from treadle.config.legacy.conversion import unless_null, words
from treadle.config.legacy.rule import (
    Answer,
    Look,
    Nothing,
    Refused,
    Rules,
    Said,
    asked,
    classes,
    fixed,
    kept,
    none,
    to,
    under,
)

REWARD_MODEL = "There is no reward model section: call the model from a reward function, which may be async."
SANDBOX = "Reward functions run in killable processes of their own: reward.cpu_time_s, memory_mb and timeout_s."
MANAGER = "There is one reward loop: list the functions in reward.functions; their scores are summed by weight."
OVERLONG = "There is no overlong penalty: write it as a reward function."
FUNCTION = "reward.functions.custom.path"

_NO_MODEL = fixed(None, note="not given", otherwise=REWARD_MODEL)

_managers = words(
    {
        None: Nothing("not given"),
        "naive": Nothing("every trajectory is scored on its own, as it ends"),
        "batch": Nothing("every trajectory is scored on its own, as it ends"),
        "dapo": Nothing("without an overlong penalty, dapo scores as naive does"),
        "rate_limited": Nothing("reward.rate_limit_per_s holds over all workers"),
    },
    MANAGER,
)


def _function(name: str) -> Any:
    """verl names a file and a function; here both are one import path."""

    def convert(value: Any, look: Look) -> Answer:
        if value is None:
            return Nothing("no reward function of your own")
        module = _module(str(value))
        if module is None:
            return Refused(f"A function is named by import path, as package.module:function: give {FUNCTION}.")
        path = f"{module}:{look(name) or 'compute_score'}"
        return Said(path, "imported by name, and called with the parameters it names, verl's included")

    return convert


def _module(path: str) -> str | None:
    """The module a relative file or a pkg:// path names; None where only its place on a disk is known."""
    text = path.removeprefix("pkg://").removesuffix(".py").removeprefix("./").replace("/", ".")
    return text if all(part.isidentifier() for part in text.split(".")) else None


def _functions(old: str) -> Rules:
    name = f"{old}.name"
    return {
        f"{old}.path": to(FUNCTION, convert=_function(name)),
        name: asked(lambda value, look: Nothing(f"part of {FUNCTION}")),
        f"{old}.reward_kwargs.**": to("reward.functions.custom.kwargs.**"),
    }


def _sandbox(old: str) -> Rules:
    return {
        f"{old}.url": fixed(None, note="functions run in processes of their own", otherwise=SANDBOX),
        f"{old}.max_concurrent": fixed(None, note="not given", otherwise=SANDBOX),
        f"{old}.memory_limit_mb": fixed(None, note="not given", otherwise=SANDBOX),
    }


RULES: Rules = (
    kept("reward", "num_workers")
    | classes("reward", ". reward_manager reward_manager.module sandbox_fusion")
    | _functions("reward.custom_reward_function")
    | _functions("custom_reward_function")
    | _sandbox("reward.sandbox_fusion")
    | _sandbox("sandbox_fusion")
    | under(
        "reward",
        {
            "reward_manager.name": asked(_managers),
            "reward_manager.source": fixed("register", note="one reward loop", otherwise=MANAGER),
            "reward_manager.module.**": none(MANAGER),
            "reward_model.enable": fixed(False, note="no reward model", otherwise=REWARD_MODEL),
            "reward_model.**": none(REWARD_MODEL),
        },
    )
    | under(
        "reward_model",
        {
            "num_workers": to("reward.num_workers", convert=unless_null("not given")),
            "reward_manager": asked(_managers),
            "enable": fixed(False, None, note="no reward model", otherwise=REWARD_MODEL),
            "enable_resource_pool": _NO_MODEL,
            "n_gpus_per_node": _NO_MODEL,
            "nnodes": _NO_MODEL,
            "reward_loop_source": fixed(None, "register", note="one reward loop", otherwise=MANAGER),
            "reward_loop_module_path": fixed(None, note="one reward loop", otherwise=MANAGER),
            "reward_loop_class_name": fixed(None, note="one reward loop", otherwise=MANAGER),
            "model.**": _NO_MODEL,
            "rollout.**": _NO_MODEL,
        },
    )
)


def per_minute(value: Any, look: Look) -> Answer:
    """A rate in scores per minute."""
    if value is None:
        return Nothing("no limit")
    if not isinstance(value, int | float):
        return Refused("A rate is a number.")
    return Said(value / 60, f"{value} a minute")
