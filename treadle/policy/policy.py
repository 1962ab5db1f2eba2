"""Policy: a training step's old logprobs, mini batches, loss, optimizer and version; and the policy on one device.

`PolicyLearner` runs the same on one device and on each rank of many; `fsdp` adds sharded weights and files.
`SinglePolicy` holds a module on a CPU or one GPU, and its files; an engine may share the module as long as it does not
sample while `train` runs. Knows nothing of groups, rewards or engines.
Invariant: the same state and batch give the same weights, on a CPU bit for bit.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from treadle.algorithm.loss import compute_policy_loss
from treadle.algorithm.micro_batch import Denominator, LossOutput, MicroBatch
from treadle.algorithm.policy_losses import select_tokens
from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.config.training import ActorConfig, RefConfig, RolloutCorrectionConfig
from treadle.errors import ConfigError, Mistake, MisuseError
from treadle.model.checksum import checksum
from treadle.model.load import load_causal_model, load_model_config, shares_prefixes
from treadle.model.rope import has_dynamic_ntk, rope_threshold
from treadle.policy.checkpoint_files import load_model, restore_training, save_model, save_training
from treadle.policy.lora_weights import LoraWeights, create_lora
from treadle.policy.network import DecoderNetwork
from treadle.policy.optimizer import DTYPES, MasterWeights, Optimizer, compute_dtype
from treadle.policy.packed_inputs import (
    Members,
    PackedRows,
    RowsLike,
    Sequences,
    split_mini_batches,
    split_shuffled_mini_batches,
)
from treadle.policy.protocol import Metrics, TrainBatch
from treadle.policy.reference import FrozenReference
from treadle.policy.update import (
    SINGLE_RANK,
    DataParallelGroup,
    MicroBatcher,
    TokenBudget,
    UpdateResult,
    compute_per_token,
    run_optimizer_step,
    summarize_updates,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the policy must know of how its rows were sampled."""

    temperature: float
    response_length: int
    longest: int | None = None
    """Tokens of the longest sequence; None where not given. Models whose RoPE depends on it refuse None."""
    engine: str = "native"
    """As `rollout.name`."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> "Sampling":
        return cls(rollout.temperature, rollout.response_length, rollout.sequence_length(), rollout.name)


@dataclass(frozen=True, slots=True)
class _TokenInputs:
    """What is known of each sampled token, M, before the step."""

    advantages_M: Tensor
    rollout_M: Tensor | None
    """As the engine reported them; None where it reported none."""
    old_M: Tensor | None
    """None where the step has one optimizer step: then the old policy is the current one."""
    ref_M: Tensor | None
    processed_M: Tensor | None
    """Of the distribution sampled from; None where that is the whole softmax, or no correction reads it."""

    def at(self, places_M: Tensor) -> "_TokenInputs":
        """The values of some tokens."""
        known = (self.rollout_M, self.old_M, self.ref_M, self.processed_M)
        others = (None if values is None else values[places_M] for values in known)
        return _TokenInputs(self.advantages_M[places_M], *others)


class PolicyLearner:
    """All of a `Policy` but where it lives."""

    def __init__(
        self,
        network: DecoderNetwork,
        optimizer: Optimizer,
        *,
        model: ModelConfig,
        actor: ActorConfig,
        rollout_correction: RolloutCorrectionConfig,
        sampling: Sampling,
        dp_group: DataParallelGroup = SINGLE_RANK,
    ) -> None:
        _refuse_foreign_rope(network, sampling)
        _refuse_lost_output_layer(network, model, sampling)
        self._network = network
        self._optimizer = optimizer
        self._model = model
        self._actor = actor
        self._rollout_correction = rollout_correction
        self._sampling = sampling
        budget = TokenBudget(actor.ppo_max_token_len_per_gpu, "actor.ppo_max_token_len_per_gpu")
        self._batcher = MicroBatcher(network, dp_group, budget)
        self._version = 0
        self._noted: list[tuple[Tensor, Tensor]] | None = None
        self._annotations: Tensor | None = None

    @property
    def version(self) -> int:
        return self._version

    def train(self, batch: TrainBatch) -> Metrics:
        began = time.perf_counter()
        sequences = Sequences(batch.rows)
        optimizer_steps = [mini for epoch in range(self._actor.ppo_epochs) for mini in self._split(batch, epoch)]
        facts = self._gather(batch, sequences, len(optimizer_steps))
        ready = time.perf_counter()
        first_epoch = len(optimizer_steps) // self._actor.ppo_epochs
        with self._network.recomputing(self._model.enable_gradient_checkpointing):
            self._noted = [] if batch.annotate else None
            updates = [self._learn(sequences, mini, facts) for mini in optimizer_steps[:first_epoch]]
            self._annotations, self._noted = self._gather_notes(sum(sequences.num_sampled)), None
            updates += [self._learn(sequences, mini, facts) for mini in optimizer_steps[first_epoch:]]
        self._version += 1
        return {
            **summarize_updates(updates, "actor", self._batcher.dp_group),
            "actor/lr": self._optimizer.learning_rate(self._version),
            "actor/sampled_tokens": sum(sequences.num_sampled),
            "actor/old_logprobs_computed": float(facts.old_M is not None),
            "actor/old_logprobs_s": ready - began,
            "actor/update_s": time.perf_counter() - ready,
        }

    def logprobs(self, rows: RowsLike) -> Tensor:
        sequences = Sequences(rows)
        return sequences.spread(self._logprobs(sequences))

    def frozen_logprobs(self, rows: RowsLike) -> Tensor | None:
        weights, sequences = self._optimizer.weights, Sequences(rows)
        if not isinstance(weights, LoraWeights):
            return None
        with self._network.present(), weights.without_adapters():
            return sequences.spread(self._logprobs(sequences))

    def annotations(self) -> Tensor | None:
        return self._annotations

    def gradient_norms(self, rows: RowsLike) -> Tensor:
        sequences, network, temperature = Sequences(rows), self._network, self._sampling.temperature
        norms_M = compute_per_token(
            sequences, lambda packed: network.gradient_norms(packed, temperature), self._batcher
        )
        return sequences.spread(norms_M)

    def frozen_reference(self, ref: RefConfig) -> FrozenReference | None:
        """The reference policy that needs no weights of its own; None where it does (`ActorConfig.lends_reference`)."""
        weights, temperature = self._optimizer.weights, self._sampling.temperature
        if not isinstance(weights, LoraWeights) or not self._actor.lends_reference(ref):
            return None
        return FrozenReference(self._network, weights, ref, temperature, self._batcher.dp_group)

    def close(self) -> None:
        self._optimizer.clear()

    def _split(self, batch: TrainBatch, epoch: int) -> tuple[Members, ...]:
        actor = self._actor
        if not actor.shuffle:
            return split_mini_batches(batch.group_S, actor.ppo_mini_batch_size)
        seed = f"{actor.data_loader_seed}/{self._version}/{epoch}"
        return split_shuffled_mini_batches(batch.group_S, batch.trajectory_S, actor.ppo_mini_batch_size, seed)

    def _gather(self, batch: TrainBatch, sequences: Sequences, num_optimizer_steps: int) -> _TokenInputs:
        rollout_M = sequences.sampled(sequences.logprobs_T)
        ref_T = batch.ref_logprobs_T
        return _TokenInputs(
            sequences.sampled(batch.advantages_T).float(),
            None if rollout_M.isnan().any() else rollout_M,
            self._old_logprobs(batch, sequences) if self._needs_old(num_optimizer_steps) else None,
            None if ref_T is None else sequences.sampled(ref_T),
            self._processed(sequences),
        )

    def _processed(self, sequences: Sequences) -> Tensor | None:
        """Logprobs of the distribution sampled from, where it is another. Refused where weights need and lack them."""
        if sequences.processed_T is None:
            return None
        processed_M = sequences.sampled(sequences.processed_T)
        if not processed_M.isnan().any():
            return processed_M
        if self._rollout_correction.rollout_is in ("token", "sequence"):
            raise MisuseError(
                "algorithm.rollout_correction.rollout_is needs the logprobs of the distribution sampled from, and this "
                "engine tells those of the whole softmax alone: set rollout.top_p, top_k, min_p and the penalties to "
                "their defaults, use rollout.name=native, or set rollout_is=none"
            )
        return None

    def _needs_old(self, num_optimizer_steps: int) -> bool:
        """Whether the policy before the step's first update must be known.

        With one update it is the policy that the update differentiates: ratios are exactly 1, and a second forward
        would only add rounding. Bypass takes the sampler's logprobs instead.
        """
        return num_optimizer_steps > 1 and not self._rollout_correction.bypass_mode

    def _old_logprobs(self, batch: TrainBatch, sequences: Sequences) -> Tensor:
        given_T = batch.old_logprobs_T
        return self._logprobs(sequences) if given_T is None else sequences.sampled(given_T)

    def _logprobs(self, sequences: Sequences) -> Tensor:
        network, temperature = self._network, self._sampling.temperature
        return compute_per_token(
            sequences, lambda packed: network.logprobs(packed, temperature).logprobs_T, self._batcher
        )

    def _learn(self, sequences: Sequences, members: Members, facts: _TokenInputs) -> UpdateResult:
        selected_M = self._select(sequences, members, facts)
        actor = self._actor
        return run_optimizer_step(
            sequences,
            members,
            lambda packed, denominator: self._loss(packed, denominator, facts, selected_M),
            self._optimizer,
            batcher=self._batcher,
            scale=actor.loss_scale_factor or self._sampling.response_length,
            step=self._version + 1,
        )

    def _loss(
        self, packed: PackedRows, denominator: Denominator, facts: _TokenInputs, selected_M: Tensor | None
    ) -> LossOutput:
        device = self._network.device
        here = facts.at(packed.places_M)
        predicted = self._network.logprobs(packed, self._sampling.temperature)
        micro = MicroBatch(
            logprobs_T=predicted.logprobs_T,
            advantages_T=here.advantages_M.to(device),
            mask_T=packed.mask(),
            sequence_T=packed.sequence_M,
            num_sequences=packed.num_sequences,
            old_logprobs_T=_to(here.old_M, device),
            rollout_logprobs_T=_to(here.rollout_M, device),
            processed_logprobs_T=_to(here.processed_M, device),
            ref_logprobs_T=_to(here.ref_M, device),
            entropy_T=predicted.entropy_T,
            selected_T=_to(None if selected_M is None else selected_M[packed.places_M], device),
        )
        output = compute_policy_loss(micro, denominator, self._actor, self._rollout_correction)
        if self._noted is not None and not packed.is_dummy:
            self._noted.append((packed.places_M, _token_notes(micro, output)))
        return output

    def _gather_notes(self, num_sampled: int) -> Tensor | None:
        """What was noted of each sampled token, over all ranks: [5, M]."""
        if self._noted is None:
            return None
        notes = torch.zeros(_NOTES, num_sampled)
        for places_M, values in self._noted:
            notes[:, places_M] = values.cpu()
        return self._batcher.dp_group.total(notes)

    def _select(self, sequences: Sequences, members: Members, facts: _TokenInputs) -> Tensor | None:
        """The tokens that some losses treat apart, chosen over the whole mini batch; a mask over M."""
        policy_loss = self._actor.policy_loss
        known_M = facts.rollout_M if facts.old_M is None else facts.old_M
        if known_M is None:
            if policy_loss.loss_mode in ("kl_cov", "clip_cov"):
                raise MisuseError(f"{policy_loss.loss_mode} needs the sampler's logprobs: the engine reported none")
            return None
        return select_tokens(known_M, facts.advantages_M, sequences.sampled_by(members), policy_loss, self._version)


_NOTES = 5
"""Numbers noted of each token, as `Policy.annotations` lists them."""


@torch.no_grad()
def _token_notes(micro: MicroBatch, output: LossOutput) -> Tensor:
    """On the device still: nothing waits for them."""
    assert output.tokens is not None, "every policy loss tells it"
    terms, nothing = output.tokens, torch.full_like(micro.logprobs_T, nan)
    flags_T = (~terms.loss_mask_T).float() * 2
    if terms.clipped_T is not None:
        flags_T = flags_T + (terms.clipped_T & terms.loss_mask_T).float()
    values = (micro.logprobs_T, micro.old_logprobs_T, micro.entropy_T, terms.weights_T, flags_T)
    return torch.stack([nothing.float() if found is None else found.detach().float() for found in values])


def _refuse_foreign_rope(network: DecoderNetwork, sampling: Sampling) -> None:
    """vLLM fixes LongRoPE as we do; dynamic NTK it does not stretch, so longer sequences would train on other odds."""
    config, longest = network.module.config, sampling.longest
    threshold = rope_threshold(config)
    if sampling.engine != "vllm" or threshold is None or longest is None or not has_dynamic_ntk(config):
        return
    if longest > threshold:
        problem = f"vLLM computes dynamic NTK rope beyond {threshold:,} tokens otherwise than {type(config).__name__}"
        fix = f"keep rollout.max_model_len at {threshold} or below, or sample with rollout.name=native"
        raise ConfigError([Mistake("rollout.name", problem, "vllm", fix=fix)])


def _refuse_lost_output_layer(network: DecoderNetwork, model: ModelConfig, sampling: Sampling) -> None:
    """vLLM builds `model.path` and ties its output layer: it takes no weights of its own for that, and says nothing."""
    if sampling.engine != "vllm" or model.adapter is None:
        return
    if load_model_config(model).tie_word_embeddings and not network.module.config.tie_word_embeddings:
        problem = f"{model.adapter} changes the output layer, which vLLM ties to the embedding, as model.path does"
        fix = "export the merged model and train that (treadle.Policy(...).save), or sample with rollout.name=native"
        raise ConfigError([Mistake("model.adapter", problem, model.adapter, model.origin("adapter"), fix)])


def _to(values: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values is None else values.to(device)


class SinglePolicy(PolicyLearner):
    """A `Policy`. Built whole by `create`."""

    @classmethod
    def create(
        cls,
        *,
        model: ModelConfig,
        actor: ActorConfig,
        rollout_correction: RolloutCorrectionConfig,
        sampling: Sampling,
        total_steps: int,
        device: torch.device,
    ) -> Self:
        """Load `model.path` and make it ready to train for `total_steps` steps."""
        compute = compute_dtype(actor.model_dtype, actor.dtype, "actor")
        full = actor.lora.r is None
        dtype = DTYPES[actor.model_dtype] if full else compute
        module = load_causal_model(model, dtype=dtype, device=device, longest=sampling.longest, merge=full)
        if full:
            weights = MasterWeights(dict(module.named_parameters()), compute)
        else:
            frozen = checksum(dict(module.requires_grad_(False).named_parameters()))
            weights = create_lora(module, model, actor.lora, device, frozen_checksum=frozen)
        optimizer = Optimizer("actor", weights, actor.optim, actor.grad_clip, total_steps)
        network = DecoderNetwork(module)
        network.shares_prefixes = shares_prefixes(model, module.config, sampling.longest)
        return cls(
            network,
            optimizer,
            model=model,
            actor=actor,
            rollout_correction=rollout_correction,
            sampling=sampling,
        )

    @property
    def module(self) -> "PreTrainedModel":
        """The module that trains, for an engine that samples from the very same weights."""
        return self._network.module

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._network.module.named_parameters()}

    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weights one by one, as they are or in `dtype`: as a rank of a sharded policy hands them out."""
        for name, tensor in self.tensors().items():
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def save(self, directory: Path) -> None:
        weights = self._optimizer.weights
        if isinstance(weights, LoraWeights):
            weights.save(directory, self._model.path)
        else:
            save_model(directory, self._network.module, weights)
        save_training(directory, self._optimizer, self._version, self._network.device)

    def restore(self, directory: Path) -> None:
        weights = self._optimizer.weights
        if isinstance(weights, LoraWeights):
            weights.restore(directory)
        else:
            load_model(directory, self._model, weights)
        self._version = restore_training(directory, self._optimizer, self._network.device)

    def export(self, directory: Path) -> None:
        save_model(directory, self._network.module, self._optimizer.weights)
