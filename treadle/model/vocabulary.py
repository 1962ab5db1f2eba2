"""Vocabulary of a tokenizer: token by token what its ids mean, so that two models can be shown to share their ids.

Owns the comparison: the ids of all tokens, and those that are special. Classes and names of tokenizers say nothing.
Invariant: two vocabularies that are called equal read the same ids as the same text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from treadle.config.rollout import ModelConfig
from treadle.errors import ConfigError, Mistake
from treadle.model.tokenizer import load_tokenizer, resolve_model_path


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a tokenizer mean."""

    ids: Mapping[str, int]
    special: Mapping[str, int]

    @classmethod
    def of(cls, model: ModelConfig) -> "Vocabulary":
        """The vocabulary of a model's tokenizer."""
        tokenizer = load_tokenizer(model)
        ids = tokenizer.backend_tokenizer.get_vocab() if tokenizer.is_fast else cast(Any, tokenizer).get_vocab()
        added = tokenizer.added_tokens_decoder
        return cls(ids, {token.content: at for at, token in added.items() if token.special})

    def difference(self, other: "Vocabulary") -> str | None:
        """Where the two differ, in words; None where they do not."""
        if self.ids != other.ids:
            named = sorted({*self.ids, *other.ids}, key=lambda token: (self.ids.get(token, -1), token))
            differing = [token for token in named if self.ids.get(token) != other.ids.get(token)]
            first = differing[0]
            return (
                f"{len(self.ids):,} tokens and {len(other.ids):,}, of which {len(differing):,} differ: {first!r} is "
                f"{self.ids.get(first, 'absent')} in one and {other.ids.get(first, 'absent')} in the other"
            )
        if self.special != other.special:
            unlike = sorted({*self.special.items()} ^ {*other.special.items()})
            return f"the special tokens differ: {unlike[0][0]!r} is special in one of them alone"
        return None


def require_same_vocabulary(model: ModelConfig, path: str, key: str, origin: object = None) -> None:
    """Refuse another model, at `path` by the config key `key`, whose tokenizer gives other ids than the policy's."""
    resolve_model_path(path, key, origin)
    other = ModelConfig(path=path, trust_remote_code=model.trust_remote_code)
    if (difference := Vocabulary.of(model).difference(Vocabulary.of(other))) is not None:
        problem = f"its tokenizer is not that of model.path, so its probabilities are of other tokens: {difference}"
        raise ConfigError([Mistake(key, problem, path, origin, "give a model with the same tokenizer")])
