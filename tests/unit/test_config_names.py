"""Names a config may use are the names the code knows: a part that is added or renamed is known to both."""

from treadle.algorithm.estimators import ESTIMATORS
from treadle.algorithm.objective import LOSSES
from treadle.config.actor import POLICY_LOSSES
from treadle.config.algorithm import GROUP_ESTIMATORS, OTHER_ESTIMATORS
from treadle.config.reward import REWARD_FUNCTIONS
from treadle.config.rollout import AGENT_LOOPS, TOOL_FORMATS
from treadle.reward.builtin import BUILTINS
from treadle.rollout.agent_loop import BUILT_IN
from treadle.rollout.parsers.registry import PARSERS


def test_agent_loops():
    assert sorted(AGENT_LOOPS) == sorted(BUILT_IN), "update AGENT_LOOPS in config/rollout.py"


def test_tool_formats():
    assert sorted(TOOL_FORMATS) == sorted(PARSERS), "update TOOL_FORMATS in config/rollout.py"


def test_reward_functions():
    assert sorted(REWARD_FUNCTIONS) == sorted(BUILTINS), "update REWARD_FUNCTIONS in config/reward.py"


def test_advantage_estimators():
    known = sorted((*GROUP_ESTIMATORS, *OTHER_ESTIMATORS))
    assert known == sorted(ESTIMATORS), "update the estimators in config/algorithm.py"


def test_policy_losses():
    assert sorted(POLICY_LOSSES) == sorted(LOSSES), "update POLICY_LOSSES in config/actor.py"
