"""LangGraph: `python langgraph_agent.py PROMPT`, with OPENAI_BASE_URL and OPENAI_API_KEY set."""

import sys
import warnings

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

warnings.simplefilter("ignore")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model="policy"), [add])
result = agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
print(result["messages"][-1].content)
