"""Stands in for a model behind a coding agent: adds with the shell tool that it is shown, then answers."""

import json
import re
from random import Random

from treadle.types import Request

COMMANDS = {"Bash": "command", "exec_command": "cmd", "bash": "command"}
"""The shell tools of Claude Code, Codex and mini-swe-agent, and the argument that holds the command."""


def answer(request: Request, rng: Random) -> str:
    """The next turn: a command, then the answer; to mini-swe-agent the answer is a command, too."""
    asked = "\n".join(message["content"] for message in request.messages if message["role"] == "user")
    numbers = re.search(r"Add (\d+) and (\d+)", asked)
    shell = next((name for tool in request.tools if (name := tool["function"]["name"]) in COMMANDS), "")
    if numbers is None or not shell:
        return "There is nothing to add."
    results = sum(message["role"] == "tool" for message in request.messages)
    total = int(numbers[1]) + int(numbers[2])
    if not results:
        return call(shell, f"expr {numbers[1]} + {numbers[2]} | tee -a sums.txt")
    if shell == "bash" and results == 1:
        return f"It is {total}.\n" + call(shell, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat sums.txt")
    return f"It is {total}."


def call(shell: str, command: str) -> str:
    """A tool call in hermes format."""
    arguments = {COMMANDS[shell]: command}
    return f"<tool_call>\n{json.dumps({'name': shell, 'arguments': arguments})}\n</tool_call>"
