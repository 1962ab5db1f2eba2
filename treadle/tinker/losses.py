"""Losses of the Tinker API: sums over the tokens of a datum, from the logprobs of its target tokens.

    cross_entropy         -w · log p                  w: `weights`, 1 where there are none
    importance_sampling   -r · A                      r = p / q, q: `logprobs`, the probabilities of the sampler
    ppo                   -min(r · A, clip(r) · A)
    cispo                 -sg(clip(r)) · A · log p
    gspo                  ppo with one ratio for the datum: the geometric mean of r over `sequence_ratio_mask`
    dro                   -(A · log p - β/2 · (log p - log q)²)

Owns formulas, the inputs that each needs, and their checks. Knows no model. N positions of a datum, K targets of each.
Invariant: a loss is a sum over datums, so it does not depend on how they are split over requests and forwards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.tinker.protobuf import Datum
from treadle.tinker.refusals import RequestFailed

LossConfig = Mapping[str, float | str]
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
DEFAULT_CLIP = {LOW: 0.8, HIGH: 1.2}
"""Of ppo and cispo."""


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss: its value for every target, from their logprobs, the datum's tensors and the config."""

    values: Callable[[Tensor, Mapping[str, Tensor], LossConfig], Tensor]
    inputs: tuple[str, ...]
    """Tensors that a datum must have, beside target_tokens; each as long as its tokens."""
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Keys of loss_fn_config."""
    required: tuple[str, ...] = ()


def _cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    return -logprobs * inputs["weights"] if "weights" in inputs else -logprobs


def _ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _clip(ratio: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    """Between thresholds of each token, where the datum has them, or of the config."""
    bounds = []
    for name, default in DEFAULT_CLIP.items():
        bound = inputs.get(name)
        bounds.append(torch.full_like(ratio, float(config.get(name, default))) if bound is None else bound)
    return torch.minimum(torch.maximum(ratio, bounds[0]), bounds[1])


def _ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages)


def _cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    clipped = _clip(_ratio(logprobs, inputs).detach(), inputs, config)
    return -clipped * logprobs * inputs["advantages"]


def _gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    counted = inputs["sequence_ratio_mask"] != 0
    if not bool(counted.any()):
        return logprobs * 0.0
    mean = (logprobs.detach() - inputs["logprobs"])[counted].mean()
    ratio = torch.exp(mean + logprobs - logprobs.detach())  # the sequence's value, each token's gradient
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages)


def _dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: LossConfig) -> Tensor:
    distance = logprobs - inputs["logprobs"]
    return -(inputs["advantages"] * logprobs - 0.5 * float(config["beta"]) * distance.square())


_SAMPLED = ("logprobs", "advantages")
LOSSES: dict[str, LossFunction] = {
    "cross_entropy": LossFunction(_cross_entropy, (), ("weights",)),
    "importance_sampling": LossFunction(_importance_sampling, _SAMPLED),
    "ppo": LossFunction(_ppo, _SAMPLED, (LOW, HIGH), (LOW, HIGH)),
    "cispo": LossFunction(_cispo, _SAMPLED, (LOW, HIGH), (LOW, HIGH)),
    "gspo": LossFunction(_gspo, (*_SAMPLED, "sequence_ratio_mask"), options=(LOW, HIGH), required=(LOW, HIGH)),
    "dro": LossFunction(_dro, _SAMPLED, options=("beta",), required=("beta",)),
}

REFUSED = {
    "stable_reinforce": "it reads what Tinker's samplers record of each token, and its formula is not published",
    "custom": "losses are not run on the server: forward_backward_custom computes them in the client",
}


def find_loss(name: str, config: LossConfig) -> LossFunction:
    """A loss by its name; a RequestFailed where it, or a key of its config, is not known."""
    found = LOSSES.get(name)
    if found is None:
        reason = REFUSED.get(name, "it is unknown")
        raise RequestFailed(f"loss_fn {name!r} is not supported: {reason}. There are {', '.join(LOSSES)}")
    for key, value in config.items():
        if key not in found.options:
            takes = ", ".join(found.options) or "no keys"
            raise RequestFailed(f"loss_fn_config: {name} has no {key!r}; it takes {takes}")
        if not isinstance(value, float):
            raise RequestFailed(f"loss_fn_config: {key} of {name} is a number, got {value!r}")
    if missing := [key for key in found.required if key not in config]:
        raise RequestFailed(f"loss_fn_config: {name} needs {' and '.join(missing)}: treadle has no default for them")
    return found


def check_datum(datum: Datum, at: int, loss: LossFunction, *, longest: int, vocab_size: int) -> None:
    """Refuse a datum that the loss or the model cannot take, by its place in the request."""
    num_tokens = len(datum.ids)
    if not 0 < num_tokens <= longest:
        raise RequestFailed(f"data[{at}]: {num_tokens} tokens; a datum has 1 to {longest}")
    targets = datum.inputs.get("target_tokens")
    for name, tokens in (("model_input", datum.ids), ("target_tokens", targets)):
        if tokens is None or tokens.is_floating_point():
            raise RequestFailed(f"data[{at}]: {name} must be there, as integers")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise RequestFailed(f"data[{at}]: {name} has a token outside of the vocabulary of {vocab_size}")
    assert targets is not None
    if targets.dim() not in (1, 2) or len(targets) != num_tokens:
        shape = list(targets.shape)
        raise RequestFailed(f"data[{at}]: target_tokens {shape} must be [{num_tokens}] or [{num_tokens}, K]")
    if targets.dim() == 2 and loss is not LOSSES["cross_entropy"]:
        raise RequestFailed(f"data[{at}]: only cross_entropy takes several targets for a position")
    for name in (*loss.inputs, *(name for name in loss.optional if name in datum.inputs)):
        values = datum.inputs.get(name)
        if values is None or values.shape != targets.shape:
            found = "is missing" if values is None else f"has the shape {list(values.shape)}"
            raise RequestFailed(f"data[{at}]: {name} {found}; target_tokens is {list(targets.shape)}")
        if not bool(values.isfinite().all()):
            raise RequestFailed(f"data[{at}]: {name} has values that are not finite")
