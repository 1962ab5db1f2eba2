"""Tiny model of the same kind: few layers, small matrices, short thresholds, random weights.

Owns which numbers of a Hugging Face config are sizes, and may become small, and which are features, and stay: kinds of
layers, ratios of heads, kinds of rope, norms, biases, caps. Lengths at which something changes (windows, chunks, the
positions that rope names) become so short that rows of some dozen tokens cross them. Knows no parity check.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from treadle.model.rope import rope_threshold

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LONGEST = 56
"""Tokens of the longest row that a small model is meant to be tried on: more than every threshold below."""

HIDDEN, HEADS, HEAD, INNER, VOCABULARY, EXPERTS = 64, 4, 16, 48, 128, 8
WINDOW, CHUNK, THRESHOLD, POSITIONS = 9, 16, 24, 64

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "n_head_kv")
_HEAD_SIZES = ("head_dim", "attention_head_dim", "kv_channels")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length", "seq_length")
_INTERVALS = ("_step", "_period", "_interval", "_freq", "_frequency")
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}

_AT_MOST: dict[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("top_k_experts", "n_group", "zero_expert_num"), 2),
    **dict.fromkeys(("topk_group", "num_kv_shared_layers", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_num_shared_experts", *_FIRST_LAYERS), 1),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "floor_scale", "attn_floor_scale"), CHUNK),
}
"""Numbers that become small where they are larger: one expert, or none, stays that."""


class CannotShrink(Exception):
    """No small model of this kind can be made; says why."""


def shrink(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """A config of the same kind, for a model of some hundred thousand weights."""
    values = config.to_dict()
    for name in ("quantization_config", "dtype", "torch_dtype", "architectures"):
        values.pop(name, None)
    sizes = _HeadSizes(values)
    _shrink_numbers(values, sizes)
    _shrink_layers(values)
    _shrink_positions(values, config, sizes)
    try:
        small: PreTrainedConfig = type(config).from_dict(values)
    except Exception as error:  # whatever a config class has against the sizes
        raise CannotShrink(_first_line(error)) from error
    return small


def build_small(config: "PreTrainedConfig", seed: int = 0) -> "PreTrainedModel":
    """A model of a small config with weights that make every part of it count, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    builder: Any = AutoModelForCausalLM
    foreign = type(config).__module__.startswith("transformers_modules")  # code of the model's own, trusted already
    try:
        module = builder.from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=foreign
        )
    except Exception as error:  # whatever a model class has against the sizes
        raise CannotShrink(_first_line(error)) from error
    _draw_weights(module, seed)
    return module.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def _draw_weights(module: nn.Module, seed: int) -> None:
    """Fresh models predict nearly the same everywhere, which hides mistakes: larger weights, biases and sinks."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.2 * noise)
        else:
            parameter.copy_(noise * (0.5 if id(parameter) in embeddings else parameter.shape[-1] ** -0.5))


class _HeadSizes:
    """How many heads, and of which size, a small model has: in the ratios of the whole one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        hidden, heads = _first(values, _HIDDEN), _first(values, _HEADS)
        kv_heads, size = _first(values, _KV_HEADS), _first(values, _HEAD_SIZES)
        self.hidden, self._kv_heads = hidden, kv_heads
        self._size: int | None = values.get("qk_nope_head_dim", size)
        self.heads = HEADS
        if not kv_heads or not heads or kv_heads == heads:
            self.kv_heads = HEADS
        else:
            self.kv_heads = 1 if kv_heads == 1 else 2
        usual = not (size and hidden and heads) or size * heads == hidden
        self.head = HEAD if usual else HEAD + 8
        self.exact = {
            **_LATENT,
            **dict.fromkeys(_HEADS, self.heads),
            **dict.fromkeys(_KV_HEADS, self.kv_heads),
            "rotary_dim": self.head // 2,
        }
        self.latent = "qk_rope_head_dim" in values
        """Whether keys and values come from a narrower state (MLA)."""

    def beside(self, name: str, value: int) -> int | None:
        """What becomes of further counts and sizes of heads (of some layers, of values): alike, larger or smaller."""
        if name.endswith("key_value_heads"):
            return _keep_order(value, self._kv_heads, self.kv_heads, HEADS, 1)
        if name.endswith("attention_heads"):
            return HEADS
        if name.endswith("head_dim") or name in _HEAD_SIZES:
            return _keep_order(value, self._size, HEAD if self.latent else self.head, 2 * HEAD, HEAD * 3 // 4)
        return None

    def rotary(self, partial: float) -> int:
        """Numbers of a head that are turned."""
        size = _LATENT["qk_rope_head_dim"] if self.latent else self.head
        return int(size * partial)


def _shrink_numbers(values: dict[str, Any], sizes: _HeadSizes) -> None:
    """All sizes but those of layers and positions, in sub-configs too."""
    if sizes.latent:
        for derived in ("head_dim", "qk_head_dim"):
            values.pop(derived, None)
    for name, value in values.items():
        if isinstance(value, dict) and name != "rope_parameters":
            _shrink_numbers(value, sizes)
        elif type(value) is int:
            values[name] = _small(name, value, sizes)
        elif isinstance(value, list) and value and all(type(item) is int for item in value):
            values[name] = [_small(name, item, sizes) for item in value]


def _small(name: str, value: int, sizes: _HeadSizes) -> int:
    """What becomes of a number; itself where it is a feature."""
    if name in _AT_MOST:
        return min(value, _AT_MOST[name])
    if name in sizes.exact:
        return sizes.exact[name]
    if name in _HIDDEN or name in ("word_embed_proj_dim", "embedding_size"):
        return HIDDEN if value == sizes.hidden else HIDDEN // 2
    if "intermediate_size" in name or "ffn" in name or name in ("n_inner", "inner_dim"):
        return INNER
    if name.startswith("vocab_size"):
        return VOCABULARY
    if name.endswith(("_token_id", "_token_ids")):
        return value if value < VOCABULARY else 3
    beside = sizes.beside(name, value)
    if beside is not None:
        return beside
    return min(value, 2) if name.endswith(_INTERVALS) else value


def _keep_order(value: int, known: int | None, equal: int, more: int, less: int) -> int:
    """A small number that is to `equal` as `value` is to what is known."""
    return equal if known is None or value == known else more if value > known else less


def _shrink_layers(values: dict[str, Any]) -> None:
    """Few layers, of which each kind is there once; two at least."""
    names = [name for name in _LAYER_COUNTS if isinstance(values.get(name), int)]
    if not names:
        return
    total = values[names[0]]
    patterned = any(name.endswith(_INTERVALS) and value == 2 for name, value in values.items())
    least = min(total, 4 if patterned else 3 if any(values.get(name) for name in _FIRST_LAYERS) else 2)
    if values.get("attention_types"):  # GPT-Neo: a pattern and how often it is repeated
        pattern = values["attention_types"][0][0]
        values["attention_types"], least = [[pattern, 1]], len(pattern)
    lists = [name for name, value in values.items() if isinstance(value, list) and len(value) == total > 1]
    kinds = [tuple(str(values[name][at]) for name in lists) for at in range(total)]
    chosen = {kinds.index(kind) for kind in dict.fromkeys(kinds)}
    for at in range(total):
        if len(chosen) >= least:
            break
        chosen.add(at)
    for name in lists:
        values[name] = [values[name][at] for at in sorted(chosen)]
    for name in names:
        values[name] = len(chosen)
    own = values.get("per_layer_config")  # Gemma 4: what single layers have of their own, by number
    if isinstance(own, dict):
        numbers = {old: new for new, old in enumerate(sorted(chosen))}
        values["per_layer_config"] = {numbers[int(at)]: part for at, part in own.items() if int(at) in numbers}


def _shrink_positions(values: dict[str, Any], config: "PreTrainedConfig", sizes: _HeadSizes) -> None:
    """Lengths and positions at which something changes: in reach of short rows, in the same ratios."""
    longest = _first(values, _POSITIONS)
    named = [parameters for parameters in _all_rope(values) if parameters.get("original_max_position_embeddings")]
    trained = named[0]["original_max_position_embeddings"] if named else values.get("original_max_position_embeddings")
    positions = POSITIONS
    if trained and longest:
        positions = max(THRESHOLD, round(THRESHOLD * longest / trained))
    elif rope_threshold(config) is not None:
        positions = THRESHOLD
    for name in _POSITIONS:
        if isinstance(values.get(name), int):
            values[name] = positions
    if isinstance(values.get("original_max_position_embeddings"), int):
        values["original_max_position_embeddings"] = THRESHOLD
    for parameters in _all_rope(values):
        if parameters.get("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = THRESHOLD
        turned = sizes.rotary(parameters.get("partial_rotary_factor") or 1.0) // 2
        for name in ("short_factor", "long_factor"):
            if parameters.get(name):
                parameters[name] = _spread(parameters[name], turned)


def _all_rope(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = values.get("rope_parameters") or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or ([found] if found else [])


def _spread(numbers: list[Any], count: int) -> list[Any]:
    """Some of the numbers, from the first to the last."""
    last = len(numbers) - 1
    return [numbers[round(at * last / max(1, count - 1))] for at in range(count)]


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
