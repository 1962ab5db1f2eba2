"""Tool-call parser registry: formats by name, and custom parsers by import path.

A new format that fits one of the shapes is a line in this table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from treadle.config.plugin import load_object
from treadle.errors import ConfigError, Mistake, nearest
from treadle.rollout.parsers.base import MalformedCall, Parsed, ToolParser
from treadle.rollout.parsers.formats import (
    BareJson,
    Harmony,
    PairedArguments,
    TaggedJson,
    TaggedParameters,
    name_and_call_id,
    numbered_function,
)

KEY = "rollout.multi_turn.format"

_FUNCTION = ("<function=", "</function>", "<parameter=", "</parameter>", ">")
_INVOKE = ('<invoke name="', "</invoke>", '<parameter name="', "</parameter>", '">')
_DSML = ('<｜DSML｜invoke name="', "</｜DSML｜invoke>", '<｜DSML｜parameter name="', "</｜DSML｜parameter>", '">')

PARSERS: Mapping[str, ToolParser] = MappingProxyType(
    {
        "hermes": TaggedJson("<tool_call>", "</tool_call>"),
        "jamba": TaggedJson("<tool_calls>", "</tool_calls>"),
        "granite": TaggedJson("<|tool_call|>", ""),
        "internlm": TaggedJson("<|action_start|><|plugin|>", "<|action_end|>"),
        "mistral": TaggedJson("[TOOL_CALLS]", "", "[ARGS]", name_and_call_id),
        "kimi": TaggedJson(
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
            numbered_function,
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        "deepseek_v3": TaggedJson(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "```<｜tool▁call▁end｜>",
            "\n```json",
            wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        "deepseek_v31": TaggedJson(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        "deepseek_v32": TaggedParameters(*_DSML, ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")),
        "minimax": TaggedParameters(*_INVOKE, ("<minimax:tool_call>", "</minimax:tool_call>")),
        "qwen3_coder": TaggedParameters(*_FUNCTION, ("<tool_call>", "</tool_call>")),
        "seed_oss": TaggedParameters(*_FUNCTION, ("<seed:tool_call>", "</seed:tool_call>")),
        "glm": PairedArguments("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "llama3_json": BareJson("<|python_tag|>", ";"),
        "gpt-oss": Harmony(),
    }
)


@dataclass(frozen=True, slots=True)
class CustomParser:
    """A user's parser, wrapped so that parsing never raises."""

    path: str
    marker: str
    function: Callable[[str], Parsed]
    starts: tuple[str, ...] = ()
    frames_turns: ClassVar[bool] = False

    def opening(self, name: str) -> str:
        return ""

    def parse(self, text: str) -> Parsed:
        try:
            return self.function(text)
        except Exception as error:  # noqa: BLE001  a turn that a parser cannot read is a malformed call
            problem = f"the parser {self.path} could not read this turn: {type(error).__name__}: {error}"
            return Parsed(text, (MalformedCall(problem).call(),))


def parser(name: str) -> ToolParser:
    """A format by name, or by import path of a parser class, a parser, or a function from text to `Parsed`."""
    if name in PARSERS:
        return PARSERS[name]
    if ":" in name:
        return _custom(name, load_object(name, KEY))
    known = ", ".join(PARSERS)
    fix = nearest(name, PARSERS) or f"known: {known}; or an import path, package.module:name"
    raise ConfigError([Mistake(KEY, f"there is no tool-call format {name!r}", value=name, fix=fix)])


def _custom(path: str, found: Any) -> ToolParser:
    try:
        made = found() if isinstance(found, type) else found
    except Exception as error:
        problem = f"{path!r} cannot be built without arguments: {type(error).__name__}: {error}"
        raise ConfigError([Mistake(KEY, problem, value=path)]) from error
    function = getattr(made, "parse", made)
    if not callable(function):
        problem = f"{path!r} is no parser: it has no parse(text) and cannot be called"
        raise ConfigError([Mistake(KEY, problem, value=path)])
    return CustomParser(path, getattr(made, "marker", ""), function)
