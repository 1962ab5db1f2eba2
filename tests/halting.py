"""Weights that stop on their way: whoever reads them has the first tensor and waits, to be killed in the middle."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Halting(Mapping[str, Any]):
    """A parcel around another. Says by a file when its reader is in the middle."""

    def __init__(self, transfer: Mapping[str, Any], flag: Path) -> None:
        self._parcel = transfer
        self._flag = flag

    def __getitem__(self, name: str) -> Any:
        return self._parcel[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parcel)

    def __len__(self) -> int:
        return len(self._parcel)

    def items(self) -> Any:
        for number, pair in enumerate(self._parcel.items()):
            yield pair
            if number == 1:
                self._flag.touch()
                time.sleep(60)


class Tearing(Halting):
    """A parcel that breaks where the other one stops."""

    def items(self) -> Any:
        for number, pair in enumerate(self._parcel.items()):
            yield pair
            if number == 1:
                raise ConnectionError("torn")
