"""Config: flat, typed, frozen sections whose every value knows where it came from. Imports no torch.

config = load("calculator", ["rollout.n=4"])
config.rollout.n                    # 4
config.origin("rollout.n")          # command line (rollout.n=4)
"""

from treadle.config.actor import (
    ActorConfig,
    CriticConfig,
    FSDPActorConfig,
    FSDPConfig,
    FSDPCriticConfig,
    FSDPRefConfig,
    OptimConfig,
    PolicyLossConfig,
    RefConfig,
)
from treadle.config.algorithm import AlgorithmConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from treadle.config.cluster import ClusterConfig
from treadle.config.data import DataConfig
from treadle.config.explain import explain
from treadle.config.load import ConfigWarning, LegacyKeyWarning, load, loads
from treadle.config.logging import LoggingConfig
from treadle.config.machines import Machine
from treadle.config.model import ModelConfig
from treadle.config.origin import Origin, Source
from treadle.config.plan import Plan, make_plan
from treadle.config.reward import ClassifierConfig, JudgeConfig, JudgeEngineConfig, RewardConfig, RewardFunctionConfig
from treadle.config.rollout import (
    AgentConfig,
    AgentLoopConfig,
    FailureConfig,
    LimitsConfig,
    MCPServerConfig,
    MultiTurnConfig,
    OpenAIConfig,
    RolloutConfig,
    SamplingConfig,
    ScriptedConfig,
)
from treadle.config.root import Config, TrainConfig
from treadle.config.section import Section, key
from treadle.config.show import diff, to_yaml
from treadle.config.trainer import CheckpointConfig, TrainerConfig, WeightsConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "AgentLoopConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClassifierConfig",
    "ClusterConfig",
    "Config",
    "ConfigWarning",
    "CriticConfig",
    "DataConfig",
    "FSDPActorConfig",
    "FSDPConfig",
    "FSDPCriticConfig",
    "FSDPRefConfig",
    "FailureConfig",
    "FilterGroupsConfig",
    "JudgeConfig",
    "JudgeEngineConfig",
    "KLControlConfig",
    "LegacyKeyWarning",
    "LimitsConfig",
    "LoggingConfig",
    "MCPServerConfig",
    "Machine",
    "ModelConfig",
    "MultiTurnConfig",
    "OpenAIConfig",
    "OptimConfig",
    "Origin",
    "Plan",
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SamplingConfig",
    "ScriptedConfig",
    "Section",
    "Source",
    "TrainConfig",
    "TrainerConfig",
    "WeightsConfig",
    "diff",
    "explain",
    "key",
    "load",
    "loads",
    "make_plan",
    "to_yaml",
]
