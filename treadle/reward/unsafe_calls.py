"""Reward functions that may run a model's text: calls of exec, eval, compile or a shell in the source, found unrun.

Reads the file that a function comes from, by its syntax tree, and imports nothing. A function that was serialized has
no source: the names in its pickle are looked at, which is not loaded either; names are too little to fence it by, and
it is only warned of. A hint, and no proof: text may reach code in many other ways.
Owns the default of `reward.functions.NAME.sandbox`: on where a call is found and workers run, else as the key says.
"""

import ast
import pickletools
import sys
from collections.abc import Iterator
from pathlib import Path

from treadle.config import RewardConfig
from treadle.config.plugin import source_file
from treadle.config.reward import RewardFunctionConfig
from treadle.config.source_tree import parse_source

_BUILTINS = frozenset({"exec", "eval", "compile"})
_OF_MODULES = {"os": frozenset({"system", "popen", "execv", "execve", "execvp", "spawnv", "posix_spawn"})}
_MODULES = frozenset({"subprocess", "pty"})
_IN_PICKLES = frozenset({"exec", "eval", "subprocess", "system", "popen"})


def find_call(function: RewardFunctionConfig) -> str | None:
    """The first call in a function's file that may run text, with its line; None for a built-in."""
    module, colon, _ = function.path.rpartition(":")
    if not colon or module.startswith("treadle."):
        return None
    file = source_file(module)
    return None if file is None else _first_call(file)


def fenced_by_default(reward: RewardConfig, function: RewardFunctionConfig) -> str | None:
    """The call for which a function is sandboxed though its key does not say so; None where it is not."""
    serialized = function.path.rpartition(":")[0].endswith(".pkl")
    if function.sandbox is not None or reward.num_workers == 0 or serialized or sys.platform != "linux":
        return None
    return find_call(function)


def find_fenced(reward: RewardConfig) -> Iterator[str]:
    """A line for each function that is sandboxed by default: why, and the key that turns it off."""
    for name, function in reward.functions.items():
        if found := fenced_by_default(reward, function):
            yield f"{name} is sandboxed, since {found}; reward.functions.{name}.sandbox=false turns that off"


def find_unsafe_calls(reward: RewardConfig) -> Iterator[str]:
    """A warning for each function of the user's that has such a call and no sandbox."""
    for name, function in reward.functions.items():
        if function.sandbox or fenced_by_default(reward, function) is not None:
            continue
        found = find_call(function)
        if found is not None:
            yield (
                f"reward.functions.{name}: {found}: answers that reach it run as you, with your files and network: "
                f"set reward.functions.{name}.sandbox=true, and run programs by treadle.reward.sandbox.run_python or "
                "the built-in code_tests, where they cannot decide their own score"
            )


def _first_call(file: Path) -> str | None:
    if file.suffix == ".pkl":
        names = _pickled_names(file.read_bytes()) & _IN_PICKLES
        return f"{file.name} uses {min(names)}" if names else None
    try:
        tree = parse_source(file.read_bytes())
    except (SyntaxError, ValueError):  # the real import reports it
        return None
    calls = sorted(
        (node.lineno, called) for node in ast.walk(tree) if isinstance(node, ast.Call) and (called := _unsafe(node))
    )
    return f"{file.name}:{calls[0][0]} calls {calls[0][1]}" if calls else None


def _unsafe(call: ast.Call) -> str | None:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id if function.id in _BUILTINS else None
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        module, name = function.value.id, function.attr
        if module in _MODULES or name in _OF_MODULES.get(module, ()):
            return f"{module}.{name}"
    return None


def _pickled_names(content: bytes) -> set[str]:
    try:
        return {argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, str)}
    except ValueError:
        return set()
