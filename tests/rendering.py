"""Full rendering by transformers and the Rust core alone: special tokens of the template, and none from contents.

The reference for the renderer. In contents the first character of every special token is replaced by a stand-in, the
template is applied, the text is cut at special tokens, and the pieces are encoded with the core's own switch
(`encode_special_tokens`) that reads no special tokens in text.
"""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from treadle.types import Message

STAND_INS = {"<": "\ue001", "[": "\ue002", "z": "\ue003"}


def encode_full(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
    """The ids of a conversation and the next header."""
    special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    pattern = re.compile("|".join(re.escape(token.content) for token in sorted(special, key=lambda t: -len(t.content))))

    def hide(text: str) -> str:
        while (found := pattern.search(text)) is not None:
            text = text[: found.start()] + STAND_INS[found[0][0]] + text[found.start() + 1 :]
        return text

    shown = _walk(copy.deepcopy(list(messages)), hide)
    text = tokenizer.apply_chat_template(shown, tools=list(tools) or None, add_generation_prompt=True, tokenize=False)
    core = copy.deepcopy(tokenizer.backend_tokenizer)
    core.encode_special_tokens = True
    ids: list[int] = []
    for piece in re.split(f"({pattern.pattern})", text):
        if pattern.fullmatch(piece):
            ids.append(tokenizer.convert_tokens_to_ids(piece))
        else:
            for letter, stand_in in STAND_INS.items():
                piece = piece.replace(stand_in, letter)
            ids += core.encode(piece, add_special_tokens=False).ids
    return ids


def _walk(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _walk(item, change) for key, item in value.items()}
    return [_walk(item, change) for item in value] if isinstance(value, list) else value
