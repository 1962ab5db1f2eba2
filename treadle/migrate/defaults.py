"""verl's defaults where they differ from ours, and OmegaConf's interpolations.

A launch script relies on verl's defaults without naming them, so a migrated config names them. Keys and values are
written as ours. Keys on which the two agree are not here; neither are keys that nothing reads in the run at hand.

Interpolations: `${a.b}`, `${.sibling}`, `${oc.select:a.b,fallback}`. A reference to a key that moved unchanged becomes
a reference to the new key; any other takes the value it has. Nothing is read from the environment.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import yaml

from treadle.config.parse import KeyPath, Layer, dotted

MISSING: Any = object()
"""The value of a key that is not set."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a value comes to: the value itself, and how to write it here."""

    value: Any = None
    written: Any = None
    given: bool = True
    """False where the key referred to is not given, so that this is verl's fallback."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Expression:
    text: str


class Interpolations:
    """Resolves values against the old keys that are given.

    `new_key` names the key of ours that an old key is written to unchanged; `verl_default` is what verl assumes for a
    key of ours, or MISSING.
    """

    def __init__(
        self, given: Layer, new_key: Callable[[KeyPath], str | None], verl_default: Callable[[str], Any]
    ) -> None:
        self._given = given
        self._new_key = new_key
        self._verl_default = verl_default
        self._pending: list[KeyPath] = []

    def resolve(self, value: Any, path: KeyPath) -> Resolved:
        """What `value`, written at the old key `path`, comes to."""
        if isinstance(value, list | tuple):
            return _joined([self.resolve(item, path) for item in value], list)
        if not isinstance(value, str) or "${" not in value:
            return Resolved(value, value)
        try:
            pieces = list(_pieces(value))
        except ValueError:
            return Resolved(problem=f"{value!r} has a brace that is not closed.")
        if len(pieces) == 1 and isinstance(pieces[0], _Expression):
            return self._expression(pieces[0].text, path)
        parts = [
            Resolved(item, item) if isinstance(item, str) else self._expression(item.text, path) for item in pieces
        ]
        return _joined(parts, lambda items: "".join(map(_text, items)))

    def _expression(self, text: str, path: KeyPath) -> Resolved:
        resolver, colon, rest = text.partition(":")
        if not colon:
            return self._reference(text.strip(), path)
        if resolver.strip() != "oc.select":
            where = "the environment" if resolver.strip() in ("oc.env", "env") else f"the resolver {resolver.strip()}"
            return Resolved(problem=f"Nothing is read from {where}: give the value on the command line.")
        name, comma, fallback = rest.partition(",")
        target = _absolute(name.strip(), path)
        if target in self._given:
            return self._taken(target)
        return replace(self.resolve(_plain(fallback.strip()) if comma else None, path), given=False)

    def _reference(self, name: str, path: KeyPath) -> Resolved:
        target = _absolute(name, path)
        if target in self._given:
            return self._taken(target)
        new = self._new_key(target)
        if new is None:
            return Resolved(problem=f"${{{name}}} refers to a key that is not given and has no counterpart.")
        value = self._verl_default(new)
        return Resolved(value, f"${{{new}}}" if value is MISSING else value, given=False)

    def _taken(self, target: KeyPath) -> Resolved:
        if target in self._pending:
            return Resolved(problem=f"${{{dotted(target)}}} refers to itself.")
        self._pending.append(target)
        try:
            found = self.resolve(self._given[target].value, target)
        finally:
            self._pending.pop()
        new = self._new_key(target)
        return replace(found, written=f"${{{new}}}" if new else found.value, given=True)


def _joined(parts: list[Resolved], join: Callable[[list[Any]], Any]) -> Resolved:
    problem = next((part.problem for part in parts if part.problem), "")
    values = [part.value for part in parts]
    value = MISSING if any(item is MISSING for item in values) else join(values)
    return Resolved(value, join([part.written for part in parts]), problem=problem)


def _pieces(text: str) -> Iterator[str | _Expression]:
    """Literal text and interpolations, in order; an interpolation may hold others."""
    while text:
        start = text.find("${")
        if start != 0:
            yield text if start < 0 else text[:start]
            text = "" if start < 0 else text[start:]
            continue
        end = _closing(text)
        yield _Expression(text[2:end])
        text = text[end + 1 :]


def _closing(text: str) -> int:
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            return at
    raise ValueError(text)


def _absolute(name: str, path: KeyPath) -> KeyPath:
    """`.x` is a sibling of the key it is written at, `..x` a sibling of the key above."""
    dots = len(name) - len(name.lstrip("."))
    base = path[: len(path) - dots] if dots else ()
    return (*base, *name[dots:].split("."))


def _plain(text: str) -> Any:
    return text if "${" in text else yaml.safe_load(text)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class DraftValues(Protocol):
    """The migrated config so far: the value of a key, or `default` if it is not there."""

    def __call__(self, key: str, default: Any = None) -> Any: ...


def _always(view: DraftValues) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Default:
    """A key, the value verl assumes (or how it follows from others), and when that matters."""

    key: str
    value: Any
    when: Callable[[DraftValues], bool] = _always


def _trains_critic(view: DraftValues) -> bool:
    return bool(view("algorithm.adv_estimator", "gae") == "gae")


def _reads_reference(view: DraftValues) -> bool:
    return view("actor.use_kl_loss") is True or view("algorithm.use_kl_in_reward") is True


def _has_kl_loss(view: DraftValues) -> bool:
    return view("actor.use_kl_loss") is True


def _calls_tools(view: DraftValues) -> bool:
    return bool(view("rollout.agent.default_agent_loop", "single_turn_agent") != "single_turn_agent")


def _clips_otherwise(view: DraftValues) -> bool:
    return bool(view("actor.clip_ratio", 0.2) != 0.2)


def _has_own_nodes(view: DraftValues) -> bool:
    return view("rollout.nnodes", 0) not in (0, None)


def _shares_devices(view: DraftValues) -> bool:
    return not _has_own_nodes(view)


def _follows_actor(key: str, needed: Callable[[DraftValues], bool]) -> Callable[[DraftValues], bool]:
    return lambda view: needed(view) and view(key) is not None


ALWAYS: tuple[Default, ...] = (
    Default("model.path", "~/models/deepseek-llm-7b-chat"),
    Default("data.train_files", ["~/data/rlhf/gsm8k/train.parquet"]),
    Default("data.val_files", ["~/data/rlhf/gsm8k/test.parquet"]),
    Default("data.train_batch_size", 1024),
    Default("rollout.tensor_model_parallel_size", 2),
    Default("rollout.dtype", "bfloat16"),
    Default("rollout.free_cache_engine", True, _shares_devices),
    Default("rollout.agent.num_workers", 8),
    Default("rollout.multi_turn.max_parallel_calls", 1, _calls_tools),
    Default("rollout.multi_turn.max_tool_response_length", 256, _calls_tools),
    Default("rollout.n_gpus_per_node", "${trainer.n_gpus_per_node}", _has_own_nodes),
    Default("reward.num_workers", 8),
    Default("logging.project_name", "verl_examples"),
    Default("logging.experiment_name", "gsm8k"),
    Default("logging.run_dir", "checkpoints/${logging.project_name}/${logging.experiment_name}"),
    Default("logging.logger", ["console", "wandb"]),
    Default("cluster.backend", "ray"),
    Default("actor._target_", "treadle.config.FSDPActorConfig"),
    Default("actor.ppo_mini_batch_size", 256),
    Default("actor.clip_ratio_low", 0.2, _clips_otherwise),
    Default("actor.clip_ratio_high", 0.2, _clips_otherwise),
    Default("actor.kl_loss_type", "k3", _has_kl_loss),
    Default("ref._target_", "treadle.config.FSDPRefConfig", _reads_reference),
    Default(
        "ref.log_prob_max_token_len_per_gpu",
        "${actor.ppo_max_token_len_per_gpu}",
        _follows_actor("actor.ppo_max_token_len_per_gpu", _reads_reference),
    ),
    Default("critic._target_", "treadle.config.FSDPCriticConfig", _trains_critic),
    Default("critic.path", "~/models/deepseek-llm-7b-chat", _trains_critic),
    Default("critic.loss_agg_mode", "${actor.loss_agg_mode}", _follows_actor("actor.loss_agg_mode", _trains_critic)),
    Default("algorithm.adv_estimator", "gae"),
    Default("trainer.mode", "sync"),
    Default("trainer.n_gpus_per_node", 8),
    Default("trainer.total_epochs", 30),
    Default("checkpoint.keep_last", None),
)

_OWN_ROLLOUT: tuple[Default, ...] = (
    Default("rollout.nnodes", 1),
    Default("rollout.n_gpus_per_node", 8),
    Default("algorithm.rollout_correction.rollout_is", "none"),
    Default("algorithm.rollout_correction.bypass_mode", True),
)

ONE_STEP_OFF: tuple[Default, ...] = _OWN_ROLLOUT


def _step(view: DraftValues) -> Any:
    return view("actor.ppo_mini_batch_size", 256)


def _steps(view: DraftValues) -> Any:
    return 100 // view("data.train_batch_size", _step(view))


def _makes_a_step(view: DraftValues) -> bool:
    size = view("data.train_batch_size", _step(view))
    return isinstance(size, int) and 1 <= size <= 100


FULLY_ASYNC: tuple[Default, ...] = (
    *_OWN_ROLLOUT,
    Default("data.train_batch_size", _step),
    Default("trainer.total_training_steps", _steps, _makes_a_step),
    Default("trainer.parameter_sync_steps", 4),
    Default("trainer.max_staleness", 3),
)

SEPARATE_ASYNC: tuple[Default, ...] = (
    Default("algorithm.rollout_correction.rollout_is", "none"),
    Default("trainer.max_staleness", 7),
    Default("trainer.stale_samples", "drop"),
)
"""verl's newer trainer in its separate_async mode, which has no recipe of its own."""

BY_RECIPE = {
    "main_ppo": ALWAYS,
    "separate_async": (*SEPARATE_ASYNC, *ALWAYS),
    "one_step_off": (*ONE_STEP_OFF, *ALWAYS),
    "fully_async": (*FULLY_ASYNC, *ALWAYS),
}
"""What is assumed, by entry point. A recipe's own assumptions come first, and the first one counts."""

_UNCONDITIONAL = {item.key: item.value for item in ALWAYS if item.when is _always}


def verl_default(key: str) -> Any:
    """What verl assumes for a key of ours, where that differs from our own default; else MISSING."""
    return _UNCONDITIONAL.get(key, MISSING)
