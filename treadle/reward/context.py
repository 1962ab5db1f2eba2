"""Reward context: the engine, renderer and engine starter of a rollout, for its reward models.

Owns the narrow view, so that reward models know neither routers nor rollouts. A scorer outside a rollout passes what it
has: `start_engines` of `treadle.rollout.engines` is enough for a judge with a model of its own.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.protocol import Gpu, TokenGenerator
from treadle.engine.replica_supervisor import StartedEngines

StartEngines = Callable[
    [RolloutConfig, ModelConfig, Renderer, str | None, Sequence[Gpu] | None], Awaitable[StartedEngines]
]
"""Starts every replica of a section. The last arguments: the key of an endpoint, and the GPUs, if some were chosen."""


@dataclass(frozen=True, slots=True)
class RewardContext:
    """All of it optional: what is missing is asked for by name when a judge needs it."""

    model: ModelConfig | None = None
    """The policy's model."""
    renderer: Renderer | None = None
    """Between the policy's messages and ids."""
    policy: TokenGenerator | None = None
    """The policy itself, for judges with `engine: {name: policy}`."""
    start_engines: StartEngines | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of endpoints, by the environment variable that holds them."""
    gpus: Mapping[str, Sequence[Gpu]] = field(default_factory=dict)
    """Those of each model that a plan gave some."""
    hidden: tuple[str, ...] = ()
    """Paths that code in sandboxed functions cannot read: the run directory."""


NO_CONTEXT = RewardContext()
"""A scorer outside a rollout."""
