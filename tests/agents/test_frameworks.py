"""Agent frameworks, unmodified, in an environment of their own: `make test-agents` builds it.

Each program of examples/frameworks talks to the gateway; what trains is what was sampled, token by token.
"""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.agents.environment import EXAMPLES, PYTHON, needs
from tests.integration.test_gateway_agents import check_exact, config, run
from tests.rollouts import save_model
from treadle.types import Request

pytestmark = needs("python")

ROWS = {"openai_agents_sdk": 1, "langgraph_agent": 1, "smolagents_agent": 3}
"""smolagents writes turns anew as text: each request is a row of its own, and trains what was sampled for it."""


def script(request: Request, rng: Random) -> str:
    """Two calls, then an answer; to smolagents, whose calls are forced, the answer is a call too."""
    turns = sum(message["role"] == "assistant" for message in request.messages)
    if any(tool["function"]["name"] == "final_answer" for tool in request.tools):
        name, arguments = ("add", '{"a":1,  "b": 2}') if turns < 2 else ("final_answer", '{"answer": "3"}')
        return f'\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    if turns < 2:
        return '<tool_call>\n{"name": "add",  "arguments": {"a":1,  "b": 2}}\n</tool_call>'
    return "It is 3."


@pytest.mark.parametrize("name", ROWS)
def test_a_framework_trains_what_was_sampled(name: str, tmp_path: Path) -> None:
    model: Any = save_model(tmp_path / "model")
    argv = [str(PYTHON), str(EXAMPLES / "frameworks" / f"{name}.py"), "{{prompt}}"]
    section = config("program_agent", {"argv": argv}, response_length=20_000, max_model_len=40_000)
    _, recording = run(section, model, tmp_path, script)
    for trajectory in check_exact(tmp_path, recording):
        assert "3" in trajectory.extra["agent"]["stdout"]
        assert len(trajectory.rows) == ROWS[name]
        assert Counter(trajectory.extra["gateway"]["echoes"]).total() == 2
