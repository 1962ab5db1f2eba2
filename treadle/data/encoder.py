"""Encoder: text to token ids and back, fast and exact; text can spell special tokens and stay text.

`Encoder` owns two shortcuts over a tokenizer's own call: its Rust core is called directly, and text is cut at special
tokens so that pieces which repeat (a system prompt with its tools) are encoded once.

`ControlTokens` owns the list of tokens that steer a model (all that the tokenizer marks as special, and those spelled
`<|…|>` or `<｜…｜>` that it does not mark; not the tags of reasoning, `<think>`), and the ids of marked text. Before a
template sees them, the strings of messages and tools get a mark inside every spelling of a control token, and inside
every part of one at their ends, which text around them might complete. So each control token that is still found in
the rendering was written by the template. What stands between those is encoded by a tokenizer without control tokens.

Knows nothing about messages, templates or roles.
Invariant: `Encoder.encode` gives exactly the ids of encoding the whole text at once; special tokens that are spelled
out become special tokens. `ControlTokens.encode` gives an id of a control token only where the template wrote it, and
for text without marks exactly the ids of the tokenizer itself; a tokenizer that cannot do either refuses text with
such spellings by name.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from secrets import token_hex
from typing import Any

from treadle.errors import PromptFailure
from treadle.model.tokenizer import ChatTokenizer

CACHED_SEGMENTS = 256

Encode = Callable[[str], list[int]]


class Encoder:
    """A tokenizer reduced to two calls."""

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

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least one token for so many that are no spaces."""
        if not self._tokenizer.is_fast:
            return sys.maxsize  # of unknown length
        return max(map(len, self._tokenizer.backend_tokenizer.get_vocab()))

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
    """The fastest exact call: the batch form of the Rust core skips the offsets, which are not used here."""
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
    """Half a surrogate pair has no bytes, hence no ids; its source meant some other character."""
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


EncodePlain = Callable[[str], list[int]]

REASONING = ("<think>", "</think>")
_MARKS = range(0xF0000, 0xFFFFE)
"""Characters for private use: the first that a conversation does not contain is its mark."""
_SPELLED = re.compile(r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<｜[^<>｜\s]+｜>")
_ANCHOR = f"\U00100000{token_hex(16)}"
"""Before text that follows a control token: some tokenizers treat the very start of a text differently. No text can
spell it out, since it is another one in every process; it is never among the ids."""


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Messages and tools whose control tokens are broken by `mark`."""

    messages: list[Any]
    tools: list[Any]
    mark: str


@dataclass(frozen=True, slots=True)
class ScannedTools:
    """Tool schemas, whether one of their strings needs a mark, and every character in them."""

    items: Sequence[Any]
    touches: bool
    letters: frozenset[str]


NO_TOOLS = ScannedTools((), False, frozenset())


@dataclass(frozen=True, slots=True)
class _Token:
    id: int
    lstrip: bool
    rstrip: bool


class ControlTokens:
    """The control tokens of one tokenizer. Built by `create`."""

    def __init__(self, tokens: Mapping[str, _Token], encode: EncodePlain | None) -> None:
        self._tokens = tokens
        self._ids = frozenset(token.id for token in tokens.values())
        self._encode = encode
        longest = sorted(tokens, key=len, reverse=True)
        spellings = "|".join(map(re.escape, longest)) or "(?!)"
        self._cut = re.compile(f"({spellings})")
        self._starts = re.compile(f"(?={spellings})")
        self._heads = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._tails = frozenset(token[start:] for token in tokens for start in range(1, len(token)))
        self._longest = len(longest[0]) if longest else 0
        self._first, self._last = (_any_letter(token[at] for token in tokens) for at in (0, -1))
        self._ends = _any_letter(token[at] for token in tokens for at in (0, -1))

    @classmethod
    def create(cls, tokenizer: ChatTokenizer, renderings: Sequence[str] = ()) -> "ControlTokens":
        """The control tokens of a tokenizer, shown to leave `renderings` as the tokenizer itself encodes them."""
        added = tokenizer.added_tokens_decoder
        tokens = {
            token.content: _Token(at, bool(token.lstrip), bool(token.rstrip))
            for at, token in added.items()
            if len(token.content) > 1 and token.content not in REASONING
            if token.special or _SPELLED.fullmatch(token.content)
        }
        plain = _make_plain(tokenizer, tokens) if tokenizer.is_fast else None
        found = cls(tokens, plain)
        whole = (list(tokenizer.encode(text, add_special_tokens=False)) for text in renderings)
        exact = plain is not None and all(
            found.encode(text) == ids for text, ids in zip(renderings, whole, strict=True)
        )
        return found if exact else cls(tokens, None)

    @property
    def ids(self) -> frozenset[int]:
        return self._ids

    def scan_tools(self, tools: Sequence[Any]) -> ScannedTools:
        """Tool schemas with what `mark` has to know of them: to be kept where many conversations show the same."""
        texts: list[str] = []
        for tool in tools:
            _add_strings(tool, texts)
        return ScannedTools(tools, self._any_touches(texts), frozenset().union(*texts))

    def mark(self, messages: Sequence[Any], tools: ScannedTools = NO_TOOLS) -> MarkedText | None:
        """The conversation with marks in it; None where no string spells a control token, or a part that could be."""
        texts: list[str] = []
        for message in messages:
            _add_message_strings(message, texts)
        if not (tools.touches or self._any_touches(texts)):
            return None
        used = set(tools.letters).union(*texts)
        mark = next((letter for letter in map(chr, _MARKS) if letter not in used), None)
        if mark is None:
            raise PromptFailure("the messages contain every character that could mark their special tokens as text")

        def change(text: str, is_key: bool) -> str:
            return text if is_key and not self._cut.search(text) else self._mark(text, mark)

        marked = [_walk_message(message, change) for message in messages]
        return MarkedText(marked, [_walk(tool, change) for tool in tools.items], mark)

    def encode(self, text: str, mark: str = "", *, after: bool = False) -> list[int]:
        """The ids of a rendering. `after`: it follows a control token."""
        if self._encode is None:
            raise PromptFailure(
                "a message spells out a special token, and this tokenizer cannot encode it as plain text: take it out "
                "of the data, or set model.allow_special_tokens=true for data you trust"
            )
        ids: list[int] = []
        pieces = self._cut.split(text)
        for at, piece in enumerate(pieces):
            if at % 2:
                ids.append(self._tokens[piece].id)
                continue
            before = self._tokens.get(pieces[at - 1]) if at else None
            behind = self._tokens.get(pieces[at + 1]) if at + 1 < len(pieces) else None
            piece = piece.lstrip() if before is not None and before.rstrip else piece
            piece = piece.rstrip() if behind is not None and behind.lstrip else piece
            ids += self._encode_piece(piece.replace(mark, "") if mark else piece, bool(at) or after)
        return ids

    def _encode_piece(self, text: str, after: bool) -> list[int]:
        assert self._encode is not None
        if not text:
            return []
        ids = self._encode(_ANCHOR + text)[1:] if after else self._encode(text)
        if not self._ids.isdisjoint(ids):
            ids = [at for letter in text for at in self._encode(_ANCHOR + letter)[1:]]
        if not self._ids.isdisjoint(ids):
            raise PromptFailure("a message spells out a special token that this tokenizer knows no other ids for")
        return ids

    def _any_touches(self, texts: Sequence[str]) -> bool:
        return self._ends.search("".join(texts)) is not None and any(map(self._touches, texts))

    def _touches(self, text: str) -> bool:
        """Whether a mark is needed. Most texts have none of the characters that spellings begin or end with."""
        if self._first.search(text) and (self._cut.search(text) or self._head_at_end(text)):
            return True
        return self._tail_at_start(text) > 0

    def _head_at_end(self, text: str) -> int:
        """How many characters at the end, white space aside, are the beginning of a control token."""
        ending = text.rstrip()[-self._longest :]
        lengths = range(1, min(self._longest, len(ending) + 1))
        return max((n for n in lengths if ending[-n:] in self._heads), default=0)

    def _tail_at_start(self, text: str) -> int:
        """How many characters at the start, white space aside, are the end of a control token."""
        beginning = text.lstrip()[: self._longest]
        if not self._last.search(beginning):
            return 0
        lengths = range(1, min(self._longest, len(beginning) + 1))
        return max((n for n in lengths if beginning[:n] in self._tails), default=0)

    def _mark(self, text: str, mark: str) -> str:
        """The text with a mark after the first character of each spelling, and inside what could become one."""
        places = {found.start() + 1 for found in self._starts.finditer(text)}
        if head := self._head_at_end(text):
            end = len(text.rstrip())
            places |= {end - n + 1 for n in range(1, head + 1) if text[end - n : end] in self._heads}
        if tail := self._tail_at_start(text):
            start = len(text) - len(text.lstrip())
            places |= {start + n - 1 for n in range(1, tail + 1) if text[start : start + n] in self._tails}
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[cuts[at] : cuts[at + 1]] for at in range(len(cuts) - 1))


def _make_plain(tokenizer: ChatTokenizer, control: Mapping[str, _Token]) -> EncodePlain:
    """The tokenizer without its control tokens, around the same vocabulary."""
    from tokenizers import AddedToken, Tokenizer

    core = tokenizer.backend_tokenizer
    plain = Tokenizer(core.model)
    if core.normalizer is not None:
        plain.normalizer = core.normalizer
    if core.pre_tokenizer is not None:
        plain.pre_tokenizer = core.pre_tokenizer
    kept = [token for _, token in sorted(core.get_added_tokens_decoder().items()) if token.content not in control]
    plain.add_tokens(kept)
    plain.add_tokens([AddedToken(_ANCHOR, normalized=False, special=False)])
    contents = [token.content for token in kept]
    renamed = {plain.token_to_id(content): core.token_to_id(content) for content in contents}

    def encode(text: str) -> list[int]:
        ids: list[int] = plain.encode_batch_fast([_mend_text(text)], add_special_tokens=False)[0].ids
        return [renamed.get(at, at) for at in ids]

    return encode


def _mend_text(text: str) -> str:
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _add_strings(value: Any, texts: list[str]) -> None:
    """Add every string of a value, keys included."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            texts.append(name)
            _add_strings(item, texts)
    elif isinstance(value, list | tuple):
        for item in value:
            _add_strings(item, texts)


def _add_message_strings(message: Mapping[str, Any], texts: list[str]) -> None:
    """Add the strings of a message, without its own role: a word that templates compare, and no text."""
    for name, item in message.items():
        texts.append(name)
        if name != "role":
            _add_strings(item, texts)


def _any_letter(letters: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of some texts; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(set(letters)))) or "(?!)")


def _walk(value: Any, change: Callable[[str, bool], str]) -> Any:
    """A value with its strings changed; keys, which name the fields that templates read, only if they must."""
    if isinstance(value, str):
        return change(value, False)
    if isinstance(value, Mapping):
        return {change(name, True): _walk(item, change) for name, item in value.items()}
    return [_walk(item, change) for item in value] if isinstance(value, list | tuple) else value


def _walk_message(message: Mapping[str, Any], change: Callable[[str, bool], str]) -> Any:
    walked = _walk(message, change)
    return {**walked, "role": message["role"]} if "role" in message else walked
