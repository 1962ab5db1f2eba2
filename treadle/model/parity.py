"""Parity check: treadle computes a model as its authors wrote it, tried on a tiny model of the same kind.

    expected   the module's own eager forward: one row alone, with its own mask and positions
    policy     rows packed, in two packings, with treadle's attention and the flags of training: recomputation on
    gradients  of a loss on all logprobs, each parameter's against the eager module's
    fused      the same through the fused layers that a GPU trains with, in plain torch
    shared     rows that begin alike, their common prefix computed once, against the same rows packed

Rows are longer than every window and cross every position at which the config says that something changes. What cannot
be computed, or differs, is a problem in words. The engine's half is in `engine.native.parity`. Costs a second or two,
and is kept on disk under a digest of the config, the versions and treadle's own code.
Invariant: a finding depends on the config, the code and the regime of rope alone; weights and devices do not matter.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.errors import ConfigError, TreadleError
from treadle.model.attention import PackedMetadata
from treadle.model.causal_lm import compute_logits, hidden_states, prepare_module, recomputing
from treadle.model.fused_layers import find_fused
from treadle.model.prefix_attention import PrefixTree, PrefixTreeMetadata
from treadle.model.rope import fix_rope, longest_sequence, rope_threshold
from treadle.model.tiny_model import LONGEST, THRESHOLD, VOCABULARY, CannotShrink, build_small, shrink

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LOGPROB_TOLERANCE = 1e-3
"""Nats that a logprob may differ by: two hundred times the rounding of a right model, far less than any mistake."""

GRADIENT_TOLERANCE = 1e-2
"""How far a parameter's gradient may be off, relative to its norm."""

CACHE = Path("~/.cache/treadle/parity")
"""Where findings are kept."""

_CODE = (
    *("model/layer_parts", "model/attention", "model/causal_lm", "model/fused_layers", "model/parity", "model/rope"),
    "model/prefix_attention",
    *("model/tiny_model", "engine/native/kv_cache", "engine/native/attention_metadata", "engine/native/parity"),
)
"""What findings are about: other code may change without a new one."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Kinds of layers that treadle's attention can serve; the rest keep states that are no keys and values."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about one way to compute a model."""

    logprobs: float | None = None
    """The largest difference of a logprob, in nats; None where it was not computed."""
    gradients: float | None = None
    """The largest relative difference of a parameter's gradient."""
    fused: float | None = None
    """As `logprobs`, through fused layers; None where layers are of a kind that is not fused."""
    shared: float | None = None
    """As `logprobs`, with prefixes that rows share; infinite where gradients differ, None where it was not computed."""
    problem: str | None = None
    """Why the model is refused; None where it is computed as its authors wrote it."""


class Probe:
    """A small model of a config's kind, rows to try it on, and what its own forward makes of them."""

    def __init__(self, config: "PreTrainedConfig", longest: int | None) -> None:
        small = shrink(config)
        self.module = build_small(small)
        """Whose attention is eager, and whose rope is as transformers has it. Not to be changed."""
        limit = longest_sequence(small) or LONGEST
        self.longest = min(LONGEST, limit) if exceeds(config, longest) else THRESHOLD
        if rope_threshold(small) is not None and self.longest > THRESHOLD:
            self.longest = LONGEST  # beyond what dynamic rope was trained for
        self.lengths = (self.longest // 2 + 1, self.longest, 7, self.longest - 3)
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in self.lengths]
        self.weights = [torch.randn(length, generator=generator) for length in self.lengths]
        self.gradients: dict[str, Tensor] = {}
        self.expected = self._expect()

    def _expect(self) -> list[Tensor]:
        """The logprobs of each row alone, [length, V], and the gradients of `loss` over all of them."""
        whole, fixed = deepcopy(self.module), deepcopy(self.module)
        fix_rope(fixed, self.longest)
        found = []
        for row, weights in zip(self.rows, self.weights, strict=True):
            # Only the longest row has the frequencies that the run fixes when the module itself chooses them.
            module = whole if len(row) == self.longest else fixed
            logprobs = module(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float().log_softmax(-1)
            loss([logprobs], [row], [weights]).backward()  # type: ignore[no-untyped-call]
            found.append(logprobs.detach())
        for module in (whole, fixed):
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    self.gradients[name] = self.gradients.get(name, torch.zeros(())) + parameter.grad
        return found

    def prepared(self) -> "PreTrainedModel":
        """A copy, as treadle computes with it."""
        return prepare_module(deepcopy(self.module), self.longest)

    def differ(self, found: Sequence[Tensor], members: Sequence[int]) -> float:
        """The largest difference of a logprob of some rows."""
        pairs = zip(found, members, strict=True)
        return max(
            float((logprobs.detach() - self.expected[at]).abs().nan_to_num(torch.inf).max()) for logprobs, at in pairs
        )

    def differ_in_gradients(self, module: "PreTrainedModel") -> float:
        """The largest relative difference of a parameter's gradient; small ones count less."""
        total = torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm()
        found = {name: parameter.grad for name, parameter in module.named_parameters()}
        worst = 0.0
        for name, gradient in found.items():
            wanted = self.gradients.get(name, torch.zeros(()))
            given = torch.zeros(()) if gradient is None else gradient
            scale = torch.maximum(wanted.norm(), 1e-2 * total)
            worst = max(worst, float(((given - wanted).norm() / scale).nan_to_num(torch.inf)))
        return worst


def exceeds(config: "PreTrainedConfig", longest: int | None) -> bool:
    """Whether sequences go beyond what rope counts as short; yes where that makes no difference."""
    threshold = rope_threshold(config)
    return threshold is None or longest is None or longest > threshold


def loss(logprobs: Sequence[Tensor], rows: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """A weighted sum of the logprobs of each row's tokens."""
    parts = [
        (table[:-1].gather(1, row[1:, None]).squeeze(1) * weight[1:]).sum()
        for table, row, weight in zip(logprobs, rows, weights, strict=True)
    ]
    return torch.stack(parts).sum()


def refuse_by_config(config: "PreTrainedConfig") -> str | None:
    """Why treadle cannot run such a model, where its config alone tells."""
    kind = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind} is an encoder and decoder; treadle runs decoders only"
    if getattr(config, "text_config", None) is not None:
        return f"{kind} is a model of several modalities; treadle runs text decoders only"
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"{kind} has layers of kind {', '.join(sorted(others))}; treadle runs attention layers only"
    return None


def check_policy_parity(config: "PreTrainedConfig", longest: int | None = None) -> Finding:
    """Whether packed rows and their gradients are those of the module's own forward; `longest` as in `load`."""
    return cached_finding("policy", config, longest, lambda: try_out(config, longest, _check_policy_parity))


def try_out(config: "PreTrainedConfig", longest: int | None, check: Callable[[Probe], Finding]) -> Finding:
    """What `check` finds; whatever goes wrong on the way is a problem, too."""
    problem = refuse_by_config(config)
    if problem is not None:
        return Finding(problem=problem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model's own code
        return _try_out(config, longest, check)


def _try_out(config: "PreTrainedConfig", longest: int | None, check: Callable[[Probe], Finding]) -> Finding:
    kind = type(config).__name__
    try:
        probe = Probe(config, longest)
    except CannotShrink as error:
        return Finding(problem=f"no small model of the kind of {kind} could be made to compare with: {error}")
    except Exception as error:  # noqa: BLE001 - the model's own code failed
        return Finding(problem=f"a small {kind} fails in its own forward: {_tell(error)}")
    kind = type(probe.module).__name__
    if not probe.module._supports_attention_backend:
        return Finding(problem=f"{kind} does not let its attention be replaced")
    try:
        return check(probe)
    except ConfigError as error:
        return Finding(problem=error.mistakes[0].problem)
    except Exception as error:  # noqa: BLE001 - whatever the model has against our attention
        return Finding(problem=f"{kind} fails: {_tell(error)}")


def _check_policy_parity(probe: Probe) -> Finding:
    module, kind = probe.prepared(), type(probe.module).__name__
    all_rows = range(len(probe.rows))
    with recomputing(module, True):
        logprobs = probe.differ(_pack(probe, module, (2,)), (2,))  # a short row first: nothing may remember longer ones
        found = _pack(probe, module, all_rows)
        loss(found, probe.rows, probe.weights).backward()  # type: ignore[no-untyped-call]
        logprobs, gradients = max(logprobs, probe.differ(found, all_rows)), probe.differ_in_gradients(module)
        for members in ((3, 0), (1,)):
            logprobs = max(logprobs, probe.differ(_pack(probe, module, members), members))
    problem = None
    if logprobs > LOGPROB_TOLERANCE:
        problem = f"logprobs of packed rows are up to {logprobs:.2g} nats from {kind}'s own forward"
    elif gradients > GRADIENT_TOLERANCE:
        problem = f"gradients of packed rows are up to {gradients:.1%} from {kind}'s own"
    fused = _differ_fused(probe)
    if problem is None and fused is not None and fused > LOGPROB_TOLERANCE:
        problem = f"fused layers are up to {fused:.2g} nats from {kind}'s own forward"
    return Finding(logprobs, gradients, fused, None if problem else _differ_shared(probe), problem)


def _differ_fused(probe: Probe) -> float | None:
    """The largest difference of a logprob through fused layers, and infinite where gradients differ."""
    module = probe.prepared()
    fused = find_fused(module, plain=True)
    if not fused:
        return None
    for forward in fused:
        forward.parts.layer.forward = forward
    all_rows = range(len(probe.rows))
    with recomputing(module, True):
        found = _pack(probe, module, all_rows)
        loss(found, probe.rows, probe.weights).backward()  # type: ignore[no-untyped-call]
    right = probe.differ_in_gradients(module) <= GRADIENT_TOLERANCE
    return probe.differ(found, all_rows) if right else torch.inf


def _differ_shared(probe: Probe) -> float:
    """How far rows that share prefixes are from the same rows packed, in logprobs; infinite where gradients differ."""
    whole, end, half = probe.rows[1], probe.rows[2], probe.longest // 2
    branch = probe.rows[3][half:]
    rows = [whole, torch.cat((whole[:half], branch)), torch.cat((whole[:half], branch[:4], end))]
    pieces = (whole[:half], whole[half:], branch[:4], branch[4:], end)
    tree = PrefixTree(tuple(len(piece) for piece in pieces), (-1, 0, 0, 2, 2))
    paths = [tree.paths()[leaf] for leaf in (1, 3, 4)]
    packed, shared = probe.prepared(), probe.prepared()
    expected = _learn(packed, rows, PackedMetadata([len(row) for row in rows]), torch.cat(rows), None)
    found = _learn(shared, rows, PrefixTreeMetadata(tree), torch.cat(pieces), paths)
    wanted = {name: parameter.grad for name, parameter in packed.named_parameters() if parameter.grad is not None}
    total = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, parameter in shared.named_parameters():
        if name in wanted and parameter.grad is not None:
            scale = torch.maximum(wanted[name].norm(), 1e-2 * total)
            if not (parameter.grad - wanted[name]).norm() <= GRADIENT_TOLERANCE * scale:
                return torch.inf
    gaps = [(one - other).abs().nan_to_num(torch.inf).max() for one, other in zip(found, expected, strict=True)]
    return float(torch.stack(gaps).max())


def _learn(
    module: "PreTrainedModel",
    rows: Sequence[Tensor],
    metadata: PackedMetadata | PrefixTreeMetadata,
    ids: Tensor,
    paths: Sequence[Tensor] | None,
) -> list[Tensor]:
    """Logprobs of rows that are packed, or found along `paths`; their gradients are left in the module."""
    with recomputing(module, True):
        logits = compute_logits(module, hidden_states(module, ids, metadata.positions(), metadata))
        table = logits.float().log_softmax(-1)
        found = [table[path] for path in paths] if paths else list(torch.split(table, [len(row) for row in rows]))
        weights = [torch.linspace(-1, 1, len(row)) for row in rows]
        loss(found, rows, weights).backward()  # type: ignore[no-untyped-call]
    return [logprobs.detach() for logprobs in found]


def _pack(probe: Probe, module: "PreTrainedModel", members: Sequence[int]) -> list[Tensor]:
    """Logprobs of some rows, computed in one forward: [length, V] each."""
    rows = [probe.rows[at] for at in members]
    metadata = PackedMetadata([len(row) for row in rows])
    logits = compute_logits(module, hidden_states(module, torch.cat(rows), metadata.positions(), metadata))
    return list(torch.split(logits.float().log_softmax(-1), [len(row) for row in rows]))


def _tell(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, TreadleError) else f"{type(error).__name__}: {first}"


def cached_finding(kind: str, config: "PreTrainedConfig", longest: int | None, check: Callable[[], Finding]) -> Finding:
    """The finding on disk, or else a new one, which is put there."""
    place = CACHE.expanduser() / f"{digest(kind, config, longest)}.json"
    try:
        return Finding(**json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        finding = check()
    log.debug("parity of %s for the %s: %s", type(config).__name__, kind, finding)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_suffix(f".{id(finding):x}")
        unfinished.write_text(json.dumps(asdict(finding)), encoding="utf-8")
        unfinished.replace(place)
    except OSError:
        log.debug("the finding could not be kept in %s", place)
    return finding


def digest(kind: str, config: "PreTrainedConfig", longest: int | None) -> str:
    """The digest of everything that a finding depends on."""
    import transformers

    values = {name: value for name, value in config.to_dict().items() if name not in ("dtype", "_name_or_path")}
    parts = (kind, type(config).__qualname__, exceeds(config, longest), torch.__version__, transformers.__version__)
    text = json.dumps([*parts, _own_code(), values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _own_code() -> str:
    """A digest of the code that a finding is about."""
    package = Path(__file__).parent.parent
    found = hashlib.sha256()
    for name in _CODE:
        found.update((package / f"{name}.py").read_bytes())
    return found.hexdigest()
