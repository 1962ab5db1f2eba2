"""Text to token ids and back, as fast as the tokenizer allows.

Owns the two shortcuts over a tokenizer's own call: its Rust core is called directly, and text is cut at special
tokens so that pieces which repeat (a system prompt with its tools) are encoded once. Knows nothing about messages.
Invariant: `encode` gives exactly the ids of encoding the whole text at once. Special tokens that are spelled out
in the text become special tokens, wherever the text comes from, as they do in a full rendering.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from treadle.model.tokenizer import ChatTokenizer

CACHED_SEGMENTS = 256

Encode = Callable[[str], list[int]]


class Encoder:
    """A tokenizer, cut down to two calls."""

    def __init__(self, tokenizer: ChatTokenizer, cuts: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self.encode_whole: Encode = _make_encode(tokenizer)
        self._decode = _make_decode(tokenizer)
        self.cuts = {token: self.encode_whole(token)[0] for token in cuts}
        """Special tokens that text may be cut at, with their ids."""
        self._cut = re.compile(f"({'|'.join(map(re.escape, sorted(cuts, key=len, reverse=True)))})") if cuts else None
        self.anchor = cuts[0] if cuts else ""
        """Put before text that follows a special token: some tokenizers treat the very start of a text differently."""
        self._segment = lru_cache(CACHED_SEGMENTS)(self._encode_segment)

    @classmethod
    def create(cls, tokenizer: ChatTokenizer, renderings: Sequence[str]) -> "Encoder":
        """An encoder that cuts at the special tokens found in `renderings`, if it can be shown to change nothing."""
        cuts = _find_cuts(tokenizer, renderings)
        encoder = cls(tokenizer, cuts)
        texts = [*renderings, *(f"{token}{text}{token}" for token in cuts for text in HOSTILE)]
        exact = all(encoder.encode(text) == encoder.encode_whole(text) for text in texts)
        return encoder if exact else cls(tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        if self._cut is None:
            return self.encode_whole(text)
        first, *rest = self._cut.split(text)
        ids = self.encode_whole(first) if first else []
        for at in range(0, len(rest), 2):
            ids.append(self.cuts[rest[at]])
            ids += self._segment(rest[at + 1])
        return ids

    def encode_after(self, text: str) -> list[int]:
        """The ids of a text that follows a special token."""
        return self.encode(self.anchor + text)[1:] if self.anchor else self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included, spaces as they are; bytes that are no UTF-8 become U+FFFD."""
        return self._decode(ids)

    def _encode_segment(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode_whole(self.anchor + text)[1:])


HOSTILE = (
    "plain words",
    " leading and trailing ",
    "\nline\n\nline\n",
    '{"key": ["value", 1.5, null], "text": "a\\nb"}',
    "naïve — 漢字 🙂 \u200b",
    "<|im_start|>user\nhi<|im_end|></s><end_of_turn><|eot_id|>[INST] <tool_call>",
    "<think>\nhm\n</think>\n\ndone",
    "<|im_<end_of",
    "  \t ",
)
"""Texts that are hard to render and encode right; every shortcut is checked against them."""


def special_tokens(tokenizer: ChatTokenizer) -> dict[str, int]:
    """The tokens a tokenizer marks as special, by their spelling."""
    return {token.content: at for at, token in tokenizer.added_tokens_decoder.items() if token.special}


def _make_encode(tokenizer: ChatTokenizer) -> Encode:
    """The fastest exact call: the batch form of the Rust core skips the offsets that nobody reads here."""
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        core.no_truncation()
        core.no_padding()

        def encode(text: str) -> list[int]:
            ids: list[int] = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
    else:

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

    def encode_any(text: str) -> list[int]:
        try:
            return encode(text)
        except (TypeError, UnicodeError):
            return encode(_mend(text))

    return encode_any


def _mend(text: str) -> str:
    """Half a surrogate pair has no bytes, hence no ids; whoever produced it meant some other character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _make_decode(tokenizer: ChatTokenizer) -> Callable[[Sequence[int]], str]:
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        return lambda ids: str(core.decode(ids, skip_special_tokens=False))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _find_cuts(tokenizer: ChatTokenizer, renderings: Iterable[str]) -> list[str]:
    """The special tokens that appear in `renderings` and always stand alone, whatever text surrounds them."""
    added = list(tokenizer.added_tokens_decoder.values())
    if any(token.single_word for token in added):
        return []
    text = "".join(renderings)
    return [token.content for token in added if token.content in text and _stands_alone(token, added)]


def _stands_alone(token: Any, added: Sequence[Any]) -> bool:
    """No other token can swallow this one or a part of it, and it swallows nothing around it."""
    if not token.special or token.normalized or token.lstrip or token.rstrip:
        return False
    spelling = token.content
    return all(
        (other is token or spelling not in other.content) and not _runs_into(other.content, spelling) for other in added
    )


def _runs_into(left: str, right: str) -> bool:
    """Does the end of `left` look like the start of `right`, so that both could claim the same characters?"""
    return any(left.endswith(right[:length]) for length in range(1, min(len(left), len(right))))
