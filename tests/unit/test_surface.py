"""The names other code may rely on. A change here is a change for users: say it in the CHANGELOG."""

import ast
from pathlib import Path

import treadle.config
import treadle.errors
import treadle.types

CONFIG = """
    ActorConfig AgentConfig AgentLoopConfig AlgorithmConfig CheckpointConfig ClassifierConfig ClusterConfig Config
    ConfigWarning CriticConfig DataConfig FSDPActorConfig FSDPConfig FSDPCriticConfig FSDPRefConfig FailureConfig
    FilterGroupsConfig JudgeConfig JudgeEngineConfig KLControlConfig LegacyKeyWarning LimitsConfig LoggingConfig
    MCPServerConfig Machine ModelConfig MultiTurnConfig OpenAIConfig OptimConfig Origin Plan PolicyLossConfig
    RefConfig RewardConfig RewardFunctionConfig RolloutConfig RolloutCorrectionConfig SamplingConfig ScriptedConfig
    Section Source TrainConfig TrainerConfig WeightsConfig diff explain key load loads make_plan to_yaml
"""

ERRORS = """
    Boundary BudgetSpent ConfigError DeadlineError EngineFailure EnvironmentFailure Failure LoopFailure Mistake
    MisuseError NotFiniteError PromptFailure RequestRefused RewardFailure RunError ToolFailure TreadleError
    blame nearest
"""

TYPES = """
    Batch Completion Group Message NOTHING Outcome Provenance RecordedCompletion Request Row SamplingParams Score Status
    StopReason Task Timing ToolCall ToolResult ToolStatus Trajectory Turn
"""


def defined(module) -> set[str]:
    """The public names a file defines itself."""
    names = set()
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets)
    return {name for name in names if not name.startswith("_")}


def test_the_names_of_config():
    assert treadle.config.__all__ == sorted(CONFIG.split())
    assert all(hasattr(treadle.config, name) for name in treadle.config.__all__)


def test_the_names_of_errors():
    assert sorted(defined(treadle.errors)) == sorted(ERRORS.split())


def test_the_names_of_types():
    assert sorted(defined(treadle.types)) == sorted(TYPES.split())


def test_every_section_a_config_can_name_is_exported():
    """`_target_: treadle.config.NAME` must also be importable by that name."""
    for cls in every_section(treadle.config.Section):
        if cls.__module__.startswith("treadle.config."):
            assert getattr(treadle.config, cls.__name__) is cls


def every_section(cls):
    for child in cls.__subclasses__():
        yield child
        yield from every_section(child)
