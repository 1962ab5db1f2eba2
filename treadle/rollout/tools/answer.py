"""From what a tool returned to what the model reads.

Owns the text form of values and the cap on its length. A string is itself, a `ToolResult` keeps its reward and extra
fields, everything else is JSON.
Invariant: the text can be encoded as UTF-8.
"""

import json
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal

from treadle.errors import ToolFailure
from treadle.types import ToolResult

Side = Literal["left", "middle", "right"]


@dataclass(frozen=True, slots=True)
class Cap:
    """How many characters of an answer are kept, and which part of a longer one is cut out."""

    characters: int
    side: Side

    def cut(self, text: str) -> str:
        """The kept part of an over-long text, with a mark where the rest was that says how much is gone."""
        gone = len(text) - self.characters
        mark = f"[{gone} characters cut]"
        if self.side == "left":
            return f"{mark}\n{text[gone:]}"
        if self.side == "right":
            return f"{text[: self.characters]}\n{mark}"
        head = (self.characters + 1) // 2
        return f"{text[:head]}\n{mark}\n{text[head + gone :]}"


def to_result(returned: object, name: str, cap: Cap, seconds: float) -> ToolResult:
    """The typed result of a call that took so many seconds."""
    result = returned if isinstance(returned, ToolResult) else None
    text = result.text if result else returned if type(returned) is str else to_text(returned, name)
    if not text.isascii():
        text = _encodable(text)
    truncated = len(text) > cap.characters
    if truncated:
        text = cap.cut(text)
    if result is None:
        return ToolResult(text, seconds=seconds, truncated=truncated)
    return ToolResult(text, result.status, result.reward, result.extra, seconds, truncated or result.truncated)


def to_text(value: object, name: str) -> str:
    """A returned value as text; a ToolFailure names the tool if there is no such text."""
    if isinstance(value, str):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailure(f"{name} returned a {type(value).__name__} that is no JSON: {error}") from error


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"a {type(value).__name__} is no str, number, list, dict, dataclass or ToolResult")


def _encodable(text: str) -> str:
    """The text with what UTF-8 cannot say, such as the odd bytes of a file name, replaced."""
    return text.encode(errors="replace").decode()
