"""Memory and disk estimate: what the weights of a run need, and what this machine or its container has.

Counts what is certain (weights, gradients, optimizer state, copies of them) and leaves out what depends on the data:
activations, and the KV cache, which engines fit to what is left.
"""

import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from treadle.config import Config, TrainConfig
from treadle.config.training import ALL_LINEAR, ActorConfig, CriticConfig, LoraConfig
from treadle.config.transport import choose_transport
from treadle.errors import Mistake

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "auto": 2}
ADAM_STATES = 2
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers in a model's weights; and with adapters, in those and in the weights that they are merged with."""

    parameters: int
    adapters: int = 0
    adapted: int = 0


def measure_model(model: Path, lora: LoraConfig | None = None) -> ModelSize | None:
    """The size of a model directory, from the headers of its safetensors files; None without such files."""
    shapes = dict(_tensor_shapes(model))
    parameters = sum(prod(shape) for shape in shapes.values())
    adapters = adapted = 0
    if lora is not None and lora.r is not None:
        for name, shape in shapes.items():
            if len(shape) == 2 and _has_adapter(name.removesuffix(".weight"), lora):
                adapters, adapted = adapters + lora.r * sum(shape), adapted + prod(shape)
    return ModelSize(parameters, adapters, adapted) if parameters else None


def _tensor_shapes(model: Path) -> Iterator[tuple[str, list[int]]]:
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            size = struct.unpack("<Q", opened.read(8))[0]
            header = json.loads(opened.read(size))
        yield from ((name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _has_adapter(module: str, lora: LoraConfig) -> bool:
    """Whether a matrix gets an adapter, as far as its name tells; the model itself is asked when it is loaded."""
    if module.rpartition(".")[2] in ("embed_tokens", "wte", "lm_head") or ".experts." in module:
        return False

    def named(ends: Sequence[str]) -> bool:
        return any(end == ALL_LINEAR or f".{module}".endswith(f".{end}") for end in ends)

    return named(lora.target_modules) and not named(lora.exclude_modules)


def weight_bytes(config: Config, model: ModelSize) -> dict[str, int]:
    """What each part needs for weights alone, on each device of its own."""
    parameters = model.parameters
    rollout = config.rollout
    engine = parameters * BYTES[rollout.dtype] // rollout.tensor_model_parallel_size
    if not isinstance(config, TrainConfig):
        return {} if rollout.name in ("openai", "scripted") else {"engine": engine}
    ranks = config.trainer.num_ranks()
    actor, ref, critic = config.used_networks()
    needs = {"policy": _trained(parameters, actor) // ranks}
    if actor.lora.r is not None:
        needs = {"policy": (parameters + model.adapted) * BYTES[actor.dtype] // ranks}
        needs["adapters"] = model.adapters * BYTES["fp32"] * (2 + ADAM_STATES)  # whole on every rank
    if ref is not None and not actor.lends_reference(ref):
        needs["reference"] = parameters * BYTES[ref.dtype] // ranks
    if critic is not None:
        needs["critic"] = _trained(parameters, critic) // ranks
    if choose_transport(config) != "own":
        needs["engine"] = engine
    return needs


def _trained(parameters: int, network: ActorConfig | CriticConfig) -> int:
    """Weights, gradients and the states of AdamW; and a copy to compute with, where that is in another format."""
    copy = 0 if network.dtype == network.model_dtype else BYTES[network.dtype]
    return parameters * (BYTES[network.model_dtype] * (2 + ADAM_STATES) + copy)


def host_bytes(config: Config, needs: dict[str, int]) -> int:
    """What is in main memory, of all processes here, where nothing is on a GPU."""
    ranks = config.trainer.num_ranks() if isinstance(config, TrainConfig) else 1
    engines = max(1, config.rollout.nnodes) * config.rollout.replicas_per_node
    return sum(size * (engines if name == "engine" else ranks) for name, size in needs.items())


def check_memory(config: Config, needs: dict[str, int], limit: int, whose: str) -> Iterator[Mistake]:
    """Weights that cannot fit, whatever the data."""
    wanted = host_bytes(config, needs)
    if limit and wanted > limit:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in needs.items())
        problem = f"its weights need {_gib(wanted)} ({parts}); {whose} has {_gib(limit)}"
        fix = "choose a smaller model, or train on GPUs: trainer.n_gpus_per_node"
        yield Mistake("model.path", problem, config.model.path, config.model.origin("path"), fix, "memory", 0)


def check_gpu_memory(config: Config, needs: dict[str, int], total: int) -> Iterator[Mistake]:
    """Weights that cannot fit on one GPU. Engines that share the trainer's sleep while it trains, and do not count."""
    shares = isinstance(config, TrainConfig) and config.rollout.nnodes == 0
    wanted = sum(size for name, size in needs.items() if name != "engine") if shares else max(needs.values(), default=0)
    if wanted > total:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in needs.items())
        problem = f"its weights need {_gib(wanted)} on each GPU ({parts}); a GPU has {_gib(total)}"
        fix = "train on more GPUs with FSDP sections, or choose a smaller model"
        yield Mistake("model.path", problem, config.model.path, config.model.origin("path"), fix, "memory", 0)


def checkpoint_bytes(config: TrainConfig, model: ModelSize) -> int:
    """One checkpoint: weights and optimizer state, of the adapters alone where there are some."""
    return (model.adapters or model.parameters) * BYTES[config.actor.model_dtype] * (1 + ADAM_STATES)


def free_bytes(directory: Path) -> int:
    """On the disk that a directory is on, or will be."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def check_disk(config: TrainConfig, model: ModelSize, free: int) -> Iterator[Mistake]:
    """A disk that does not hold what a run keeps."""
    kept = config.checkpoint.keep_last or 1
    one, journal = checkpoint_bytes(config, model), config.logging.journal_max_mb << 20
    wanted = one * (kept + 2)
    if wanted > free:
        problem = (
            f"{_gib(free)} are free there; {kept} checkpoints, the best one and one being written need {_gib(wanted)}"
        )
        fix = f"free space, or lower checkpoint.keep_last; the journal takes up to {_gib(journal)} more"
        key = "logging.run_dir"
        yield Mistake(key, problem, config.logging.directory(), config.origin(key), fix, "disk space", 0)


def describe_bytes(count: int) -> str:
    """A size for people."""
    return _gib(count)


def _gib(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):,.1f} MiB"
