"""The names other code may rely on. A change here is a change for users: say it in the CHANGELOG."""

import ast
import inspect
from pathlib import Path

import pytest

import treadle
import treadle.api
import treadle.config
import treadle.errors
import treadle.types

TREADLE = "ConfigError Evaluation Policy Run rollout rollout_async sft sft_async to_yaml train train_async"

CONFIG = """
    ActorConfig AgentConfig AgentLoopConfig AlgorithmConfig CheckpointConfig ClassifierConfig ClusterConfig Config
    ConfigWarning CriticConfig DataConfig FSDPActorConfig FSDPConfig FSDPCriticConfig FSDPRefConfig FailureConfig
    GatewayConfig LoraConfig
    FilterGroupsConfig HardReplayConfig JudgeConfig JudgeEngineConfig KLControlConfig LegacyKeyWarning LimitsConfig
    LoggingConfig SuccessBandConfig
    MCPServerConfig Machine ModelConfig MultiTurnConfig OpenAIConfig OptimConfig Origin Plan PolicyLossConfig
    SamplingConfig SandboxConfig ScriptedConfig
    RefConfig RewardConfig RewardFunctionConfig RolloutConfig RolloutCorrectionConfig SFTConfig SFTRunConfig
    Section Source TrainConfig TrainerConfig WeightsConfig diff explain key load loads make_plan to_yaml
"""

ERRORS = """
    Boundary BudgetSpent ConfigError DeadlineError EngineFailure EnginesLost EnvironmentFailure Failure LoopFailure
    Mistake MisuseError NotFiniteError PromptFailure RequestRefused RewardFailure RowFull RunError SandboxFailure
    ToolFailure
    TreadleError blame nearest
"""

TYPES = """
    Batch Completion Group Message NOTHING OnTokens Outcome Provenance RecordedCompletion Request Row SamplingParams
    Score Status StopReason Task Timing ToolCall ToolResult ToolStatus Trajectory Turn
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


def test_the_names_of_treadle():
    assert treadle.__all__ == sorted(TREADLE.split())
    assert all(callable(getattr(treadle, name)) for name in treadle.__all__)
    assert set(treadle.__all__) <= set(dir(treadle))
    assert {*inspect.signature(treadle.train).parameters} == {*inspect.signature(treadle.train_async).parameters}
    assert {*inspect.signature(treadle.api.rollout).parameters} == {
        *inspect.signature(treadle.rollout_async).parameters
    }


def test_the_rollout_is_a_package_that_can_be_called():
    assert inspect.ismodule(treadle.rollout)
    with pytest.raises(treadle.errors.ConfigError, match="model: is required"):
        treadle.rollout(tasks=[{"prompt": "1+1="}], run_dir="runs/nothing")


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
