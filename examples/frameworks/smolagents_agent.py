"""smolagents: `python smolagents_agent.py PROMPT`, with OPENAI_BASE_URL and OPENAI_API_KEY set."""

import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first
        b: second
    """
    return a + b


url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
agent = ToolCallingAgent(tools=[add], model=OpenAIServerModel("policy", api_base=url, api_key=key), max_steps=4)
print(agent.run(sys.argv[1]))
