"""A rollout small enough for any test: the golden tokenizer, a hermes template, scripts and tools."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from treadle.config import AgentConfig, ModelConfig, MultiTurnConfig, RolloutConfig, ScriptedConfig
from treadle.data.renderer import Renderer
from treadle.engine.scripted import ScriptedEngine
from treadle.types import Request, Task

GOLDEN = Path(__file__).parent / "golden"
TEMPLATE = (GOLDEN / "templates" / "hermes.jinja").read_text()
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
FINAL = "It is 3."


def save_model(directory: Path) -> ModelConfig:
    """A model directory with a tokenizer and a template, and no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    copyfile(GOLDEN / "tokenizer.json", directory / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return ModelConfig(path=str(directory))


@cache
def renderer() -> Renderer:
    with TemporaryDirectory() as directory:
        return Renderer.create(save_model(Path(directory)))


def task(uid: str = "one", **fields: Any) -> Task:
    return Task(uid, ({"role": "user", "content": f"Task {uid}"},), **fields)


def tasks(count: int) -> list[Task]:
    return [task(f"task{at}") for at in range(count)]


def rollout(**fields: Any) -> RolloutConfig:
    """A section for tests; keys of `agent`, `multi_turn` and `scripted` may be given without their section."""
    nested = {"agent": AgentConfig, "multi_turn": MultiTurnConfig, "scripted": ScriptedConfig}
    sections: dict[str, dict[str, Any]] = {name: {} for name in nested}
    for key in list(fields):
        for name, cls in nested.items():
            if hasattr(cls, key):
                sections[name][key] = fields.pop(key)
    sections["agent"].setdefault("num_workers", 0)  # so that tests can look into what tools and loops did
    built = {name: nested[name](**values) for name, values in sections.items()}
    return RolloutConfig(**{"name": "scripted", "prompt_length": 512, **built, **fields})


def engine(
    script: Callable[[Request, Random], Any] | None = None,
    *,
    name: str = "scripted-0",
    made: Renderer | None = None,
    **fields: Any,
) -> ScriptedEngine:
    made = made or renderer()
    return ScriptedEngine.create(
        ScriptedConfig(**fields), name=name, encode=made.encode, decode=made.decode, script=script
    )


def say(*answers: str) -> Callable[[Request, Random], str]:
    """A script that gives these answers turn by turn, and the last one for ever."""

    def script(request: Request, rng: Random) -> str:
        return answers[min(turns_of(request), len(answers) - 1)]

    return script


def turns_of(request: Request) -> int:
    return sum(message["role"] == "assistant" for message in request.messages)


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first
        b: second
    """
    return a + b


def texts(roles: Sequence[Any]) -> list[str]:
    return [message["role"] for message in roles]
