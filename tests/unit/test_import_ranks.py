"""The house rules, read from the source: who may import whom, and what nobody may do.

Imports inside functions and under TYPE_CHECKING count, and so does `import_module("name")`.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import treadle

PACKAGE = Path(treadle.__file__).parent

ROOT = ""
"""types.py, errors.py, terminal.py and the package itself."""

RANKS = {
    ROOT: 0,
    "config": 1,
    "observe": 2,
    "journal": 2,
    "data": 3,
    "model": 2,
    "engine": 4,
    "reward": 5,
    "rollout": 6,
    "algorithm": 6,
    "policy": 7,
    "weights": 8,
    "checkpoint": 8,
    "trainer": 9,
    "cluster": 10,
    "gateway": 10,
    "view": 10,
    "cli": 11,
    "recipes": 11,
}
"""A folder imports lower ranks only, itself aside. `models` holds files, not code."""

OWNERS = {"ray": ("cluster/",), "vllm": ("engine/vllm",), "torch.distributed": ("policy/", "weights/")}
"""Packages that only some places may import."""

ENVIRONMENT = ("cli/", "cluster/")
"""Who may read or change the environment."""

ENVIRONMENT_EXEMPT = {
    "reward/limits.py": "a sandbox process sets its own thread counts before a numeric library reads them",
    "engine/gpus.py": "which GPUs a process sees, and what they are called, is said there and nowhere else",
}
"""Single files that may too, each with the reason it cannot be avoided."""

FRAME_WORDS = {"currentframe", "_getframe", "_getframemodulename", "getouterframes", "nest_asyncio"}

FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def folder(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    if parts == ("__main__.py",):
        return "cli"
    return parts[0] if len(parts) > 1 else ROOT


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a file imports, wherever in the file it does."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.fixture(params=FILES, ids=place)
def path(request) -> Path:
    return request.param


def test_every_folder_has_a_rank():
    assert {folder(file) for file in FILES} <= RANKS.keys()


def test_a_file_imports_lower_ranks_only(path):
    own = folder(path)
    for line, name in imports(tree(path)):
        if is_under(name, "treadle"):
            parts = name.split(".")
            other = parts[1] if len(parts) > 1 and parts[1] in RANKS else ROOT
            assert other == own or RANKS[other] < RANKS[own], (
                f"{place(path)}:{line} imports {name}: {own or 'the root'} has rank {RANKS[own]}, "
                f"{other} has rank {RANKS[other]}"
            )


def test_imports_are_absolute(path):
    relative = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative, f"{place(path)}: relative import at line {relative}"


def test_heavy_packages_stay_where_they_belong(path):
    module = tree(path)
    used = [
        *imports(module),
        *((node.lineno, dotted(node)) for node in ast.walk(module) if isinstance(node, ast.Attribute)),
    ]
    for package, owners in OWNERS.items():
        if not place(path).startswith(owners):
            found = [line for line, name in used if is_under(name, package)]
            assert not found, f"{place(path)}:{found[0]} uses {package}, which belongs to {' and '.join(owners)}"


def test_nobody_looks_at_frames_or_patches_event_loops(path):
    module = tree(path)
    words = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    words |= {part for _, name in imports(module) for part in name.split(".")}
    assert not words & FRAME_WORDS, f"{place(path)} uses {words & FRAME_WORDS}"


def test_only_the_outermost_layers_read_the_environment(path):
    if place(path).startswith(ENVIRONMENT) or place(path) in ENVIRONMENT_EXEMPT:
        return
    module = tree(path)
    words = {dotted(node) for node in ast.walk(module)} | {name for _, name in imports(module)}
    found = {word for word in words if word in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")}
    assert not found, (
        f"{place(path)} uses {found}: pass the value in, or list the file in ENVIRONMENT_EXEMPT and say why"
    )


def test_exempt_files_exist_and_need_it():
    for name, reason in ENVIRONMENT_EXEMPT.items():
        assert reason
        assert "environ" in (PACKAGE / name).read_text(encoding="utf-8")


def test_only_config_writes_into_sections(path):
    """Sections are frozen; nobody gets around that by writing into an instance's dict."""
    if place(path).startswith("config/"):
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and dotted(node.func) == "object.__setattr__":
            pytest.fail(f"{place(path)}:{node.lineno} writes around a frozen class")
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = node.targets if not isinstance(node, ast.AugAssign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Subscript):
                    assert not dotted(target.value).endswith("__dict__"), (
                        f"{place(path)}:{node.lineno} writes a __dict__"
                    )


def test_these_rules_catch_what_they_forbid():
    source = """
import os
from treadle.trainer import step
def late():
    import ray.util
    from importlib import import_module
    import_module("vllm.engine")
    torch.distributed.barrier()
    return os.environ["X"], sys._getframe()
"""
    module = ast.parse(source)
    names = {name for _, name in imports(module)}
    assert {"os", "treadle.trainer.step", "ray.util", "vllm.engine"} <= names
    words = {dotted(node) for node in ast.walk(module)}
    assert {"os.environ", "torch.distributed.barrier", "sys._getframe"} <= words
