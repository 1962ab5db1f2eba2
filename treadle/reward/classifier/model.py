"""Classifier model: packed texts in, one logit for each out. Imports torch.

Owns loading and the forward pass. Knows nothing of text, threads and processes. Texts are packed without padding, so
what a text gets does not depend, up to rounding, on what is computed beside it.
Invariant: a text's score is what transformers' own forward gives for it alone. So the head reads the last token that is
not `pad_token_id`, also where that is the token which ends a turn.
"""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from treadle.config.rollout import ModelConfig
from treadle.errors import ConfigError, Mistake
from treadle.model.attention import NAME, PackedMetadata, register
from treadle.model.causal_lm import hidden_states, prepare_module
from treadle.model.load import load_model_config, without_progress_bar
from treadle.model.rope import rope_threshold
from treadle.model.tokenizer import resolve_model_path
from treadle.reward.result import Fault, ScoreFailure, is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Ids = Sequence[int]

FIX = "give the directory of a …ForSequenceClassification decoder with one label"


class ClassifierModel:
    """A decoder with a head of one label, on one device. A backend of `Batches`: of no use before `load`."""

    def __init__(self, path: str, *, device: str, dtype: str) -> None:
        self._path, self._device, self._dtype = path, device, dtype
        self._loaded: PreTrainedModel | None = None

    def load(self) -> None:
        """Load the model; a ConfigError of `path` or `device` where that cannot be."""
        place = _find_device(self._device)
        directory = resolve_model_path(self._path, "path")
        try:
            config = load_model_config(ModelConfig(path=self._path), directory)
        except ConfigError as error:
            mistakes = [Mistake("path", item.problem, self._path, fix=FIX) for item in error.mistakes]
            raise ConfigError(mistakes) from error
        if rope_threshold(config) is not None:
            problem = "has rope whose frequencies depend on the length of each text (LongRoPE or dynamic NTK)"
            raise ConfigError([Mistake("path", problem, self._path, fix=FIX)])
        usual = "bfloat16" if place.type == "cuda" else "float32"
        dtype = getattr(torch, usual if self._dtype == "auto" else self._dtype)
        module: Any = _load_weights(self._path, str(directory), config, dtype)
        self._loaded = prepare_module(module.to(place))

    @property
    def _module(self) -> "PreTrainedModel":
        assert self._loaded is not None, "loaded before it scores"
        return self._loaded

    @property
    def _config(self) -> Any:
        return self._module.config

    def score(self, texts: Sequence[Ids]) -> list[float]:
        """The logit of each text. With too little memory for all at once, it computes half of them at a time."""
        if max(max(ids) for ids in texts) >= self._config.vocab_size:
            problem = f"has a tokenizer with more ids than its {self._config.vocab_size} embeddings"
            raise ScoreFailure(Fault.EXCEPTION, problem)
        try:
            return self._forward(texts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(texts) == 1:
                raise ScoreFailure(Fault.MEMORY, f"ran out of memory over {len(texts[0])} tokens") from error
        half = len(texts) // 2
        return [*self.score(texts[:half]), *self.score(texts[half:])]

    def interrupt(self) -> None:
        """A forward pass cannot be ended from outside; it ends by itself."""

    def close(self) -> None:
        """Give the weights' memory back."""
        on_gpu = self._loaded is not None and self._loaded.device.type == "cuda"
        self._loaded = None
        if on_gpu:
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _forward(self, texts: Sequence[Ids]) -> list[float]:
        device = self._module.device
        plan = PackedMetadata([len(ids) for ids in texts], device)
        ids_T = torch.tensor([one for ids in texts for one in ids], device=device)
        hidden = hidden_states(self._module, ids_T, plan.positions(), plan)
        logits: torch.Tensor = cast(Any, self._module).score(hidden[self._ends(texts)])
        return logits.float().flatten().tolist()

    def _ends(self, texts: Sequence[Ids]) -> list[int]:
        """Where the head reads each text, among all packed tokens."""
        padding, start, ends = self._config.pad_token_id, 0, []
        for ids in texts:
            ends.append(start + max((at for at, one in enumerate(ids) if one != padding), default=0))
            start += len(ids)
        return ends


def _find_device(device: str) -> torch.device:
    place = torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        problem = f"{device!r}, but {torch.cuda.device_count()} GPUs are visible"
        raise ConfigError([Mistake("device", problem, device, fix="cpu runs everywhere")])
    return place


def _load_weights(path: str, directory: str, config: "PreTrainedConfig", dtype: torch.dtype) -> "PreTrainedModel":
    from transformers import AutoModelForSequenceClassification

    if config.num_labels != 1:
        problem = f"has {config.num_labels} labels; a score is one number"
        raise ConfigError([Mistake("path", f"{directory} {problem}", path, fix=FIX)])
    register()
    loader: Any = AutoModelForSequenceClassification
    try:
        with warnings.catch_warnings(), without_progress_bar():
            warnings.simplefilter("ignore")
            module, report = loader.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=NAME,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        line = next(iter(str(error).splitlines()), type(error).__name__)
        problem = f"no classifier could be loaded from {directory}: {line}"
        raise ConfigError([Mistake("path", problem, path, fix=FIX)]) from error
    absent = sorted(report["missing_keys"]) + sorted(str(item) for item in report.get("mismatched_keys", ()))
    if absent or not hasattr(module, "score"):
        problem = f"lacks {absent[0]}, so it is no classifier" if absent else f"is a {type(module).__name__}"
        raise ConfigError([Mistake("path", f"{directory} {problem}", path, fix=FIX)])
    return cast("PreTrainedModel", module)
