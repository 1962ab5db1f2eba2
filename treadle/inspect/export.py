"""Model export: a checkpoint of a run as a Hugging Face model for others, with its tokenizer and a model card.

Owns the choice of the checkpoint, the dtype of the weights, and the card. Weights are converted file by file, so no
more than one file is in memory; nothing of the optimizer, the journal or paths of this machine leaves the run.
Invariant: the directory appears whole or not at all, and one that exists is never touched.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from treadle.checkpoint.atomic_directory import Damaged, atomic_directory, verify
from treadle.checkpoint.links import BEST, LATEST
from treadle.checkpoint.store import FOLDER, latest
from treadle.config import ModelConfig, SFTRunConfig, TrainConfig, to_yaml
from treadle.errors import ConfigError, Mistake, RunError
from treadle.inspect.curves import DEFAULT_METRICS, format_value
from treadle.inspect.run_records import RunRecords
from treadle.journal import JournalReader, read_starts
from treadle.model.lora import LoraSettings
from treadle.model.peft_files import CONFIG_FILE, WEIGHTS_FILE, names_adapter
from treadle.policy.checkpoint_files import TRAINING
from treadle.terminal import printable

ExportFormat = Literal["merged", "peft"]
ExportDtype = Literal["bf16", "fp16", "fp32"]
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

CARD = "README.md"
_INDEX = "model.safetensors.index.json"
_CHECKPOINT = re.compile(r"(\d+)-step-(\d+)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """What an export wrote."""

    directory: Path
    checkpoint: Path
    step: int


def export_run(
    run_dir: Path,
    directory: Path,
    *,
    checkpoint: str = LATEST,
    dtype: ExportDtype = "bf16",
    format: ExportFormat = "merged",
) -> ExportedModel:
    """Write a checkpoint (`latest`, `best`, a step or a directory's name) of a training run as a model of its own.

    Of a run that trained adapters (LoRA), `merged` is the whole model, and `peft` the adapter alone, in fp32.
    """
    if directory.exists():
        fix = "give the name of a directory that does not exist yet"
        raise ConfigError([Mistake(str(directory), "exists, and an export overwrites nothing", fix=fix)])
    records = RunRecords(run_dir)
    config = require_training_run(records)
    source = find_checkpoint(run_dir, checkpoint)
    step = int(_CHECKPOINT.fullmatch(source.name)[2])  # type: ignore[index]
    has_adapter = names_adapter(source) is not None
    if format == "peft" and not has_adapter:
        problem = f"{source.name} has no adapter: the run trained all parameters (actor.lora.r is null)"
        raise ConfigError([Mistake("--format", problem, format, fix="leave it out, for the whole model")])
    with atomic_directory(directory) as draft:
        _copy_files(source, draft, DTYPE_NAMES[dtype])
        if format == "peft":
            _copy_adapter(config, source, draft)
        elif has_adapter:
            _merge_weights(config, source, draft, DTYPE_NAMES[dtype])
        else:
            _convert_weights(source, draft, DTYPE_NAMES[dtype])
        card = write_card(records, source, step, dtype, directory.name, format=format)
        (draft / CARD).write_text(card, encoding="utf-8")
    return ExportedModel(directory, source, step)


def find_model(run_dir: Path, found: Path) -> Path:
    """A checkpoint of a run as a whole model. Where it is an adapter (LoRA) it is merged, once, into `RUN/merged`."""
    config = RunRecords(run_dir).config
    if names_adapter(found) is None or not isinstance(config, TrainConfig):
        return found
    merged = run_dir / "merged" / found.name
    if not merged.is_dir():
        try:
            export_run(run_dir, merged, checkpoint=found.name, dtype=config.actor.dtype)
        except OSError as error:
            fix = f"treadle export {run_dir} DIRECTORY --checkpoint {found.name} writes the merged model elsewhere"
            raise RunError(f"cannot write {merged}: {error.strerror or error}; {fix}") from error
    return merged


def require_training_run(records: RunRecords) -> TrainConfig:
    """The config of a run that has weights of its own; a ConfigError for a rollout."""
    if not isinstance(records.config, TrainConfig):
        problem = "is a rollout, not a training run: it has no weights of its own"
        raise ConfigError([Mistake(str(records.run_dir), problem)])
    return records.config


def find_checkpoint(run_dir: Path, wanted: str, key: str = "--checkpoint") -> Path:
    """The checkpoint that a word names; a ConfigError lists those there are, where it names none that is whole."""
    folder = run_dir / FOLDER
    saved = (
        sorted(path for path in folder.glob("[0-9]*") if _CHECKPOINT.fullmatch(path.name)) if folder.is_dir() else []
    )
    found = latest(run_dir) if wanted == LATEST else None
    if wanted == BEST and (folder / BEST).is_dir():
        found = folder / (folder / BEST).readlink().name
    named = [path for path in saved if wanted in (path.name, path.name.partition("-step-")[2])]
    found = found or (named[-1] if named else None)
    if found is None:
        known = ", ".join(path.name for path in saved) or "none: a run saves at its end, on Ctrl-C and by checkpoint.*"
        problem = f"{folder} has no checkpoint of this name"
        raise ConfigError([Mistake(key, problem, wanted, fix=f"there are {known}")])
    try:
        verify(found)
    except Damaged as damage:
        raise ConfigError([Mistake(key, f"it is damaged: {damage}", wanted)]) from damage
    return found


def _copy_files(source: Path, draft: Path, dtype: str) -> None:
    """Everything but weights and what only training needs."""
    for path in sorted(source.iterdir()):
        if path.name in (TRAINING, _INDEX, CARD, CONFIG_FILE) or path.suffix == ".safetensors":
            continue
        if path.is_dir():
            shutil.copytree(path, draft / path.name)
        elif path.name == "config.json":
            config = _with_dtype(json.loads(path.read_text(encoding="utf-8")), dtype)
            (draft / path.name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(path, draft / path.name)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A model's config that says its weights have this dtype, in the configs of its parts, too."""
    changed = {name: _with_dtype(value, dtype) if isinstance(value, dict) else value for name, value in config.items()}
    return {name: dtype if name in ("dtype", "torch_dtype") and value else value for name, value in changed.items()}


def _copy_adapter(config: TrainConfig, source: Path, draft: Path) -> None:
    """The adapter, as it was trained; a base model of this machine is named without its directories."""
    shutil.copyfile(source / WEIGHTS_FILE, draft / WEIGHTS_FILE)
    content = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    content["base_model_name_or_path"] = _base_name(config.model.path)
    (draft / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _merge_weights(config: TrainConfig, source: Path, draft: Path, dtype: str) -> None:
    """The model with the adapter merged into weights of the dtype that it was trained beside: what engines had."""
    import torch

    from treadle.model.load import load_causal_model, without_progress_bar

    model = ModelConfig(**{**config.model.values(), "adapter": str(source)})
    trained = getattr(torch, DTYPE_NAMES[config.actor.dtype])
    longest = config.rollout.sequence_length()
    module = load_causal_model(model, dtype=trained, device=torch.device("cpu"), longest=longest)
    with without_progress_bar():
        module.to(getattr(torch, dtype)).save_pretrained(draft)


def _convert_weights(source: Path, draft: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    wanted, total = getattr(torch, dtype), 0
    for path in sorted(source.glob("*.safetensors")):
        stored = load_file(path)
        tensors = {name: value.to(wanted) if value.is_floating_point() else value for name, value in stored.items()}
        total += sum(value.numel() * value.element_size() for value in tensors.values())
        save_file(tensors, draft / path.name, {"format": "pt"})
    if (source / _INDEX).is_file():
        index = json.loads((source / _INDEX).read_text(encoding="utf-8"))
        index["metadata"] = {**index.get("metadata", {}), "total_size": total}
        (draft / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def config_digest(records: RunRecords) -> str:
    """Digest of the resolved config: that of what `treadle config show RUN/config.yaml` prints."""
    return hashlib.sha256(to_yaml(records.config).encode()).hexdigest()


def write_card(
    records: RunRecords, checkpoint: Path, step: int, dtype: str, name: str, *, format: ExportFormat = "merged"
) -> str:
    """The model card, as the hub shows it."""
    config = records.config
    assert isinstance(config, TrainConfig)
    base, shown_base = config.model.path, _base_name(config.model.path)
    supervised, peft = isinstance(config, SFTRunConfig), format == "peft"
    method = "supervised fine-tuning" if supervised else "reinforcement learning"
    head = [
        "---",
        *([f"base_model: {base}"] if shown_base == base and "/" in base and not base.startswith("treadle/") else []),
        f"library_name: {'peft' if peft else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [{'sft' if supervised else 'reinforcement-learning'}, treadle]",
        "---",
        "",
        f"# {_text(name)}",
        "",
        f"{'A LoRA adapter of ' if peft else ''}{_code(shown_base)}, trained by {method} with treadle: {step} steps.",
        "",
        *(_LOAD_ADAPTER if peft else _LOAD_MODEL),
        "",
        "## Training",
        "",
        "| | |",
        "|---|---|",
    ]
    stored = "fp32" if peft else dtype
    facts = [f"| {label} | {value} |" for label, value in _facts(records, config, checkpoint, step, stored)]
    table = ["", "## Metrics", "", "| metric | first | last before this checkpoint |", "|---|---|---|"]
    return "\n".join([*head, *facts, *table, *_metric_rows(records, step), ""])


_LOAD_MODEL = (
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'model = AutoModelForCausalLM.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL")',
    'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL")',
    "```",
)
_LOAD_ADAPTER = (
    "```python",
    "from peft import PeftModel",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'base = AutoModelForCausalLM.from_pretrained("PATH_OR_NAME_OF_THE_BASE_MODEL")',
    'model = PeftModel.from_pretrained(base, "PATH_OR_NAME_OF_THIS_ADAPTER")',
    'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME_OF_THIS_ADAPTER")',
    "```",
)


def _facts(
    records: RunRecords, config: TrainConfig, checkpoint: Path, step: int, dtype: str
) -> Iterator[tuple[str, str]]:
    rollout, actor = config.rollout, config.actor
    yield "checkpoint", f"{_code(checkpoint.name)}, after step {step}"
    yield "weights", f"{dtype}, trained in {actor.model_dtype}"
    if actor.lora.r is not None:
        lora = LoraSettings.of(actor.lora)
        yield "LoRA", f"rank {lora.r}, alpha {lora.alpha:g}, beside frozen weights in {actor.dtype}"
    if isinstance(config, SFTRunConfig):
        rows = f"{config.data.train_batch_size} rows a step, learning rate {actor.optim.lr:g}"
        yield "algorithm", f"cross entropy on the assistant's tokens, {rows}"
        yield from _data_facts(config)
        yield from _run_facts(records, config)
        return
    yield (
        "algorithm",
        f"{_code(config.algorithm.adv_estimator)}, {rollout.n} samples a task, {config.data.train_batch_size} tasks a "
        f"step, learning rate {actor.optim.lr:g}, schedule {config.trainer.mode}",
    )
    yield from _data_facts(config)
    with JournalReader.open(records.run_dir) as reader:
        sources = {name: count for name, count in reader.counts().by_source.items() if name}
    if sources:
        yield "data sources", ", ".join(f"{_code(name)} ({count:,} trajectories)" for name, count in sources.items())
    reward = config.reward
    weights = {name: function.weight for name, function in reward.functions.items()}
    weights |= {name: judge.weight for name, judge in reward.judges.items()}
    weights |= {name: classifier.weight for name, classifier in reward.classifiers.items()}
    yield "rewards", ", ".join(f"{_code(name)} × {weight:g}" for name, weight in weights.items()) or "none"
    yield from _run_facts(records, config)


def _data_facts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    named = "conversations" if isinstance(config, SFTRunConfig) else "tasks"
    yield named, ", ".join(_code(_short(source)) for source in config.data.train_files)


def _run_facts(records: RunRecords, config: TrainConfig) -> Iterator[tuple[str, str]]:
    if config.data.val_files:
        yield "validation", ", ".join(_code(_short(source)) for source in config.data.val_files)
    yield "run", f"{_code(config.logging.project_name)}, {_code(config.logging.experiment_name)}"
    yield "config digest", f"`sha256:{config_digest(records)}`"
    if starts := read_starts(records.run_dir):
        yield "software", ", ".join(f"{name} {version}" for name, version in starts[-1].versions.items())


def _metric_rows(records: RunRecords, step: int) -> Iterator[str]:
    metrics = records.metrics()
    for name in DEFAULT_METRICS:
        if curve := [point for point in metrics.get(name, ()) if point[0] <= step]:
            (first_at, first), (last_at, last) = curve[0], curve[-1]
            yield (
                f"| {_code(name)} | {format_value(first)} (step {first_at}) | {format_value(last)} (step {last_at}) |"
            )


def _base_name(path: str) -> str:
    """A model as others know it: its name on the hub, or that of its directory without those above it."""
    return path if _HUB_NAME.fullmatch(path) is not None and not Path(path).exists() else Path(path).name


def _short(source: str) -> str:
    """A task file without the directories of this machine; a generator as it is."""
    return Path(source).name if "/" in source and Path(source).exists() else source


def _text(text: str) -> str:
    """Foreign text in a line of Markdown."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(text).replace("\n", " "))


def _code(text: str) -> str:
    """Foreign text as code in a table of Markdown."""
    shown = printable(text).replace("\n", " ").replace("`", "'").replace("|", "\\|")
    return f"`{shown}`"
