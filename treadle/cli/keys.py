"""Keys of endpoints, from the environment variables that a config names. Nobody else reads them from there."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.config import Config


def read_keys(config: "Config") -> dict[str, str]:
    """Those that are set, by variable."""
    variables = (config.rollout.openai.api_key_env, *config.reward.api_key_variables())
    return {name: os.environ[name] for name in variables if os.environ.get(name)}
