"""Context variables across processes: agent workers and reward workers see the values set in the caller.

A variable is sent by its name, `module:attribute`, with its value as a pickle; it is set in the other process before
the user's code runs. Not sent: a variable that is no attribute of an importable module (made inside a function, or in
a script started as `python script.py`), and a value that cannot be pickled. Each of them is logged once, by name.
"""

import logging
import pickle
import sys
from contextvars import ContextVar, copy_context
from importlib import import_module
from typing import Any

log = logging.getLogger(__name__)

Captured = tuple[tuple[str, bytes], ...]
"""Names and pickled values."""

_OTHERS = frozenset({"decimal_context", "parent_header", "shell_parent", "shell_parent_ident"})
"""Variables of Python's own C code and of notebook kernels, which are not expected to travel."""

_NAMES: dict[ContextVar[Any], str | None] = {}
_TOLD: set[ContextVar[Any]] = set()


def capture() -> Captured:
    """The variables that are set here, as far as they can travel."""
    captured = []
    for variable, value in copy_context().items():
        name = _name(variable)
        if name is None:
            _tell(variable, "is no attribute of a module that other processes can import")
            continue
        try:
            captured.append((name, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)))
        except Exception as error:  # noqa: BLE001  whatever keeps a user's value from being pickled
            _tell(variable, f"has a value that cannot be pickled ({type(error).__name__}: {error})")
    return tuple(captured)


def restore(captured: Captured) -> None:
    """Set the variables in the current context. One whose module is not found here is left as it is, and logged."""
    for name, value in captured:
        module, _, attribute = name.partition(":")
        try:
            getattr(import_module(module), attribute).set(pickle.loads(value))
        except Exception as error:  # noqa: BLE001  the user's module, or the user's class
            log.warning("context variable %s did not arrive: %s: %s", name, type(error).__name__, error)


def _name(variable: ContextVar[Any]) -> str | None:
    if variable not in _NAMES:
        _NAMES[variable] = _find(variable)
    return _NAMES[variable]


def _find(variable: ContextVar[Any]) -> str | None:
    for module_name, module in list(sys.modules.items()):
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is variable:
                name = _importable(module_name, module)
                if name is not None:
                    return f"{name}:{attribute}"
    return None


def _importable(name: str, module: Any) -> str | None:
    """What other processes call a module; None for a script."""
    if name != "__main__":
        return name
    spec = getattr(module, "__spec__", None)  # there is one where it was started with -m
    return None if spec is None else spec.name.removesuffix(".__main__")


def _tell(variable: ContextVar[Any], problem: str) -> None:
    if variable not in _TOLD and variable.name not in _OTHERS:
        _TOLD.add(variable)
        log.warning("context variable %r does not reach worker processes: it %s", variable.name, problem)
