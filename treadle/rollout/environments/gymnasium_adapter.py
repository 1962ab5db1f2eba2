"""Gymnasium adapter: an environment whose observations and actions can be text, `gymnasium:FrozenLake-v1`.

Standard library alone. Observations are texts (spaces of the kind Text), numbers and tuples of numbers, or, with
`render_mode: ansi`, what the environment draws as text. Actions are texts, or one of n: the model writes a name of
`actions`, or the number. `environment_kwargs`: `seed`, `actions` (names in order), `prompt` (what the first message
begins with), and whatever `gymnasium.make` takes. Every step has a reward. An action that cannot be read costs a turn
and `invalid_reward` (0), and changes nothing: the model is told so, or, with a `prompt` of yours, shown the same again.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

_COLOURS = re.compile(r"\x1b\[([\d;]*)m")


def check(name: str) -> None:
    """LookupError where there is no such environment."""
    import gymnasium
    from gymnasium.envs.registration import registry

    module, colon, own = name.rpartition(":")
    if colon:  # gymnasium imports the module first, which registers the environment
        __import__(module)
    if own not in registry:
        near = get_close_matches(own, list(registry), 3)
        hint = f"nearest: {', '.join(near)}" if near else f"it has {len(registry)}, such as FrozenLake-v1"
        raise LookupError(f"gymnasium {gymnasium.__version__} has no environment {own!r}; {hint}")


class GymnasiumEnvironment:
    """One episode."""

    def __init__(
        self,
        name: str,
        seed: int | None = None,
        actions: Any = (),
        prompt: str | None = None,
        invalid_reward: float = 0.0,
        **kwargs: Any,
    ) -> None:
        import gymnasium

        self._seed, self._prompt = seed, prompt
        self._invalid_reward = invalid_reward
        self._shown = ""
        self._environment = gymnasium.make(name, **kwargs)
        self._is_drawn = kwargs.get("render_mode") == "ansi"
        space = self._environment.action_space
        kind = type(space).__name__
        if kind not in ("Text", "Discrete"):
            raise ValueError(f"gymnasium:{name} has actions in {space}: only Text and Discrete can be written")
        self._count = int(space.n) if kind == "Discrete" else 0
        self._first = int(space.start) if kind == "Discrete" else 0
        self._names = [str(one).lower() for one in actions]
        if self._names and len(self._names) != self._count:
            raise ValueError(f"actions has {len(self._names)} names, and gymnasium:{name} has {self._count} actions")
        self._pattern = compile_names(self._names)
        shown = self._environment.observation_space
        if not self._is_drawn and not _can_be_text(shown):
            fix = "render_mode: ansi" if "ansi" in self._environment.metadata.get("render_modes", ()) else "a wrapper"
            raise ValueError(f"gymnasium:{name} has observations in {shown}, which is no text; try {fix}")

    def reset(self, task: Any) -> dict[str, Any]:
        observation, _ = self._environment.reset(seed=self._seed)
        self._shown = self._show(observation)
        return {"messages": f"{self._ask()}\n{self._shown}".strip()}

    def step(self, action: Any) -> dict[str, Any]:
        chosen = self._read(action.text)
        if chosen is None:
            told = f"There is no such action. {self._choices()}" if self._prompt is None else self._shown
            return {"messages": told, "reward": self._invalid_reward}
        observation, reward, terminated, truncated, _ = self._environment.step(chosen)
        done = bool(terminated or truncated)
        self._shown = self._show(observation)
        messages = [] if done else [{"role": "user", "content": self._shown}]
        return {"messages": messages, "reward": float(reward), "done": done, "info": {"truncated": bool(truncated)}}

    def close(self) -> None:
        self._environment.close()

    def _ask(self) -> str:
        return self._choices() if self._prompt is None else self._prompt

    def _choices(self) -> str:
        if not self._count:
            return "Write your action."
        named = ", ".join(self._names) if self._names else f"{self._first} to {self._first + self._count - 1}"
        return f"Actions: {named}."

    def _read(self, text: str) -> Any:
        """The action that a text names last; None where it names none."""
        if not self._count:
            return text
        found = self._pattern.findall(text.lower()) if self._names else re.findall(r"-?\d+", text)
        if not found:
            return None
        number = self._names.index(found[-1]) if self._names else int(found[-1]) - self._first
        return self._first + number if 0 <= number < self._count else None

    def _show(self, observation: Any) -> str:
        if self._is_drawn:
            return _mark_highlights(str(self._environment.render())).strip("\n") or "Go on."
        if isinstance(observation, (tuple, list)):
            return ", ".join(self._show(one) for one in observation)
        return str(observation) if isinstance(observation, str) else str(int(observation))


def compile_names(names: Any) -> Any:
    """A pattern that finds names as words of a lower-case text, the longest first: `up` is not in `support`."""

    def as_word(name: str) -> str:
        begin, end = (r"(?<!\w)" if name[:1].isalnum() else "", r"(?!\w)" if name[-1:].isalnum() else "")
        return begin + re.escape(name) + end

    return re.compile("|".join(as_word(one) for one in sorted(names, key=len, reverse=True)))


def _can_be_text(space: Any) -> bool:
    kind = type(space).__name__
    return kind in ("Text", "Discrete") or (kind == "Tuple" and all(_can_be_text(one) for one in space))


def _mark_highlights(text: str) -> str:
    """Text drawn for a terminal, without its colours: what is highlighted stands in brackets."""
    return _COLOURS.sub(lambda found: "]" if found[1] in ("", "0") else "[", text)
