"""treadle: reinforcement learning of language-model agents, where the rollout is a service of its own.

    train, train_async       train a model with your tasks, reward and tools
    sft, sft_async           fine-tune one on conversations, or on the best trajectories of a run
    rollout, rollout_async   evaluate one: sample, score, keep the trajectories
    to_yaml                  the YAML that a call of train amounts to
    Run, Evaluation          what they return
    ConfigError              what a call that cannot work raises: every mistake, with the argument and the fix
    Policy                   a model to sample from and to train by hand: sample, logprobs, forward_backward, step

Importing treadle imports none of these before they are used.
"""

__version__ = "0.2.0"

__all__ = [
    "ConfigError",
    "Evaluation",
    "Policy",
    "Run",
    "rollout",
    "rollout_async",
    "sft",
    "sft_async",
    "to_yaml",
    "train",
    "train_async",
]

_ELSEWHERE = {
    "ConfigError": ("treadle.errors", "ConfigError"),
    "Policy": ("treadle.api.research", "ResearchPolicy"),
    "rollout": ("treadle", "rollout"),
}
"""Where a name is, if not in `treadle.api` under this name: `treadle.rollout` is a package that can be called."""

TYPE_CHECKING = False  # type checkers take it for true, and nothing is imported for it
if TYPE_CHECKING:
    from treadle.api import Evaluation, Run, rollout, rollout_async, sft, sft_async, to_yaml, train, train_async
    from treadle.api.research import ResearchPolicy as Policy
    from treadle.errors import ConfigError


def __getattr__(name: str) -> object:
    """Import a name of the interface when it is first used."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    module, own = _ELSEWHERE.get(name, ("treadle.api", name))
    return import_module(f"{module}.{own}") if module == "treadle" else getattr(import_module(module), own)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
