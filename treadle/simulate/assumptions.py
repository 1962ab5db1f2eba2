"""Assumptions of a simulation: lengths and speeds, each with a unit, a default and a reason to change it.

Owns the numbers that no config holds: how long answers are, and how fast engines, tools and the trainer are. Imports
nothing heavy, so that a command can offer every number as an option.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from treadle.config import RolloutConfig

DEFAULT_TURNS = 3
"""Assistant turns of a session that uses tools, where none are given."""

DEFAULT_TOOL_TOKENS = 100

RECORDED = (
    "response_tokens",
    "length_tail",
    "prompt_tokens",
    "turns",
    "tool_s",
    "tool_tail",
    "tool_tokens",
    "no_signal",
)
"""Assumptions that a recorded run replaces."""


def _number(default: float | None, description: str, *, least: float = 0.0, most: float = inf) -> Any:
    return field(default=default, metadata={"description": description, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Defaults are those of a 7B model in bf16 on GPUs of the H100 class. None: derived from the config, see `fill`."""

    response_tokens: float | None = _number(
        None, "tokens a session samples, mean; by default the longest possible over length_tail", least=1
    )
    length_tail: float = _number(10.0, "the longest response over the mean", least=1)
    prompt_tokens: float | None = _number(None, "tokens of a prompt; by default half of rollout.prompt_length", least=1)
    turns: float | None = _number(
        None, f"assistant turns of a session; by default 1, with tools {DEFAULT_TURNS} or the limit", least=1
    )
    tool_s: float = _number(1.0, "seconds a tool takes between two turns, mean")
    tool_tail: float = _number(10.0, "the longest tool call over the mean", least=1)
    tool_tokens: float | None = _number(
        None, f"tokens a tool's answer adds; by default {DEFAULT_TOOL_TOKENS}, or what a quarter of the response holds"
    )
    sequence_tokens_per_s: float = _number(100.0, "tokens/s of one sequence that has an engine to itself", least=1e-9)
    engine_tokens_per_s: float = _number(
        5000.0, "tokens/s, over all sequences, that a GPU approaches as more are decoded at once", least=1e-9
    )
    prefill_tokens_per_s: float = _number(20000.0, "tokens/s of context that a GPU reads in", least=1e-9)
    train_tokens_per_s: float = _number(
        5000.0, "tokens/s that a GPU trains, everything between two steps included", least=1e-9
    )
    push_s: float = _number(5.0, "seconds until new weights have arrived")
    push_overlap: float | None = _number(
        None,
        "fraction of a push in which engines go on sampling; by default 1 for native (overlap_weight_updates), else 0",
        most=1,
    )
    no_signal: float = _number(0.0, "fraction of groups whose samples all score the same, for algorithm.filter_groups")

    def fill(self, rollout: "RolloutConfig") -> "Assumptions":
        """Assumptions with every number: those not given follow from the config. Refuses what does not fit in it."""
        turns = self.turns or _default_turns(rollout)
        calls, longest = round(turns) - 1, rollout.response_length
        tool_tokens = self.tool_tokens
        if tool_tokens is None:
            tool_tokens = min(DEFAULT_TOOL_TOKENS, longest // (4 * calls)) if calls else 0.0
        room = longest - calls * tool_tokens
        if room < turns:
            problem = (
                f"{calls} tool answers of {tool_tokens:g} tokens leave no room in rollout.response_length {longest}"
            )
            raise ConfigError([Mistake(option_name("tool_tokens"), problem, fix="fewer turns, or shorter answers")])
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        given |= {"turns": turns, "tool_tokens": tool_tokens}
        if self.push_overlap is None:
            given["push_overlap"] = float(rollout.name == "native" and rollout.overlap_weight_updates)
        given["response_tokens"] = self.response_tokens or max(1.0, room / self.length_tail)
        given["prompt_tokens"] = self.prompt_tokens or max(1.0, rollout.prompt_length / 2)
        return Assumptions(**given)


def _default_turns(rollout: "RolloutConfig") -> float:
    multi_turn = rollout.multi_turn
    uses_tools = bool(multi_turn.tools or multi_turn.mcp_servers or multi_turn.environment)
    return float(min(DEFAULT_TURNS, multi_turn.max_assistant_turns or DEFAULT_TURNS)) if uses_tools else 1.0


def check_assumptions(given: Assumptions) -> None:
    """Refuse numbers that mean nothing, all of them in one report."""
    mistakes = [
        Mistake(option_name(item.name), f"{value:g} is {wrong}", value)
        for item in fields(given)
        if (value := getattr(given, item.name)) is not None and (wrong := _out_of_bounds(value, item.metadata))
    ]
    if given.no_signal >= 1:
        mistakes.append(Mistake(option_name("no_signal"), "no group would ever train", given.no_signal, fix="below 1"))
    if mistakes:
        raise ConfigError(mistakes)


def _out_of_bounds(value: float, bounds: Mapping[str, float]) -> str:
    least, most = bounds["least"], bounds["most"]
    if value < least:
        return f"less than {least:g}"
    return f"more than {most:g}" if value > most else ""


def option_name(name: str) -> str:
    """The command line's name of an assumption."""
    return f"--{name.replace('_', '-')}"
