"""Tool-call parsers: what models write, parsed into calls.

`parser("hermes").parse(text)` gives the calls of one assistant turn and the text around them. Parsing never raises:
a malformed call is a call with a `problem`. Text is expected with its special tokens, since several formats consist
of them. Nothing here evaluates model text; it is searched for tags and decoded as JSON.

    base.py       the protocol, its limits, and strict JSON decoding
    formats.py    the shapes: JSON after a tag, tagged parameters, bare JSON, harmony
    registry.py   which format has which shape and tags; a new format is usually one line there
"""

from treadle.rollout.parsers.base import MAX_CALL_CHARS, MAX_CALLS, Parsed, ToolParser, Untyped
from treadle.rollout.parsers.registry import PARSERS, parser

__all__ = ["MAX_CALLS", "MAX_CALL_CHARS", "PARSERS", "Parsed", "ToolParser", "Untyped", "parser"]
