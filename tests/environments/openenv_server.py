"""An OpenEnv server for the contract tests: a safe with a number. `PYTHON openenv_server.py PORT SESSIONS`."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class Safe(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: Any = None, episode_id: Any = None, **kwargs: Any) -> Hint:
        self._number = seed or 0
        self._state = State(episode_id=episode_id)
        return Hint(hint="Which number?")

    def step(self, action: Guess, timeout_s: Any = None, **kwargs: Any) -> Hint:
        self._state.step_count += 1
        if not action.text.isdecimal():
            raise ValueError(f"no number: {action.text}")
        right = int(action.text) == self._number
        return Hint(hint="open" if right else "closed", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Safe, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
