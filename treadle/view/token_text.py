"""Token text: the bytes behind each token id, by the run's own tokenizer, and what the text would be encoded again.

Owns how ids become text: half a character is bytes, never a question mark. Runs no code of a model's directory.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

from treadle.config.rollout import ModelConfig
from treadle.errors import RunError

_Span = tuple[int, int, int]
"""Where a token begins and ends in bytes, and its id."""


class TokenText:
    """The bytes behind each token id, by the run's own tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._core = tokenizer.backend_tokenizer
        self._added = {int(id): str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        decoder = repr(self._core.decoder)
        self._byte_level = "ByteLevel" in decoder
        self._spaces = "Metaspace" in decoder or "▁" in decoder
        self._known: dict[int, bytes] = {}

    def bytes_of(self, id: int) -> bytes:
        """Nothing for an id that the vocabulary does not have."""
        found = self._known.get(id)
        if found is None:
            found = self._known[id] = self._read(id)
        return found

    def encode_again(self, ids: Sequence[int]) -> list[list[int] | None]:
        """For each token, what stands in its place when the text of all is encoded again, as in a trainer that is given
        text: None where it is the same token; else the tokens that begin within it, none where an earlier covers it.
        What is not whole characters cannot be encoded again: nothing stands there, and what is beside it is read apart.
        """
        pieces = [self.bytes_of(id) for id in ids]
        found: list[list[int] | None] = [[] if decoded(piece) is None else None for piece in pieces]
        for first, last in _whole_characters(pieces):
            found[first:last] = self._compare(ids[first:last], pieces[first:last])
        return found

    def _compare(self, ids: Sequence[int], pieces: Sequence[bytes]) -> list[list[int] | None]:
        """`encode_again` of tokens that are whole characters together."""
        there = self._encode_between(ids, pieces)
        same, found, at = set(there), list[list[int] | None](), 0
        for begin, end, id in _spans(pieces, ids):
            inside = []
            while at < len(there) and there[at][0] < end:
                inside.append(there[at][2])
                at += 1
            found.append(None if (begin, end, id) in same else inside)
        return found

    def _encode_between(self, ids: Sequence[int], pieces: Sequence[bytes]) -> list[_Span]:
        """The text encoded again: as a whole, or, where that does not line up, between its special tokens, each part
        by itself: some tokenizers put a space behind every special token.
        """
        whole = self._line_up(b"".join(pieces))
        if whole is not None:
            return whole
        found, offset = list[_Span](), 0
        for is_added, places in groupby(range(len(ids)), key=lambda at: ids[at] in self._added):
            part = list(places)
            text = b"".join(pieces[at] for at in part)
            if is_added:
                spans = _spans([pieces[at] for at in part], [ids[at] for at in part])
            else:
                spans = self._line_up(text) or self._encode(text)
            found += [(begin + offset, end + offset, id) for begin, end, id in spans]
            offset += len(text)
        return found

    def _line_up(self, text: bytes) -> list[_Span] | None:
        """The text encoded again, without the space that a tokenizer may put before it; None where bytes differ."""
        spans = self._encode(text)
        if self._bytes_of(spans) == text:
            return spans
        if self._bytes_of(spans) != b" " + text:
            return None
        if text.startswith(b" "):  # its own space is the one that is put before the rest
            spans = self._encode(text[1:])
            return spans if self._bytes_of(spans) == text else None
        return [
            (max(begin - 1, 0), end - 1, id if begin else self._without_space(id))
            for begin, end, id in spans
            if end > 1  # not the space alone
        ]

    def _encode(self, text: bytes) -> list[_Span]:
        again = self._core.encode(text.decode(), add_special_tokens=False).ids
        return _spans([self.bytes_of(id) for id in again], again)

    def _bytes_of(self, spans: Sequence[_Span]) -> bytes:
        return b"".join(self.bytes_of(id) for _, _, id in spans)

    def _without_space(self, id: int) -> int:
        """The token of the same letters without the space before them, where the vocabulary has it."""
        other = self._core.token_to_id(self._core.id_to_token(id)[1:])
        return id if other is None else int(other)

    def _read(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        piece: str | None = self._core.id_to_token(id) if id >= 0 else None
        if piece is None:
            return b""
        if self._byte_level and all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return (piece.replace("▁", " ") if self._spaces else piece).encode("utf-8", "surrogatepass")


def _whole_characters(pieces: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """The stretches of tokens whose bytes are whole characters together: first token, and the one behind the last."""
    stretches = [(0, len(pieces))]
    while stretches:
        first, last = stretches.pop()
        try:
            b"".join(pieces[first:last]).decode()
        except UnicodeDecodeError as error:
            ends = list(accumulate(map(len, pieces[first:last])))
            broken = first + bisect_right(ends, error.start)
            stretches += [(broken + 1, last), (first, broken)]
        else:
            if first < last:
                yield first, last


def _spans(pieces: Sequence[bytes], ids: Sequence[int]) -> list[_Span]:
    """Where each token begins and ends in the bytes, and its id."""
    ends = list(accumulate(map(len, pieces)))
    return list(zip([0, *ends[:-1]], ends, ids, strict=True)) if ends else []


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return letters | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_run_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of a run. Runs no code of a model's directory, whatever the run's config trusts."""
    from treadle.model.light_tokenizer import load_light_tokenizer
    from treadle.model.tokenizer import load_tokenizer, resolve_model_path

    if not model.trust_remote_code:
        return load_tokenizer(model)
    light = load_light_tokenizer(resolve_model_path(model.tokenizer_path or model.path))
    if light is None:
        raise RunError(
            "this tokenizer is code of the model's directory (model.trust_remote_code), which is not run here"
        )
    return light


def shown_piece(piece: bytes) -> str:
    text = decoded(piece)
    return f"⟨{piece.hex(' ')}⟩" if text is None else text


def decoded(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
