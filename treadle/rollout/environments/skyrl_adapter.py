"""SkyRL-gym adapter: an environment of skyrl-gym, `skyrl_gym:gsm8k_multi_turn`; standard library alone.

The task's prompt is the environment's, its answer is `reward_spec.ground_truth`, and its other fields are extras, as
SkyRL's own data sets have them. `environment_kwargs`: `env_config` (the environment's own section, a map), `max_turns`,
and further extras. Every step has a reward. A text that the environment would put in the place of the model's own turn
is kept as info: tokens that were sampled are not rewritten.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any


def check(name: str) -> None:
    """LookupError where there is no such environment."""
    import skyrl_gym  # noqa: F401  it registers them
    from skyrl_gym.envs.registration import registry

    if name not in registry:
        near = get_close_matches(name, list(registry), 3)
        hint = f"nearest: {', '.join(near)}" if near else f"it has {', '.join(sorted(registry))}"
        raise LookupError(f"skyrl_gym has no environment {name!r}; {hint}")


class SkyRLEnvironment:
    """One episode."""

    def __init__(self, name: str, env_config: Any = None, **extras: Any) -> None:
        self._name, self._config, self._extras = name, dict(env_config or {}), extras
        self._environment: Any = None

    def reset(self, task: Any) -> dict[str, Any]:
        import skyrl_gym

        spec = dict(task.extra.get("reward_spec") or {})
        if task.ground_truth is not None:
            spec.setdefault("ground_truth", task.ground_truth)
        extras = {"extra_info": {}, **task.extra, "reward_spec": spec, **self._extras}
        self._environment = skyrl_gym.make(self._name, env_config=_Section(self._config), extras=extras)
        messages, _ = self._environment.init([dict(message) for message in task.messages])
        return {"messages": [dict(message) for message in messages]}

    def step(self, action: Any) -> dict[str, Any]:
        found = self._environment.step(action.text)
        done = bool(found["done"])
        info = dict(found.get("metadata") or {})
        if found.get("postprocessed_action") not in (None, action.text):
            info["postprocessed_action"] = found["postprocessed_action"]
        if done:
            info.update(self._environment.get_metrics())
        messages = [] if done else [dict(message) for message in found["observations"]]
        return {"messages": messages, "reward": float(found["reward"]), "done": done, "info": _plain(info)}

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


class _Section(dict):  # type: ignore[type-arg]
    """A map whose keys are attributes, too, as the sections of SkyRL's config are."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"env_config has no {name!r}: give it in environment_kwargs.env_config")


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """The values that are plain: environments put objects there, too."""
    return {name: value for name, value in info.items() if isinstance(value, (str, int, float, bool))}
