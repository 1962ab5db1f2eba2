"""Agent program of the chaos runs: the calculator's agent over HTTP, with nothing but the standard library.

Slow enough that attacks, checkpoints and weight updates find conversations half done.
"""

import json
import os
import re
import sys
import time
import urllib.request
from typing import Any
from zlib import crc32

MAX_TURNS = 4
_OPERATION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")
_TOOL = {
    "name": "calculate",
    "description": "Work out one operation on two whole numbers.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def work_out(expression: str) -> str:
    """As the calculator's own tool, which this process does not import."""
    found = _OPERATION.fullmatch(expression)
    if found is None:
        raise ValueError("write two whole numbers with +, - or * between them")
    left, sign, right = int(found[1]), found[2], int(found[3])
    return str(left + right if sign == "+" else left - right if sign == "-" else left * right)


def calculate(arguments: str) -> str:
    """The result of a call, or what is wrong with it."""
    time.sleep(crc32(arguments.encode()) % 16 / 10)
    try:
        return work_out(json.loads(arguments)["expression"])
    except (KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def ask(messages: list[Any]) -> Any:
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": _TOOL}]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]


def main() -> None:
    messages = json.loads(sys.argv[1])
    for _ in range(MAX_TURNS):
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            result = calculate(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


if __name__ == "__main__":
    main()
