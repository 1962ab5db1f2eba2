"""GEM adapter: an environment of gem-llm, `gem:game:Sudoku-v0-easy`; standard library alone.

`environment_kwargs`: `seed`, and whatever the environment's class takes. The observation is a message of the user, with
the suffix that GEM gives beside it; every step has a reward. GEM seeds the interpreter's random numbers in `reset`: the
draw of an episode is by its seed, later draws of episodes that run side by side are not.
"""

from __future__ import annotations

import threading
from difflib import get_close_matches
from typing import Any

_RESETTING = threading.Lock()
"""`reset` seeds the interpreter's random numbers, and draws from them."""


def check(name: str) -> None:
    """LookupError where there is no such environment."""
    import gem  # noqa: F401  it registers them
    from gem.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = get_close_matches(name, list(ENV_REGISTRY), 3)
        hint = f"nearest: {', '.join(near)}" if near else f"it has {len(ENV_REGISTRY)}, such as game:Sudoku-v0-easy"
        raise LookupError(f"gem has no environment {name!r}; {hint}")


class GemEnvironment:
    """One episode."""

    def __init__(self, name: str, seed: int | None = None, **kwargs: Any) -> None:
        import gem

        self._seed = seed
        with _RESETTING:  # some draw already when they are built
            self._environment = gem.make(name, **kwargs)

    def reset(self, task: Any) -> dict[str, Any]:
        with _RESETTING:
            observation, info = self._environment.reset(seed=self._seed)
        return {"messages": _text(observation, info)}

    def step(self, action: Any) -> dict[str, Any]:
        observation, reward, terminated, truncated, info = self._environment.step(action.text)
        done = bool(terminated or truncated)
        messages = [] if done else [{"role": "user", "content": _text(observation, info)}]
        return {"messages": messages, "reward": float(reward), "done": done, "info": {"truncated": bool(truncated)}}

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()


def _text(observation: Any, info: Any) -> str:
    suffix = info.get("suffix") if isinstance(info, dict) else None
    parts = [str(observation).strip(), str(suffix or "").strip()]
    return "\n".join(part for part in parts if part) or "Go on."
