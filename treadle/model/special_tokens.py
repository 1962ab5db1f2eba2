"""Tokens that the files beside tokenizer.json ask for.

Owns how `tokenizer_config.json` and `special_tokens_map.json` name special tokens, in all the spellings of past
versions, and the order in which those that the vocabulary lacks are added to it. Knows nothing about templates.
Invariant: the tokenizer that `add_to` leaves behind has the added tokens, flags and ids that transformers gives it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

Token = str | AddedToken

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names every tokenizer knows; other keys that end with `_token` are names of one model."""

EXTRA, OLD_EXTRA, DECODER = "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the files ask for. The order is that in which tokens are added."""

    named: Mapping[str, Token]
    extra: Sequence[Token]
    added: Mapping[int, AddedToken] | None
    """Every added token by its id; None where tokenizer.json alone knows them."""

    @property
    def variables(self) -> dict[str, str]:
        """The named tokens as chat templates see them."""
        return {name: str(token) for name, token in self.named.items()}

    def add_to(self, core: Tokenizer) -> None:
        """Add what is not yet there, and give what is there the flags that the files want."""
        pending: list[Token] = [token for _, token in sorted((self.added or {}).items())]
        present = {token.content for token in core.get_added_tokens_decoder().values()} | set(map(str, pending))
        for token in (*self.named.values(), *self.extra):
            if str(token) not in present and token not in pending:
                pending.append(token)
        named = set(map(str, self.named.values()))
        core.add_tokens([_as_special(token) if _is_special(token, named) else token for token in pending])

    def repeat_on(self, core: Tokenizer) -> None:
        """Give every special token the flags of a plain special token, whatever the files say."""
        contents = dict.fromkeys(map(str, (*self.named.values(), *self.extra)))
        core.add_tokens([AddedToken(content, special=True) for content in contents])


def _is_special(token: Token, named: set[str]) -> bool:
    return isinstance(token, str) or token.content in named


def _as_special(token: Token) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(**{**token.__getstate__(), "special": True})


def read_special_tokens(
    config: Mapping[str, Any], special_map: Mapping[str, Any], defaults: Mapping[str, str]
) -> SpecialTokens:
    """The tokens of tokenizer_config.json, with special_tokens_map.json where the former lists no added tokens.

    A ValueError or TypeError means that the files hold something else than tokens.
    """
    values = {**defaults, **config}
    _adopt_old_extra(values)
    own = _pop_own_names(values)
    if DECODER not in config:
        _merge_map(values, special_map, own)
    values = {key: _revive(value) for key, value in values.items()}
    named = {name: _check(name, values[name]) for name in NAMES if values.get(name) is not None}
    for name in [*(key for key in values if _is_own_name(key) and isinstance(values[key], Token)), *own]:
        named[name] = _check(name, own.get(name, values.get(name)))
    return SpecialTokens(named, _read_extra(values), _read_decoder(config))


def _adopt_old_extra(values: dict[str, Any]) -> None:
    if OLD_EXTRA in values and not values.get(EXTRA):
        values[EXTRA] = values.pop(OLD_EXTRA)


def _is_own_name(key: str) -> bool:
    return key.endswith("_token") and key not in NAMES


def _pop_own_names(values: dict[str, Any]) -> dict[str, Any]:
    """Names that only this model has, such as image_token."""
    own = {key: values.pop(key) for key in list(values) if _is_own_name(key) and isinstance(values[key], str)}
    if isinstance(values.get(EXTRA), dict):
        own.update(values.pop(EXTRA))
    return own or dict(values.get("model_specific_special_tokens") or {})


def _merge_map(values: dict[str, Any], special_map: Mapping[str, Any], own: dict[str, Any]) -> None:
    """What special_tokens_map.json says comes before tokenizer_config.json; lists of extra tokens are joined."""
    for key, value in special_map.items():
        if key == EXTRA and isinstance(value, list):
            old = list(values.get(EXTRA) or ())
            tokens = [AddedToken(**token, special=True) if isinstance(token, dict) else token for token in value]
            values[key] = [*old, *(token for token in tokens if token not in old)]
        elif isinstance(value, dict) and key != EXTRA:
            values[key] = AddedToken(**{**value, "special": True})
        else:
            values[key] = value
    if isinstance(values.get(EXTRA), dict):
        own.update(values.pop(EXTRA))


def _revive(value: Any) -> Any:
    """AddedTokens are saved as objects that name their type."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{field: entry for field, entry in value.items() if field != "__type"})
    return [_revive(entry) for entry in value] if isinstance(value, list) else value


def _check(name: str, value: Any) -> Token:
    revived = _revive(value)
    if not isinstance(revived, Token):
        raise ValueError(f"{name} must be a text or an AddedToken, got {value!r}")
    return revived


def _read_extra(values: Mapping[str, Any]) -> list[Token]:
    listed = values[EXTRA] if EXTRA in values else values.get(OLD_EXTRA)
    if listed is not None and not isinstance(listed, list):
        raise ValueError(f"{EXTRA} must be a list of tokens, got {listed!r}")
    return [_check(EXTRA, token) for token in listed or ()]


def _read_decoder(config: Mapping[str, Any]) -> dict[int, AddedToken] | None:
    if DECODER not in config:
        return None
    return {int(at): AddedToken(**fields) for at, fields in config[DECODER].items()}
