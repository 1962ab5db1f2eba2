"""Requests of the Tinker API: JSON bodies, checked field by field.

Owns what each verb takes and what is refused at once, by the field's name. Fields that change a result and are not
supported are refused; those that change none (tags, metadata, versions) are read or left alone. Knows no model.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from treadle.tinker.adapters import AdapterShape
from treadle.tinker.protobuf import MAX_ELEMENTS, spread_sparse
from treadle.tinker.refusals import ApiError
from treadle.tinker.shared_model import SampleSpec
from treadle.tinker.trained_model import AdamParams

Body = Mapping[str, Any]
T = TypeVar("T")

MAX_SAMPLES = 1024
"""Samples of one request."""
MAX_TOP = 1000
MAX_CELLS = 20_000_000
"""Values that a request may ask for of a prompt: positions times k."""


def field(body: Body, name: str, kind: type[T], default: T | None = None, *, optional: bool = False) -> T:
    """A field of a body. None, where it is optional, is its default; an ApiError where it is of another type."""
    value = body.get(name)
    if value is None and (optional or default is not None):
        return cast(T, default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        found = "is missing" if value is None else f"is {type(value).__name__}"
        raise ApiError(422, f"{name} {found}; it must be {kind.__name__}")
    if isinstance(value, float) and not isfinite(value):
        raise ApiError(422, f"{name} must be a finite number")
    return value


def whole_number(body: Body, name: str, least: int, most: int, default: int | None = None) -> int:
    value = field(body, name, int, default)
    if not least <= value <= most:
        raise ApiError(422, f"{name} {value} must be between {least} and {most}")
    return value


def read_shape(body: Body) -> AdapterShape:
    """The adapter that `create_model` asks for."""
    optimizer = field(body, "optimizer_config", dict, {"type": "adamw"})
    if optimizer.get("type", "adamw") != "adamw":
        raise ApiError(400, f"optimizer_config: {optimizer.get('type')!r} is not supported; there is adamw")
    if body.get("lora_config") is None:
        raise ApiError(400, "lora_config is missing: treadle trains adapters over this API, and no whole models")
    lora = field(body, "lora_config", dict)
    return AdapterShape(
        field(lora, "rank", int),
        field(lora, "seed", int, optional=True),
        field(lora, "train_attn", bool, True),
        field(lora, "train_mlp", bool, True),
        field(lora, "train_unembed", bool, True),
    )


def read_adam(body: Body) -> AdamParams:
    """The hyperparameters of an `optim_step`."""
    if body.get("optimizer_params") is not None:
        kind = body["optimizer_params"].get("type") if isinstance(body["optimizer_params"], dict) else None
        raise ApiError(400, f"optimizer_params: {kind!r} is not supported; give AdamParams")
    given = field(body, "adam_params", dict)
    default = AdamParams()
    params = AdamParams(
        field(given, "learning_rate", float, default.learning_rate),
        field(given, "beta1", float, default.beta1),
        field(given, "beta2", float, default.beta2),
        field(given, "eps", float, default.eps),
        field(given, "weight_decay", float, default.weight_decay),
        field(given, "grad_clip_norm", float, default.grad_clip_norm),
    )
    if min(params.learning_rate, params.eps, params.weight_decay, params.grad_clip_norm) < 0:
        raise ApiError(422, "adam_params: learning_rate, eps, weight_decay and grad_clip_norm are 0 or more")
    if not (0 <= params.beta1 < 1 and 0 <= params.beta2 < 1):
        raise ApiError(422, "adam_params: beta1 and beta2 are 0 or more, and less than 1")
    return params


def read_sample(body: Body, uid: str) -> SampleSpec:
    """A request for samples. `uid` keys the noise of one that gives no seed."""
    if body.get("record_stability_info"):
        raise ApiError(400, "record_stability_info is for stable_reinforce, which is not supported here")
    params = field(body, "sampling_params", dict)
    ids = _read_prompt(field(body, "prompt", dict))
    seed = field(params, "seed", int, optional=True)
    texts, tokens, at_eos = _read_stop(params.get("stop"))
    temperature = field(params, "temperature", float, 1.0)
    top_p = field(params, "top_p", float, 1.0)
    if temperature < 0 or not 0 < top_p <= 1:
        raise ApiError(422, f"temperature {temperature} must be 0 or more, top_p {top_p} between 0 and 1")
    last_n = field(body, "prompt_logprobs_last_n", int, optional=True)
    if last_n is not None and not (body.get("prompt_logprobs") and 1 <= last_n < len(ids)):
        raise ApiError(422, f"prompt_logprobs_last_n {last_n} needs prompt_logprobs, and 1 to {len(ids) - 1}")
    targets = body.get("target_prompt_logprobs")
    spec = SampleSpec(
        uid if seed is None else f"seed/{seed}",
        ids,
        whole_number(body, "num_samples", 1, MAX_SAMPLES, 1),
        field(params, "max_tokens", int, optional=True),
        temperature,
        top_p,
        max(-1, whole_number(params, "top_k", -1, 2**31, -1)),
        seed,
        texts,
        tokens,
        at_eos,
        field(body, "prompt_logprobs", bool, False),
        last_n,
        whole_number(body, "topk_prompt_logprobs", 0, MAX_TOP, 0),
        whole_number(body, "topk_sample_logprobs", 0, MAX_TOP, 0),
        None if targets is None else _read_targets(field(body, "target_prompt_logprobs", dict), len(ids)),
        whole_number(body, "prompt_alt_tokens_k", 0, MAX_TOP, 0),
    )
    if len(ids) * max(spec.top_prompt, spec.alternatives) > MAX_CELLS:
        raise ApiError(
            422, f"topk_prompt_logprobs or prompt_alt_tokens_k: more than {MAX_CELLS} values for this prompt"
        )
    if (spec.target_prompt is not None or spec.alternatives) and len(ids) < 2:
        raise ApiError(422, "a prompt of one token has no position to score")
    return spec


def _read_prompt(prompt: Body) -> tuple[int, ...]:
    ids: list[int] = []
    for at, chunk in enumerate(field(prompt, "chunks", list)):
        if not isinstance(chunk, dict) or chunk.get("type") != "encoded_text":
            kind = chunk.get("type") if isinstance(chunk, dict) else type(chunk).__name__
            raise ApiError(400, f"prompt.chunks[{at}] is {kind!r}; treadle serves text models")
        tokens = field(chunk, "tokens", list)
        if not all(type(token) is int for token in tokens):
            raise ApiError(422, f"prompt.chunks[{at}].tokens must be integers")
        ids += tokens
    return tuple(ids)


def _read_stop(stop: object) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Texts, tokens, and whether the model's own end stops too: an empty list means that nothing does."""
    if stop is None:
        return (), (), True
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        raise ApiError(422, "stop must be a text, a list of texts or a list of tokens")
    if all(isinstance(item, str) and item for item in stop):
        return tuple(stop), (), bool(stop)
    if all(type(item) is int for item in stop):
        return (), tuple(stop), True
    raise ApiError(422, "stop must be texts that are not empty, or tokens, and not both")


def _read_targets(tensor: Body, num_tokens: int) -> Tensor:
    """Token ids to score at each prompt position after the first, dense: -1 where a sparse tensor lists none."""
    shape, data = field(tensor, "shape", list), field(tensor, "data", list)
    fits = len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
    if not fits or shape[0] != num_tokens - 1 or shape[0] * shape[1] > MAX_ELEMENTS:
        raise ApiError(422, f"target_prompt_logprobs: the shape {shape} must be [{num_tokens - 1}, K]")
    if not all(type(value) is int for value in data):
        raise ApiError(422, "target_prompt_logprobs: token ids must be integers")
    values = torch.tensor(data, dtype=torch.long)
    if tensor.get("sparse_crow_indices") is None:
        if len(values) != shape[0] * shape[1]:
            raise ApiError(422, f"target_prompt_logprobs: {len(values)} values do not fill the shape {shape}")
        return values.view(shape)
    starts, columns = field(tensor, "sparse_crow_indices", list), field(tensor, "sparse_col_indices", list)
    if not all(type(value) is int for value in (*starts, *columns)):
        raise ApiError(422, "target_prompt_logprobs: sparse indices must be integers")
    return spread_sparse(values, torch.tensor(starts), torch.tensor(columns), shape, "target_prompt_logprobs", -1)


def read_notes(body: Body) -> Mapping[str, str] | None:
    notes = field(body, "user_metadata", dict, optional=True)
    return None if notes is None else {str(name): str(value) for name, value in notes.items()}
