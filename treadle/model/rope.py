"""Rotary position embeddings whose frequencies depend on a sequence's length, fixed once for a run; length limits.

LongRoPE (Phi-3, Phi-4-mini) has one set of frequencies up to `original_max_position_embeddings` and another beyond;
dynamic NTK has frequencies of its own for every length beyond `max_position_embeddings`. Transformers chooses in every
forward, by the longest sequence in it: the same row then computes otherwise alone, packed and while it is decoded.
Here the choice is made when a model is loaded, for the longest sequence that the run allows
(`rollout.max_model_len`, else `prompt_length + response_length`); vLLM chooses LongRoPE's factors in the same way.
Invariant: after `fix_rope`, no forward changes a frequency.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from treadle.errors import MisuseError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_STRETCHED = ("linear", "dynamic", "yarn")
"""Kinds whose `factor` says how far beyond the trained length a model may go."""


def fix_rope(module: nn.Module, longest: int | None) -> None:
    """Choose all frequencies of a module for sequences of up to `longest` tokens. Calling it again changes nothing."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        named = {None: kinds} if isinstance(kinds, str) else kinds
        for layer_type, kind in dict(named).items() if isinstance(named, Mapping) else ():
            if not _depends_on_length(kind):
                continue
            if longest is None:
                raise MisuseError(f"{type(module).__name__} has {kind} rope: the run's longest sequence must be given")
            _fix(part, layer_type, kind, longest)


def _fix(part: Any, layer_type: str | None, kind: str, longest: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    options = {} if layer_type is None else {"layer_type": layer_type}
    device = getattr(part, name).device
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](part.config, device, seq_len=longest, **options)
    part.register_buffer(name, frequencies, persistent=False)
    if "dynamic" in kind:
        part.attention_scaling = scaling
    part.rope_type = "default" if layer_type is None else {**part.rope_type, layer_type: "default"}


def _depends_on_length(kind: object) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def rope_parameters(config: "PreTrainedConfig") -> Iterator[Mapping[str, Any]]:
    """The parameters of each kind of rotary embedding that a config has."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    yield from nested or ([found] if found else [])


def rope_threshold(config: "PreTrainedConfig") -> int | None:
    """The sequence length up to which frequencies are those of short sequences; None where length does not matter."""
    limits = []
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type")
        if kind == "longrope":
            limits.append(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
        elif _depends_on_length(kind):
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def position_thresholds(config: "PreTrainedConfig") -> tuple[int, ...]:
    """Positions at which a config says that something changes, such as the scale of queries (Ministral 3, Llama 4)."""
    found = set()
    for parameters in (*rope_parameters(config), vars(config)):
        for name in ("original_max_position_embeddings", "floor_scale", "attn_floor_scale"):
            value = parameters.get(name)
            if isinstance(value, int | float) and value > 1:
                found.add(int(value))
    return tuple(sorted(found))


def has_dynamic_ntk(config: "PreTrainedConfig") -> bool:
    """Whether frequencies change with every length beyond the threshold, which vLLM does otherwise."""
    return any("dynamic" in str(parameters.get("rope_type")) for parameters in rope_parameters(config))


def longest_sequence(config: "PreTrainedConfig") -> int | None:
    """The longest sequence that a model is made for, as its config says; None where it says nothing."""
    length: int | None = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length <= 0:
        return None
    stretched = [length]
    for parameters in rope_parameters(config):
        if parameters.get("rope_type") in _STRETCHED and parameters.get("factor"):
            trained = parameters.get("original_max_position_embeddings") or length
            stretched.append(int(trained * parameters["factor"]))
    return max(stretched)
