"""Agent loop for verifiers' environments: each session is one episode, played by verifiers against the gateway.

Owns what its interpreter is asked, and what becomes of its errors. verifiers runs the harness, the tools and the
rewards; the model behind it is ours, so its tokens are exact.

    ToolsetError                        a failure of the tools
    TaskError                           a failure of the reward: hooks and scores of the taskset
    EnvError, SandboxError              a failure of the environment
    anything else                       a failure of the agent loop; never a reward of zero
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.config import RolloutConfig
from treadle.data.generators import VERIFIERS_SHIM, verifiers_env
from treadle.errors import ConfigError, EnvironmentFailure, Failure, LoopFailure, Mistake, RewardFailure, ToolFailure
from treadle.gateway.agents import ProgramAgentLoop
from treadle.rollout.session import Session

_KEY = "rollout.agent.loops.verifiers_agent.kwargs"
_RESULT = ".treadle-result.json"

INHERITED = (
    *("LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_CACHE_DIR", "UV_OFFLINE", "HF_HOME", "HF_HUB_OFFLINE"),
)
"""What verifiers may see of the worker's environment: its harnesses are installed with uv."""

BOUNDARIES: Mapping[str, type[Failure]] = {
    "ToolsetError": ToolFailure,
    "TaskError": RewardFailure,
    "EnvError": EnvironmentFailure,
    "SandboxError": EnvironmentFailure,
}


class VerifiersAgentLoop(ProgramAgentLoop):
    """Plays a task of `verifiers:NAME`. `python` has verifiers; `env` is its env config beside the taskset's name."""

    def __init__(
        self,
        rollout: RolloutConfig,
        python: str,
        env: Mapping[str, Any] | None = None,
        inherit_env: Sequence[str] = INHERITED,
    ) -> None:
        if not Path(python).is_file():
            raise ConfigError([Mistake(f"{_KEY}.python", "there is no such interpreter", python)])
        super().__init__(rollout, [python], inherit_env=("PATH", "HOME", *inherit_env))
        inherited = self._inherited
        self._env["PATH"] = os.pathsep.join([str(Path(python).parent), inherited.get("PATH", os.defpath)])
        self._env["HOME"] = inherited.get("HOME", "/")  # verifiers keeps caches there, which sessions share
        self._taskset_env = dict(env or {})

    def argv_of(self, session: Session) -> Sequence[str]:
        asked = session.task.extra.get("verifiers")
        if not isinstance(asked, Mapping):
            raise LoopFailure("verifiers_agent plays tasks of verifiers:NAME, and this is none")
        env = verifiers_env(asked["taskset"], self._taskset_env)
        slots = ("{{base_url}}", "{{model}}", f"{{{{directory}}}}/{_RESULT}")
        return [*self._argv, str(VERIFIERS_SHIM), "play", env, asked["key"], *slots]

    def read_result(self, directory: Path, session: Session) -> float | None:
        """The reward of the episode; its first error, as a failure at the boundary that it belongs to."""
        path = directory / _RESULT
        if not path.is_file():  # it ended with a status that says why
            return None
        result = json.loads(path.read_text(encoding="utf-8"))
        session.extra["verifiers"] = {name: result[name] for name in ("stops", "metrics", "errors") if result[name]}
        if result["ok"]:
            return float(result["reward"])
        first = next(iter(result["errors"]), {"type": "no error", "message": f"stopped by {result['stops']}"})
        raise BOUNDARIES.get(first["type"], LoopFailure)(f"verifiers: {first['type']}: {first['message']}")
