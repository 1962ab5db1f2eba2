"""Config: flat, typed, frozen sections whose every value knows where it came from. Imports no torch.

config = load("calculator", ["rollout.n=4"])
config.rollout.n                    # 4
config.origin("rollout.n")          # command line (rollout.n=4)
"""

from treadle.config.explain import explain
from treadle.config.load import ConfigWarning, LegacyKeyWarning, load, loads
from treadle.config.placement import Machine
from treadle.config.plan import Plan, make_plan
from treadle.config.reward import ClassifierConfig, JudgeConfig, JudgeEngineConfig, RewardConfig, RewardFunctionConfig
from treadle.config.rollout import (
    AgentConfig,
    AgentLoopConfig,
    FailureConfig,
    GatewayConfig,
    LimitsConfig,
    MCPServerConfig,
    ModelConfig,
    MultiTurnConfig,
    OpenAIConfig,
    RolloutConfig,
    SamplingConfig,
    ScriptedConfig,
)
from treadle.config.root import (
    ClusterConfig,
    Config,
    DataConfig,
    HardReplayConfig,
    LoggingConfig,
    SFTRunConfig,
    SuccessBandConfig,
    TrainConfig,
)
from treadle.config.sandbox import SandboxConfig
from treadle.config.section import Origin, Section, Source, key
from treadle.config.show import diff, to_yaml
from treadle.config.training import (
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    FilterGroupsConfig,
    FSDPActorConfig,
    FSDPConfig,
    FSDPCriticConfig,
    FSDPRefConfig,
    KLControlConfig,
    LoraConfig,
    OptimConfig,
    PolicyLossConfig,
    RefConfig,
    RolloutCorrectionConfig,
    SFTConfig,
    TrainerConfig,
    WeightsConfig,
)

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
    "GatewayConfig",
    "HardReplayConfig",
    "JudgeConfig",
    "JudgeEngineConfig",
    "KLControlConfig",
    "LegacyKeyWarning",
    "LimitsConfig",
    "LoggingConfig",
    "LoraConfig",
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
    "SFTConfig",
    "SFTRunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ScriptedConfig",
    "Section",
    "Source",
    "SuccessBandConfig",
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
