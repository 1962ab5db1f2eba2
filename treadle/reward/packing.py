"""How a function's arguments leave the parent: as a pickle that holds plain dicts.

Owns the packing, which only the parent does. The parent never unpickles what a worker sent.
Invariant: what comes out is a copy, so nothing a function does to its arguments reaches the records.
"""

import copyreg
import pickle
from collections import ChainMap
from collections.abc import Mapping
from io import BytesIO
from types import MappingProxyType
from typing import Any

from treadle.config.value import FrozenDict


def _unfreeze(mapping: Mapping[str, Any]) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
    return dict, (dict(mapping),)


# Read-only maps become dicts: one kind cannot be pickled, the other would bring the config along.
_TABLE: ChainMap[Any, Any] = ChainMap({MappingProxyType: _unfreeze, FrozenDict: _unfreeze}, copyreg.dispatch_table)


def pack(value: Any) -> bytes:
    """A value as bytes for one of our own workers."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(value)
    return buffer.getvalue()


def copy(value: Any) -> Any:
    """What a worker would unpack, for functions that run in this process."""
    return pickle.loads(pack(value))
