"""openai-agents: `python openai_agents_sdk.py PROMPT`, with OPENAI_BASE_URL and OPENAI_API_KEY set."""

import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
agent = Agent(name="Adder", instructions="Use the tool.", tools=[add], model=model)
print(Runner.run_sync(agent, sys.argv[1]).final_output)
