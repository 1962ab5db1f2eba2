"""Checkpoint store of the Tinker API: what `tinker://` paths name, as directories.

    DIRECTORY/MODEL/weights/NAME             a PEFT adapter, and the optimizer's state: what training goes on from
    DIRECTORY/MODEL/sampler_weights/NAME     a PEFT adapter
    …/tinker.json                            its shape, steps, time, expiry and the client's notes

Owns names, contents and expiry. A path names nothing but a checkpoint of this store: its parts are checked, so no path
leads out of it. Checkpoints outlive the server: the next one on the same directory finds them.
Invariant: a checkpoint is whole or not there; one that has expired is gone.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.checkpoint.atomic_directory import atomic_directory, move_to_trash
from treadle.errors import TreadleError
from treadle.model.peft_files import StoredAdapter, read_adapter, write_adapter
from treadle.tinker.adapters import AdapterBase, AdapterShape, AdapterWeights
from treadle.tinker.refusals import RequestFailed

TRAINING, SAMPLER = "weights", "sampler_weights"
SCHEME = "tinker://"
_RECORD, _OPTIMIZER = "tinker.json", "optimizer.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+-]{0,150}")


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What is known of a checkpoint without its tensors."""

    base_model: str
    base_checksum: str
    """Of the base's weights: an adapter means something with those alone."""
    shape: AdapterShape
    num_steps: int
    created_at: float
    expires_at: float | None = None
    notes: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint: its place and its record."""

    model_id: str
    kind: str
    name: str
    directory: Path
    record: CheckpointRecord

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


class CheckpointStore:
    """The checkpoints of all models, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(
        self,
        base: AdapterBase,
        place: tuple[str, str, str],
        weights: AdapterWeights,
        record: CheckpointRecord,
        optimizer: Mapping[str, Tensor] | None = None,
        *,
        overwrite: bool = False,
    ) -> StoredCheckpoint:
        """Write a checkpoint of (model, kind, name); `optimizer` where training may go on from it."""
        model_id, kind, name = place
        target = self._place(model_id, kind, name)
        if target.exists():
            if not overwrite and self._read(target) is not None:
                raise RequestFailed(f"{SCHEME}{model_id}/{kind}/{name} exists: give another name, or overwrite=True")
            shutil.rmtree(move_to_trash(target))
        with atomic_directory(target) as draft:
            write_adapter(draft, base.module, StoredAdapter(weights.shape.settings, weights.factors, record.base_model))
            if optimizer is not None:
                tensors = {key: value.detach().cpu().contiguous() for key, value in optimizer.items()}
                save_file(tensors or {"none": torch.zeros(1)}, draft / _OPTIMIZER)
            (draft / _RECORD).write_text(json.dumps(asdict(record)), encoding="utf-8")
        return StoredCheckpoint(model_id, kind, name, target, record)

    def find(self, path: str) -> StoredCheckpoint:
        """The checkpoint that a tinker:// path names; a RequestFailed where there is none."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in (TRAINING, SAMPLER):
            raise RequestFailed(
                f"{path!r} is no path of a checkpoint: {SCHEME}MODEL/{TRAINING}/NAME or …/{SAMPLER}/NAME"
            )
        directory = self._place(*parts)
        record = self._read(directory)
        if record is None:
            raise RequestFailed(f"{path} is not in {self.directory}: it was never saved here, was deleted or expired")
        return StoredCheckpoint(parts[0], parts[1], parts[2], directory, record)

    def load_weights(self, found: StoredCheckpoint, device: torch.device) -> AdapterWeights:
        """The factors of a checkpoint."""
        try:
            stored = read_adapter(str(found.directory), "path")
        except TreadleError as error:
            raise RequestFailed(str(error)) from error
        factors = {name: (down.to(device), up.to(device)) for name, (down, up) in stored.factors.items()}
        return AdapterWeights(found.record.shape, factors)

    def load_optimizer(self, found: StoredCheckpoint) -> dict[str, Tensor]:
        """The optimizer's state of a checkpoint; a RequestFailed where it has none."""
        file = found.directory / _OPTIMIZER
        if not file.exists():
            raise RequestFailed(
                f"{found.path} has no optimizer state: it was saved for sampling. Load its weights alone"
            )
        return {name: value for name, value in load_file(file).items() if name != "none"}

    def delete(self, found: StoredCheckpoint) -> None:
        shutil.rmtree(move_to_trash(found.directory))

    def all(self, model_id: str | None = None) -> Iterator[StoredCheckpoint]:
        """Every checkpoint, of one model or of all, oldest first; those that have expired are deleted."""
        models = [model_id] if model_id is not None else self.models()
        found = []
        for model in models:
            for kind in (TRAINING, SAMPLER):
                for name in _names(self.directory / model / kind):
                    directory = self._place(model, kind, name)
                    record = self._read(directory)
                    if record is not None:
                        found.append(StoredCheckpoint(model, kind, name, directory, record))
        yield from sorted(found, key=lambda item: item.record.created_at)

    def models(self) -> list[str]:
        """Models that have checkpoints."""
        return _names(self.directory)

    def _read(self, directory: Path) -> CheckpointRecord | None:
        """The record of a checkpoint; None where there is none, or no longer."""
        try:
            values: dict[str, Any] = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        record = CheckpointRecord(**{"base_checksum": "", **values, "shape": AdapterShape(**values["shape"])})
        if record.expires_at is not None and record.expires_at < time.time():
            shutil.rmtree(move_to_trash(directory))
            return None
        return record

    def _place(self, model_id: str, kind: str, name: str) -> Path:
        for part in (model_id, name):
            if not _NAME.fullmatch(part):
                raise RequestFailed(
                    f"{part!r} is no name for a checkpoint: letters, digits and . _ : = + -, at most 150"
                )
        return self.directory / model_id / kind / name


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(item.name for item in directory.iterdir() if item.is_dir() and _NAME.fullmatch(item.name))
