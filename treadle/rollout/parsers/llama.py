"""Llama's format: a turn that is nothing but JSON objects with a name and parameters, perhaps after a tag."""

from dataclasses import dataclass

from treadle.rollout.parsers.payload import Malformed, call_of, decode, skip_blank
from treadle.rollout.parsers.protocol import MAX_CALLS, MAX_NAME_CHARS, Parsed
from treadle.rollout.parsers.scan import after_thought, limit
from treadle.types import ToolCall


@dataclass(frozen=True, slots=True)
class BareJson:
    """Objects at the start of the turn or after `tag`, apart by `separator`. An object without a name is speech."""

    tag: str
    separator: str

    @property
    def marker(self) -> str:
        return '"name"'

    def parse(self, text: str) -> Parsed:
        spoken = after_thought(text)
        tagged = text.find(self.tag, spoken)
        content, at = (text[:tagged], tagged + len(self.tag)) if tagged >= 0 else (text[:spoken], spoken)
        at = skip_blank(text, at)
        if not text.startswith("{", at) or self.marker not in text:
            return Parsed(text, ())
        calls, at = self._read(text, at)
        return Parsed(f"{content}{text[at:]}".strip(), limit(calls)) if calls else Parsed(text, ())

    def _read(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while text.startswith("{", at) and len(calls) <= MAX_CALLS:
            try:
                value, end = decode(text, at)
                if "name" not in value:
                    return calls, at
                calls.append(call_of(value))
            except Malformed as malformed:
                if text.find(self.marker, at, at + MAX_NAME_CHARS) < 0:
                    return calls, at
                calls.append(malformed.call())
                return calls, len(text)
            at = skip_blank(text, end)
            at = skip_blank(text, at + len(self.separator)) if text.startswith(self.separator, at) else at
        return calls, at
