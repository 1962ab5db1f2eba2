"""`reward`, and its older spellings `reward_model`, `custom_reward_function` and `sandbox_fusion`."""

from typing import Any

from treadle.config.legacy.conversion import unless_null, words
from treadle.config.legacy.rule import (
    Answer,
    Convert,
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

REWARD_MODEL = "A reward model is reward.classifiers.NAME or reward.judges.NAME here, with keys of its own."
NO_MODEL_NAMED = (
    "Name its model, for a classifier; or write a judge in reward.judges, or a reward function that asks it."
)
ASKS_ITSELF = "A reward function that asks verl's model has no address to ask here: write a judge in reward.judges."
ONE_DEVICE = "A classifier computes on one device: serve a larger one, and give reward.classifiers.NAME.endpoint."
SANDBOX = "Reward functions run in killable processes of their own: reward.cpu_time_s, memory_mb and timeout_s."
MANAGER = "There is one reward loop: list the functions in reward.functions; their scores are summed by weight."
OVERLONG = (
    "Add the reward function soft_overlong: kwargs.max_length is the response length, kwargs.buffer the buffer's len, "
    "weight its penalty_factor."
)
FUNCTION = "reward.functions.custom.path"

CLASSIFIER = "reward.classifiers.reward_model"
_FUNCTIONS = ("reward.custom_reward_function.path", "custom_reward_function.path")

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
        file = str(value)
        if file.startswith("pkg://"):
            file = file.removeprefix("pkg://").removesuffix(".py").replace("/", ".")
        elif not file.endswith(".py"):
            return Refused(f"A function is named as file.py:function or package.module:function: give {FUNCTION}.")
        path = f"{file}:{look(name) or 'compute_score'}"
        return Said(path, "called with the parameters it names, verl's included")

    return convert


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


def _reward_model(old: str, path: str) -> Rules:
    """verl's reward model: without a function of the user's it is a classifier over the conversation, on a GPU."""

    def enable(value: Any, look: Look) -> Answer:
        if not value:
            return Nothing("no reward model")
        if any(look(name) for name in _FUNCTIONS):
            return Refused(ASKS_ITSELF)
        return Nothing(f"its score is {CLASSIFIER}") if look(f"{old}.{path}") else Refused(NO_MODEL_NAMED)

    def enabled(convert: Convert) -> Convert:
        def only_then(value: Any, look: Look) -> Answer:
            asked_for = value is not None and look(f"{old}.enable", False)
            return convert(value, look) if asked_for else Nothing("no reward model")

        return only_then

    def one_device(value: Any, look: Look) -> Answer:
        return Nothing("one device") if value in (0, 1) else Refused(ONE_DEVICE)

    placement = words({True: "process", False: "thread"}, REWARD_MODEL)
    on_gpu = {f"{CLASSIFIER}.device": "cuda"}
    length = "a classifier writes nothing; its text may have max_length tokens"
    return under(
        old,
        {
            "enable": asked(enable),
            path: to(f"{CLASSIFIER}.path", convert=enabled(lambda value, look: Said(value, also=on_gpu))),
            "enable_resource_pool": to(f"{CLASSIFIER}.placement", convert=enabled(placement)),
            "n_gpus_per_node": asked(enabled(one_device)),
            "nnodes": asked(enabled(one_device)),
            "rollout.name": asked(enabled(lambda value, look: Nothing("treadle computes classifiers itself"))),
            "rollout.dtype": to(f"{CLASSIFIER}.dtype", convert=enabled(lambda value, look: Said(value))),
            "rollout.gpu_memory_utilization": to(
                f"{CLASSIFIER}.gpu_memory_utilization", convert=enabled(lambda value, look: Said(value))
            ),
            "rollout.max_model_len": to(f"{CLASSIFIER}.max_length", convert=enabled(lambda value, look: Said(value))),
            "rollout.prompt_length": asked(enabled(lambda value, look: Nothing(length))),
            "rollout.response_length": asked(enabled(lambda value, look: Nothing(length))),
            "rollout.tensor_model_parallel_size": asked(enabled(one_device)),
            "rollout.**": asked(enabled(lambda value, look: Refused(REWARD_MODEL))),
        },
    )


RULES: Rules = (
    kept("reward", "num_workers")
    | classes("reward", ". reward_manager reward_manager.module sandbox_fusion reward_model reward_model.rollout")
    | _functions("reward.custom_reward_function")
    | _functions("custom_reward_function")
    | _sandbox("reward.sandbox_fusion")
    | _sandbox("sandbox_fusion")
    | _reward_model("reward.reward_model", "model_path")
    | _reward_model("reward_model", "model.path")
    | under(
        "reward",
        {
            "reward_manager.name": asked(_managers),
            "reward_manager.source": fixed("register", note="one reward loop", otherwise=MANAGER),
            "reward_manager.module.**": none(MANAGER),
        },
    )
    | under(
        "reward_model",
        {
            "num_workers": to("reward.num_workers", convert=unless_null("not given")),
            "reward_manager": asked(_managers),
            "reward_loop_source": fixed(None, "register", note="one reward loop", otherwise=MANAGER),
            "reward_loop_module_path": fixed(None, note="one reward loop", otherwise=MANAGER),
            "reward_loop_class_name": fixed(None, note="one reward loop", otherwise=MANAGER),
            "model.trust_remote_code": fixed(None, False, note="not trusted", otherwise=REWARD_MODEL),
            "model.external_lib": fixed(None, note="not given", otherwise=REWARD_MODEL),
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
