"""Token text: the bytes behind each token id, by the run's own tokenizer, and what the text would be encoded again.

Owns how ids become text: half a character is bytes, never a question mark. Runs no code of a model's directory.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from treadle.config.rollout import ModelConfig
from treadle.errors import RunError


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
        What is not whole characters cannot be encoded again: nothing stands there.
        """
        pieces = [self.bytes_of(id) for id in ids]
        text = decoded(b"".join(pieces))
        if text is None:
            return [[] if decoded(piece) is None else None for piece in pieces]
        again = self._core.encode(text, add_special_tokens=False).ids
        there = _spans([self.bytes_of(id) for id in again], again)
        same, found, at = set(there), list[list[int] | None](), 0
        for begin, end, id in _spans(pieces, ids):
            inside = []
            while at < len(there) and there[at][0] < end:
                inside.append(there[at][2])
                at += 1
            found.append(None if (begin, end, id) in same else inside)
        return found

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


def _spans(pieces: Sequence[bytes], ids: Sequence[int]) -> list[tuple[int, int, int]]:
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
