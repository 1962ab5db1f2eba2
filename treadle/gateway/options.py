"""Gateway options: which options of a request hold, which are refused by name, and which the run's settings override.

Owns the rules that the dialects' tables are read by. Invariant: an option that is given is acted on, or refused, or
counted; none is lost in silence, and what is counted has a name that was sent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.gateway.request import refuse

NO_EFFECT = frozenset(
    [
        *("metadata", "client_metadata", "user", "store", "safety_identifier", "cache_control", "service_tier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction", "betas"),
    ]
)
"""Options that say nothing about the answer: bookkeeping, and hints for speed."""

CONSTRAINED = "constrained decoding would train the model on tokens that it did not choose"
_UNSENT = "logprobs are recorded with the trajectory and not sent"
CONSTRAINING = (
    *("logit_bias", "structured_outputs", "structural_tag", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_decoding", "grammar", "ebnf", "regex", "json_schema", "allowed_token_ids"),
    *("bad_words", "min_tokens", "ignore_eos", "logits_processors", "use_beam_search"),
)
"""Options of the APIs, and of servers that clients know, which take tokens from the model's choice."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(CONSTRAINING, CONSTRAINED),
    "stop_token_ids": "give texts as stop strings: ids are those of one tokenizer",
    "continue_final_message": "this gateway does not go on with a message",
    "logprobs": _UNSENT,
    "top_logprobs": _UNSENT,
    "prompt_logprobs": _UNSENT,
}
"""Refused in every dialect: each would change the answer."""

INSIDE: Mapping[str, frozenset[str]] = {
    "stream_options": frozenset(["include_usage", "include_obfuscation"]),
    "tool_choice": frozenset(["type", "name", "function"]),
    "chat_template_kwargs": frozenset(),
    "text": frozenset(["format"]),
}
"""Options that hold options, and which of those are acted on or have no effect; the others are counted one by one."""

TOOL_KEYS = frozenset(["type", "function", "name", "description", "parameters", "input_schema", "cache_control"])

ASKED = frozenset(
    ["max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "n", "tool_choice"]
)
"""Options that hold, and whose values are recorded beside those of the options that do not."""


@dataclass(frozen=True, slots=True)
class OptionRules:
    """What a dialect does with the options of a request; all that it does not name is counted."""

    acted_on: frozenset[str]
    refused: Mapping[str, str]
    tool_keys: frozenset[str] = TOOL_KEYS

    def read(self, body: Mapping[str, Any]) -> "RequestOptions":
        """RequestError for an option that is refused, by its name."""
        for option, why in self.refused.items():
            if body.get(option):
                raise refuse(option, why)
        ignored = dict(self._find_ignored(body))
        asked = {option: value for option, value in body.items() if option in ASKED and value is not None}
        return RequestOptions(tuple(ignored), {**asked, **ignored})

    def _find_ignored(self, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for option, value in body.items():
            if value is None or option in NO_EFFECT or option in self.refused:
                continue
            if option in INSIDE and isinstance(value, dict):
                yield from _find_others(option, value, INSIDE[option])
            elif option not in self.acted_on:
                yield option, value

    def read_tools(self, tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Options of functions that have no effect, by name, with the first value of each."""
        found: dict[str, Any] = {}
        for tool in tools:
            inner = tool.get("function")
            for part in (tool, inner) if isinstance(inner, dict) else (tool,):
                for name, value in _find_others("tools[]", part, self.tool_keys):
                    if value is not False:
                        found.setdefault(name, value)
        return found


def _find_others(option: str, value: Mapping[str, Any], known: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if name not in known and item is not None:
            yield f"{option}.{name}", item


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request that are counted, and the values that were asked for."""

    ignored: tuple[str, ...] = ()
    """Options without effect, by name: the run's own settings hold."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Values of those, and of the options that bound and end a turn."""

    def plus(self, found: Mapping[str, Any]) -> "RequestOptions":
        """With further options that have no effect."""
        return RequestOptions((*self.ignored, *found), {**self.asked, **found}) if found else self


def rules(acted_on: Sequence[str], refused: Mapping[str, str], tool_keys: Sequence[str] = ()) -> OptionRules:
    """The rules of a dialect: the options that it acts on, and what it refuses beside what all refuse."""
    return OptionRules(frozenset(acted_on), {**REFUSED, **refused}, TOOL_KEYS | frozenset(tool_keys))
