"""Stands in for a model: writes the function, tries it in its box, hands it in; at times it forgets the empty case."""

import json
from random import Random

from treadle.types import Request

BODIES = {
    "double": ("    return [2 * item for item in items]", "    return items + items"),
    "longest": ("    return max(words, key=len, default='')", "    return max(words, key=len)"),
}


def answer(request: Request, rng: Random) -> str:
    """The next turn."""
    prompt = next(message["content"] for message in request.messages if message["role"] == "user")
    name = next(name for name in BODIES if name in prompt)
    argument = "items" if name == "double" else "words"
    turns = sum(message["role"] == "assistant" for message in request.messages)
    if turns == 0:
        source = f"def {name}({argument}):\n{BODIES[name][rng.random() < 0.5]}\n"
        return call("edit", path="solution.py", old="", new=source)
    if turns == 1:
        return call("bash", command="python3 -c 'import solution; print(dir(solution)[-1])'")
    return call("submit", files=["solution.py"])


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
