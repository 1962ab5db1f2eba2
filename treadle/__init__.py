"""treadle: reinforcement learning of language-model agents, where the rollout is a service of its own."""

__version__ = "0.1.0"
