"""Tokenizer config: the special tokens and the tokenizer class that the files beside tokenizer.json ask for.

Owns how `tokenizer_config.json` and `special_tokens_map.json` name special tokens, in all the spellings of past
versions, and the order in which those that the vocabulary lacks are added to it; and which class transformers would
load a tokenizer with. Most classes take tokenizer.json as it is. Some read only its vocabulary and merges, and build
the rest anew, from what their model once shipped: the file's own normalizer and pre-tokenizer are lost. This module
knows both kinds by name, for the families that people train. It does not import transformers: its tables are compared
with those of transformers in a test. They are those of 5.18 and later; before that, Qwen 3.5 was loaded with the
pattern of Qwen 2, against its own tokenizer.json. Knows nothing about templates.
Invariants: the tokenizer that `add_to` leaves behind has the added tokens, flags and ids that transformers gives it;
`name_class` names the class `AutoTokenizer` would pick, or says that it does not know.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

AnyToken = str | AddedToken

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names every tokenizer knows; other keys that end with `_token` are names of one model."""

EXTRA, OLD_EXTRA, DECODER = "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the files ask for. The order is that in which tokens are added."""

    named: Mapping[str, AnyToken]
    extra: Sequence[AnyToken]
    added: Mapping[int, AddedToken] | None
    """Every added token by its id; None where tokenizer.json alone knows them."""

    @property
    def variables(self) -> dict[str, str]:
        """The named tokens as chat templates see them."""
        return {name: str(token) for name, token in self.named.items()}

    def add_to(self, core: Tokenizer) -> None:
        """Add what is not yet there, and give what is there the flags that the files want."""
        pending: list[AnyToken] = [token for _, token in sorted((self.added or {}).items())]
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


def _is_special(token: AnyToken, named: set[str]) -> bool:
    return isinstance(token, str) or token.content in named


def _as_special(token: AnyToken) -> AddedToken:
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
    for name in [*(key for key in values if _is_own_name(key) and isinstance(values[key], AnyToken)), *own]:
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


def _check(name: str, value: Any) -> AnyToken:
    revived = _revive(value)
    if not isinstance(revived, AnyToken):
        raise ValueError(f"{name} must be a text or an AddedToken, got {value!r}")
    return revived


def _read_extra(values: Mapping[str, Any]) -> list[AnyToken]:
    listed = values[EXTRA] if EXTRA in values else values.get(OLD_EXTRA)
    if listed is not None and not isinstance(listed, list):
        raise ValueError(f"{EXTRA} must be a list of tokens, got {listed!r}")
    return [_check(EXTRA, token) for token in listed or ()]


def _read_decoder(config: Mapping[str, Any]) -> dict[int, AddedToken] | None:
    if DECODER not in config:
        return None
    return {int(at): AddedToken(**fields) for at, fields in config[DECODER].items()}


PLAIN = "TokenizersBackend"
"""Takes tokenizer.json as it is."""

PLAIN_NAMES = frozenset({PLAIN, "PreTrainedTokenizer", "PythonBackend"})
"""Names of that class in tokenizer_config.json, without the `Fast` that some end with."""

_PLAIN_TYPES = """
    arctic deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v
    glm4v_moe granite granitemoe granitemoehybrid granitemoeshared internlm2 jamba kimi_k25 mimo_v2_flash minicpm3
    minimax_m2 ministral ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 olmo_hybrid phi3 phimoe stablelm
    step3p5
"""
_QWEN2_TYPES = "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe"
_QWEN3_5_TYPES = "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp"
_GEMMA_TYPES = "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text"

REGISTERED: Mapping[str, str] = {
    **dict.fromkeys(_PLAIN_TYPES.split(), PLAIN),
    **dict.fromkeys(_QWEN2_TYPES.split(), "Qwen2Tokenizer"),
    **dict.fromkeys(_QWEN3_5_TYPES.split(), "Qwen3_5Tokenizer"),
    **dict.fromkeys(_GEMMA_TYPES.split(), "GemmaTokenizer"),
    "hyperclovax_vision_v2": "GPT2Tokenizer",
}
"""The class of a model type, for the types that are looked into."""

UNREGISTERED = frozenset({"exaone4", "gpt_oss", "lfm2", "llama", "llama4", "seed_oss", "smollm3"})
"""Types without a class of their own: tokenizer_config.json decides."""

FORCED = frozenset({"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "hyperclovax_vision_v2"})
"""Types whose class is the registered one, whatever tokenizer_config.json names."""


@dataclass(frozen=True, slots=True)
class TokenizerBuild:
    """What a class builds around the vocabulary and merges of tokenizer.json, as JSON writes it."""

    normalizer: Mapping[str, Any]
    pre_tokenizer: Mapping[str, Any]
    decoder: Mapping[str, Any]
    defaults: Mapping[str, str]
    """Named tokens where the files name none."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of the BPE model that are not as usual; `unk_token` is the name of a token."""
    repeats: bool = False
    """Whether every special token loses its own flags at last."""

    def matches(self, core: Tokenizer, tokens: SpecialTokens) -> bool:
        """Is this what the file holds already, so that nothing is lost by taking it as it is?"""
        return (
            tokens.added in (None, core.get_added_tokens_decoder())
            and _simplify(core.normalizer) == self.normalizer
            and _simplify(core.pre_tokenizer) == self.pre_tokenizer
            and _simplify(core.decoder, decoder=True) == self.decoder
            and self._matches_model(core.model, tokens)
        )

    def _matches_model(self, model: Any, tokens: SpecialTokens) -> bool:
        if not isinstance(model, BPE):
            return False
        wanted = {**_USUAL, **self.model}
        if wanted["unk_token"] is not None:
            wanted["unk_token"] = tokens.variables.get(wanted["unk_token"])
        return wanted == {option: getattr(model, option) or _USUAL[option] for option in wanted}


_USUAL: Mapping[str, Any] = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def name_class(config: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """The class for a tokenizer_config.json and a config.json, without `Fast`; None if only transformers knows."""
    named, model_type = config.get("tokenizer_class"), model.get("model_type")
    registered = REGISTERED.get(str(model_type))
    if model_type in FORCED or registered == PLAIN:
        return registered
    is_free = model_type in UNREGISTERED
    if named is None:
        default = registered if model_type and not is_free else PLAIN
        return None if "tokenizer_class" in model else default
    named = str(named).removesuffix("Fast")
    if named in PLAIN_NAMES:
        return PLAIN
    return named if is_free or registered is not None else None


def _simplify(part: Any, *, decoder: bool = False) -> Any:
    """A part of a tokenizer as JSON, without the options that change no ids and no text."""
    return None if part is None else _drop(json.loads(part.__getstate__()), decoder)


def _drop(value: Any, decoder: bool) -> Any:
    if isinstance(value, list):
        return [_drop(entry, decoder) for entry in value]
    if not isinstance(value, dict):
        return value
    if decoder and value.get("type") == "ByteLevel":
        return {"type": "ByteLevel"}
    return {option: _drop(entry, decoder) for option, entry in value.items() if option != "trim_offsets"}


_BYTES: Mapping[str, Any] = {"type": "ByteLevel"}
_SPACE, _BAR = {"String": " "}, {"String": "▁"}

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _build_qwen(words: str, *, repeats: bool) -> TokenizerBuild:
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    bytes_of_words = {**_BYTES, "add_prefix_space": False, "use_regex": False}
    return TokenizerBuild(
        normalizer={"type": "NFC"},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, bytes_of_words]},
        decoder=_BYTES,
        defaults=dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
        repeats=repeats,
    )


def _build_gemma() -> TokenizerBuild:
    bars_to_spaces = {"type": "Replace", "pattern": _BAR, "content": " "}
    return TokenizerBuild(
        normalizer={"type": "Replace", "pattern": _SPACE, "content": "▁"},
        pre_tokenizer={"type": "Split", "pattern": _SPACE, "behavior": "MergedWithPrevious", "invert": False},
        decoder={"type": "Sequence", "decoders": [bars_to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        defaults={f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
        model={"fuse_unk": True, "byte_fallback": True, "unk_token": "unk_token"},
    )


REBUILT: Mapping[str, TokenizerBuild] = {
    "Qwen2Tokenizer": _build_qwen(_QWEN2_WORDS, repeats=True),
    "Qwen3_5Tokenizer": _build_qwen(_QWEN3_5_WORDS, repeats=False),
    "GemmaTokenizer": _build_gemma(),
}
"""The classes that build anew."""
