"""Stop strings: texts that end an answer, found while it is sampled token by token.

Owns where an answer ends that wrote one: after the token that completes it. Its ids stay, since they were sampled; its
text ends before the stop string, as in OpenAI's API and in vLLM. Knows no engine.
Invariant: a window of the last tokens is enough: the text of a window is a part of the whole text.
"""

from collections.abc import Sequence

from treadle.engine.protocol import Decode

_TOKENS_PER_LETTER = 4
"""A letter may take this many tokens, each a byte of it."""


class StopFinder:
    """Looks at the tokens of one answer as they come. `said`: those that were sampled before."""

    def __init__(self, stops: Sequence[str], decode: Decode, said: Sequence[int] = ()) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._width = _TOKENS_PER_LETTER * max(map(len, stops)) + 1
        self._window = list(said[-self._width :])
        self.seen = 0
        """How many tokens it was fed."""

    def feed(self, ids: Sequence[int]) -> int | None:
        """How many of the tokens fed so far belong to the answer, once a stop string is complete."""
        for token in ids:
            self.seen += 1
            self._window.append(token)
            del self._window[: -self._width]
            text = self._decode(self._window)
            if any(stop in text for stop in self._stops):
                return self.seen
        return None


def cut_text(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
