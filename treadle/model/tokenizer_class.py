"""The class that transformers would load a tokenizer with, and what that class makes of tokenizer.json.

Most classes of transformers take the file as it is. Some read only its vocabulary and merges, and build the rest anew,
from what their model once shipped: the file's own normalizer and pre-tokenizer are lost. This module knows both kinds
by name, for the families that people train, and knows nothing about the others. It does not import transformers: its
tables are compared with those of transformers in a test. They are those of 5.18 and later; before that, Qwen 3.5 was
loaded with the words of Qwen 2, against its own tokenizer.json.
Invariant: `name_class` names the class `AutoTokenizer` would pick, or says that it does not know.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from treadle.model.special_tokens import SpecialTokens

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
class Build:
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


def _build_qwen(words: str, *, repeats: bool) -> Build:
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    bytes_of_words = {**_BYTES, "add_prefix_space": False, "use_regex": False}
    return Build(
        normalizer={"type": "NFC"},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, bytes_of_words]},
        decoder=_BYTES,
        defaults=dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
        repeats=repeats,
    )


def _build_gemma() -> Build:
    bars_to_spaces = {"type": "Replace", "pattern": _BAR, "content": " "}
    return Build(
        normalizer={"type": "Replace", "pattern": _SPACE, "content": "▁"},
        pre_tokenizer={"type": "Split", "pattern": _SPACE, "behavior": "MergedWithPrevious", "invert": False},
        decoder={"type": "Sequence", "decoders": [bars_to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        defaults={f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
        model={"fuse_unk": True, "byte_fallback": True, "unk_token": "unk_token"},
    )


REBUILT: Mapping[str, Build] = {
    "Qwen2Tokenizer": _build_qwen(_QWEN2_WORDS, repeats=True),
    "Qwen3_5Tokenizer": _build_qwen(_QWEN3_5_WORDS, repeats=False),
    "GemmaTokenizer": _build_gemma(),
}
"""The classes that build anew."""
