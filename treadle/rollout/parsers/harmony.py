"""gpt-oss's format, as text: messages with a header that names a channel and perhaps a recipient.

A message to `functions.NAME` is a call. What the model says on the final and commentary channels is content; what it
thinks on the analysis channel is not.
"""

import re
from dataclasses import dataclass

from treadle.rollout.parsers.payload import Malformed, arguments_of, check_name
from treadle.rollout.parsers.protocol import MAX_CALL_CHARS, MAX_CALLS, Parsed
from treadle.rollout.parsers.scan import limit
from treadle.types import ToolCall

_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:call|end|return|start|channel)\|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Harmony:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`."""

    marker: str = _MESSAGE

    def parse(self, text: str) -> Parsed:
        message = text.find(_MESSAGE)
        if message < 0:
            return Parsed(text, ())
        calls: list[ToolCall] = []
        said: list[str] = []
        at = 0
        while message >= 0 and len(calls) <= MAX_CALLS:
            header, start = text[at:message], message + len(_MESSAGE)
            closing = _ENDS.search(text, start)
            at = closing.start() if closing else len(text)
            recipient = _RECIPIENT.search(header)
            if recipient:
                calls.append(_call(recipient[1], text[start:at]))
            elif "analysis" not in header:
                said.append(text[start:at])
            message = text.find(_MESSAGE, at)
        return Parsed("\n".join(said).strip(), limit(calls))


def _call(recipient: str, body: str) -> ToolCall:
    name = recipient.removeprefix("functions.")
    try:
        check_name(name)
        if len(body) > MAX_CALL_CHARS:
            raise Malformed(f"over {MAX_CALL_CHARS} characters", name)
        return ToolCall(name, arguments_of(body, name))
    except Malformed as malformed:
        return malformed.call()
