"""Parity check of the native engine: chunked prefill and decode against the model's own forward.

Owns the engine's half of the check; the rows, what is expected of them and the policy's half are `model.parity`'s.
`check_parity` is both halves, for a command that checks a config and for a table of all families.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.config.rollout import RolloutConfig
from treadle.engine.native.attention_metadata import DecodeMetadata, PrefillChunk, PrefillMetadata
from treadle.engine.native.kv_cache import SPAN_STEP, PagedKVCache, round_up
from treadle.errors import ConfigError, Mistake
from treadle.model.causal_lm import compute_logits, hidden_states
from treadle.model.parity import LOGPROB_TOLERANCE, Finding, Probe, cached_finding, check_policy_parity, try_out

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_ROW_STEP = 16


@dataclass(frozen=True, slots=True)
class ModelParity:
    """Parity of one kind of model. Differences are the largest that were found."""

    family: str
    policy: Finding
    engine: Finding | None
    """None where it was not asked for."""

    @property
    def problem(self) -> str | None:
        """Why treadle refuses the model; None where it runs it."""
        return self.policy.problem or (self.engine.problem if self.engine is not None else None)


def check_parity(config: "PreTrainedConfig", *, longest: int | None = None, engine: bool = True) -> ModelParity:
    """Compare treadle's forward passes of such a model with the model's own. A known config costs milliseconds.

    `longest`: tokens of the run's longest sequence, which may decide about rope. `engine`: of the native engine, too.
    """
    policy = check_policy_parity(config, longest)
    known = policy.problem is not None
    found = prove_engine(config, longest) if engine and not known else None
    return ModelParity(config.model_type, policy, found)


def require_engine(config: "PreTrainedConfig", longest: int) -> None:
    """Refuse a model that the native engine would not compute as its authors wrote it."""
    problem = prove_engine(config, longest).problem
    if problem is not None:
        fix = "sample with rollout.name=vllm; model.parity_check=false runs it unchecked"
        raise ConfigError([Mistake("rollout.name", problem, "native", fix=fix)])


def prove_engine(config: "PreTrainedConfig", longest: int | None = None) -> Finding:
    """Whether prefill and decode steps give the logprobs of the module's own forward."""
    return cached_finding("engine", config, longest, lambda: try_out(config, longest, _prove_engine))


@torch.no_grad()
def _prove_engine(probe: Probe) -> Finding:
    module, kind = probe.prepared(), type(probe.module).__name__
    rollout = RolloutConfig(prompt_length=probe.longest, response_length=1, max_num_seqs=len(probe.rows) + 1)
    difference = 0.0
    for page in (None, 2 * SPAN_STEP):  # one page for each row, and several
        cache = PagedKVCache.create(rollout, module, torch.device("cpu"), _ROW_STEP, page=page)
        found = _decode(probe, module, cache)
        difference = max(difference, probe.differ([torch.cat(parts) for parts in found], range(len(found))))
    problem = None
    if difference > LOGPROB_TOLERANCE:
        problem = f"logprobs of decoded tokens are up to {difference:.2g} nats from {kind}'s own forward"
    return Finding(difference, problem=problem)


def _decode(probe: Probe, module: "PreTrainedModel", cache: PagedKVCache) -> list[list[Tensor]]:
    """The logprobs of all rows: of the first third from prefill, in two chunks, then of one token of each at a time."""
    for row in range(len(probe.rows)):
        cache.assign(row, 0, range(row * cache.pages_per_row, (row + 1) * cache.pages_per_row))
    cache.upload()
    starts = [max(2, len(row) // 3) for row in probe.rows]
    first, second = [(0, start // 2) for start in starts], [(start // 2, start) for start in starts]
    found = [list(parts) for parts in zip(*(_prefill(probe, module, cache, at) for at in (first, second)), strict=True)]
    positions, lengths = torch.zeros(_ROW_STEP, dtype=torch.long), torch.zeros(_ROW_STEP, dtype=torch.long)
    positions[: len(starts)], lengths[: len(starts)] = torch.tensor(starts), torch.tensor(probe.lengths)
    while bool((positions < lengths).any()):
        active = positions < lengths  # rows that ended, and some that never were, take part and change nothing
        members = active.nonzero().flatten().tolist()
        ids = torch.zeros_like(positions)
        ids[members] = torch.stack([probe.rows[at][positions[at]] for at in members])
        metadata = DecodeMetadata(cache, active, positions, round_up(int(positions.max()) + 1, SPAN_STEP))
        logprobs = _logprobs(module, ids, positions, metadata)
        for at in members:
            found[at].append(logprobs[at : at + 1])
        positions += active
    return found


def _prefill(
    probe: Probe, module: "PreTrainedModel", cache: PagedKVCache, spans: list[tuple[int, int]]
) -> tuple[Tensor, ...]:
    """The logprobs of a chunk of each row."""
    chunks = [PrefillChunk(row, begin, probe.rows[row][begin:end].tolist()) for row, (begin, end) in enumerate(spans)]
    lengths = [len(chunk.ids) for chunk in chunks]
    metadata = PrefillMetadata(cache, chunks, round_up(sum(lengths), _ROW_STEP))
    return torch.split(_logprobs(module, metadata.ids_T, metadata.positions_T, metadata)[: sum(lengths)], lengths)


def _logprobs(
    module: "PreTrainedModel", ids: Tensor, positions: Tensor, metadata: PrefillMetadata | DecodeMetadata
) -> Tensor:
    return compute_logits(module, hidden_states(module, ids, positions, metadata)).float().log_softmax(-1)
