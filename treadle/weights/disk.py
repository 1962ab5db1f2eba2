"""Disk transport: weights through safetensors files, for any processes that see one directory.

Owns one folder for each version: a safetensors file for each bucket, written whole before any receiver is told. What a
killed run left in the directory is removed when the next one starts. Slower than memory, and the fallback where there
is no other way. The shortest transport: copy this file to write another.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import EngineFailure, RunError
from treadle.weights.transfer import CastTensors, TensorSpec, WeightTransfer

FILE_BYTES = 32 << 20

_PREFIX = "weights-"
_DIRECTORY_MODE, _FILE_MODE = 0o700, 0o600
"""Weights may be as private as the run that makes them."""


class DiskTransport:
    """The sender's side. `directory` must mean the same place to the receivers, and belong to this run alone."""

    def __init__(self, directory: Path, *, bucket_bytes: int | None = None) -> None:
        self._directory = directory
        self._bucket_bytes = bucket_bytes or FILE_BYTES
        remove_leftovers(directory)

    def publish(self, version: int, tensors: CastTensors) -> WeightTransfer:
        """Write everything; returns a transfer that reads it."""
        folder = self._folder(version)
        transfer = DiskTransfer(tensors.specs(), self._bucket_bytes, folder)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            self._directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            folder.mkdir(mode=_DIRECTORY_MODE)
            for number, bucket in enumerate(transfer.buckets):
                contents = {spec.name: tensors[spec.name].cpu().contiguous() for spec in bucket.specs}
                save_file(contents, transfer.file(number))
                transfer.file(number).chmod(_FILE_MODE)
        except (OSError, SafetensorError) as error:
            raise RunError(f"weights of version {version} could not be written to {folder}: {error}") from error
        return transfer

    def retire(self, version: int) -> None:
        shutil.rmtree(self._folder(version), ignore_errors=True)

    def close(self) -> None:
        remove_leftovers(self._directory)

    def _folder(self, version: int) -> Path:
        return self._directory / f"{_PREFIX}{version}"


def remove_leftovers(directory: Path) -> None:
    """Remove every version that was not taken back."""
    for left in directory.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


class DiskTransfer(WeightTransfer):
    """Opened by reading the files."""

    def __init__(self, specs: Sequence[TensorSpec], bucket_bytes: int, folder: Path) -> None:
        super().__init__(specs, bucket_bytes)
        self._folder = folder

    def file(self, number: int) -> Path:
        return self._folder / f"bucket-{number:05}.safetensors"

    def batches(self) -> Iterator[Sequence[tuple[str, Tensor]]]:
        for number, bucket in enumerate(self.buckets):
            try:
                with safe_open(self.file(number), "pt") as opened:
                    tensors: dict[str, Tensor] = {spec.name: opened.get_tensor(spec.name) for spec in bucket.specs}
            except (OSError, SafetensorError) as error:
                raise EngineFailure(f"weights on disk, {self.file(number)}: {error}") from error
            yield [*tensors.items()]
