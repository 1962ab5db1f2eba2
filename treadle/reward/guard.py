"""Special tokens in text that a reward model will read: who spells one out in a trajectory does not get to use it.

Owns the list of such tokens and how they are broken up. Refuses to know templates and models.
Invariant: where foreign text touches a special token's spelling, that spelling is gone; all other text is unchanged.

A policy is paid for what a reward model says. Without this, an answer that spells out the end of a turn could go on in
the judge's own voice.
"""

import re
from collections.abc import Mapping
from typing import Any

from treadle.data.encoder import special_tokens
from treadle.model.tokenizer import ChatTokenizer

_WORD = r"[^<>\s]{1,64}"
_NAMES = (
    "s|bos|eos|pad|unk|mask|cls|sep|eod|eop|sop|think|tools|image|video|audio|AI|Human|SPECIAL|SYS|human|bot|system|user"
    "|assistant|tool"
)
_USUAL = re.compile(
    "|".join(
        (
            rf"[<＜][|｜]{_WORD}?[|｜]?[>＞]",  # <|im_end|>, <｜User｜>, <|turn>
            rf"[<＜]{_WORD}?[|｜][>＞]",  # <turn|>
            r"<<?/?(?:" + _NAMES + r")>>?",  # <s>, </s>, <bos>, <<SYS>>
            r"</?[A-Za-z]{1,32}(?:[_:▁-][A-Za-z0-9]{1,32}){1,8}>",  # <start_of_turn>, <tool_call>, <extra_id_0>
            r"<(?:unused|reserved|extra|special|row|col|loc|seg)_?[0-9]+>",
            r"\[/?[a-z]?[A-Z][A-Z_]{2,32}[0-9]{0,4}\]",  # [INST], [TOOL_CALLS], [gMASK]
            r"\][<~][^\s]{1,32}[\[\]>]|\[e~\[",  # MiniMax: ]~b], [e~[, ]<]minimax[>[
        )
    )
)
"""How special tokens are spelled by the families of today, for a server whose tokenizer is not here. It is better to
break up something else that looks like one than to let one through: a judge reads `< tool_call>` as well."""

_MAX_ROUNDS = 8


class Guard:
    """The special tokens of one model, or, where they are not known, what such tokens look like."""

    def __init__(self, tokens: re.Pattern[str] | None) -> None:
        self._tokens = tokens

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> "Guard":
        """For a model whose tokenizer this is."""
        spellings = sorted(filter(None, special_tokens(tokenizer)), key=len, reverse=True)
        return cls(re.compile("|".join(map(re.escape, spellings))) if spellings else None)

    @classmethod
    def usual(cls) -> "Guard":
        """For a model behind a server."""
        return cls(_USUAL)

    def clean(self, value: Any) -> Any:
        """Foreign text, or a message or a list of foreign text, without special tokens; a message keeps its role."""
        if isinstance(value, str):
            return self.settle(value, bytes(b"\1" * len(value)))
        if isinstance(value, Mapping):
            return {name: item if name == "role" else self.clean(item) for name, item in value.items()}
        return [self.clean(item) for item in value] if isinstance(value, list | tuple) else value

    def settle(self, text: str, foreign: bytes) -> str:
        """The text without those special tokens that `foreign`, one byte a character, has a part in."""
        for _ in range(_MAX_ROUNDS):
            broken, mask = self._break(text, foreign)
            if broken == text:
                return text
            text, foreign = broken, mask
        return text.translate(_ONLY_WORDS)

    def _break(self, text: str, foreign: bytes) -> tuple[str, bytes]:
        """One pass. Breaking a token may lay bare another inside it, hence the rounds."""
        done, mask, end = list[str](), bytearray(), 0
        for match in self._tokens.finditer(text) if self._tokens is not None else ():
            if not any(foreign[match.start() : match.end()]):
                continue
            broken = match[0][0] + " " + match[0][1:] if len(match[0]) > 1 else " "
            done += (text[end : match.start()], broken)
            mask += foreign[end : match.start()] + b"\1" * len(broken)
            end = match.end()
        return "".join([*done, text[end:]]), bytes(mask + foreign[end:])


_ONLY_WORDS = dict.fromkeys(map(ord, "<>|[]｜"), " ")
"""The last resort against spellings that contain one another for ever."""
