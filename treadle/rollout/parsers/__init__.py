"""Tool-call formats: what models write, read into calls.

`parser("hermes").parse(text)` gives the calls of one assistant turn and the text around them. Parsing never raises:
a malformed call is a call with a `problem`. Text is expected with its special tokens, since several formats are
made of them. Nothing here evaluates model text; it is searched for tags and decoded as JSON.
"""

from treadle.rollout.parsers.protocol import MAX_CALL_CHARS, MAX_CALLS, Parsed, ToolParser, Untyped
from treadle.rollout.parsers.registry import PARSERS, parser

__all__ = ["MAX_CALLS", "MAX_CALL_CHARS", "PARSERS", "Parsed", "ToolParser", "Untyped", "parser"]
