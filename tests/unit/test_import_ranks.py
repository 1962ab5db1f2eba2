"""The house rules, read from the source: who may import whom, and what nobody may do.

Imports inside functions and under TYPE_CHECKING count, and so does `import_module("name")`.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.package_source import FILES, PACKAGE, nodes

ROOT = ""
"""types.py, errors.py, terminal.py and the package itself."""

RANKS = {
    ROOT: 0,
    "config": 1,
    "observe": 2,
    "journal": 2,
    "data": 3,
    "process": 3,
    "model": 2,
    "engine": 4,
    "sandbox": 4,
    "reward": 5,
    "rollout": 6,
    "algorithm": 6,
    "policy": 7,
    "weights": 8,
    "checkpoint": 8,
    "migrate": 2,
    "trainer": 9,
    "tinker": 9,
    "inspect": 10,
    "simulate": 10,
    "cluster": 11,
    "gateway": 7,
    "view": 11,
    "preflight": 12,
    "cli": 13,
    "recipes": 13,
    "api": 14,
}
"""A folder imports lower ranks only, itself aside. `models` holds files, not code."""

OWNERS = {"ray": ("cluster/",), "vllm": ("engine/vllm",), "torch.distributed": ("policy/", "weights/")}
"""Packages that only some places may import."""

ENVIRONMENT = ("cli/", "cluster/")
"""Who may read or change the environment."""

ENVIRONMENT_EXEMPT = {
    "reward/sandbox/process.py": "the allow-list of what reward workers get of the environment is applied there",
    "reward/sandbox/limits.py": "a sandbox process sets its own thread counts before a numeric library reads them",
    "engine/gpus.py": "which GPUs a process sees, and what they are called, is said there and nowhere else",
    "gateway/agents.py": "the allow-list of what agent programs get of the environment is applied there",
    "sandbox/container.py": "the container engine finds its daemon and its storage by its own variables",
    "process/guard.py": "what it starts gets the environment that it was started with",
    "process/child_handle.py": "a child inherits the environment, with the mark by which what it started is found",
    "policy/local_ranks.py": "a rank inherits the environment, and an interface for gloo where that names none",
}
"""Single files that may too, each with the reason it cannot be avoided."""

UPWARD = {
    (
        "config/legacy.py",
        "treadle.migrate.translate",
    ): "the loader finds verl's keys here, and imports their translation",
    ("__init__.py", "treadle.api"): "type checkers see the names that are imported when they are first used",
    ("__init__.py", "treadle.api.research"): "the same",
    ("rollout/__init__.py", "treadle.api"): "treadle.rollout is a package and can be called",
}
"""Imports of a higher rank, inside a function, each with its reason."""

FRAME_WORDS = {"currentframe", "_getframe", "_getframemodulename", "getouterframes", "nest_asyncio"}


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def folder(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    if parts == ("__main__.py",):
        return "cli"
    return parts[0] if len(parts) > 1 else ROOT


def imports(module: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a file imports, wherever in the file it does."""
    for node in module:
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


def test_every_folder_has_a_rank():
    assert {folder(file) for file in FILES} <= RANKS.keys()


def test_a_file_imports_lower_ranks_only():
    offenders = []
    for path in FILES:
        own = folder(path)
        for line, name in imports(nodes(path)):
            parts = name.split(".")
            other = parts[1] if len(parts) > 1 and parts[1] in RANKS else ROOT
            if (place(path), name.rpartition(".")[0]) in UPWARD:
                continue
            if is_under(name, "treadle") and other != own and RANKS[other] >= RANKS[own]:
                ranks = f"{own or 'the root'} has rank {RANKS[own]}, {other} has rank {RANKS[other]}"
                offenders.append(f"{place(path)}:{line} imports {name}: {ranks}")
    assert offenders == []


def test_imports_are_absolute():
    assert [
        f"{place(path)}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level
    ] == []


def test_heavy_packages_stay_where_they_belong():
    offenders = []
    for path in FILES:
        module = nodes(path)
        attributes = ((node.lineno, dotted(node)) for node in module if isinstance(node, ast.Attribute))
        used = [*imports(module), *attributes]
        for package, owners in OWNERS.items():
            if not place(path).startswith(owners):
                found = [line for line, name in used if is_under(name, package)]
                offenders += [
                    f"{place(path)}:{line} uses {package}, which {' and '.join(owners)} own" for line in found
                ]
    assert offenders == []


def test_nobody_looks_at_frames_or_patches_event_loops():
    offenders = []
    for path in FILES:
        module = nodes(path)
        words = {node.attr for node in module if isinstance(node, ast.Attribute)}
        words |= {part for _, name in imports(module) for part in name.split(".")}
        offenders += [f"{place(path)} uses {word}" for word in words & FRAME_WORDS]
    assert offenders == []


def test_only_the_outermost_layers_read_the_environment():
    """Pass the value in, or list the file in ENVIRONMENT_EXEMPT and say why."""
    forbidden = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    offenders = []
    for path in FILES:
        if not place(path).startswith(ENVIRONMENT) and place(path) not in ENVIRONMENT_EXEMPT:
            words = {dotted(node) for node in nodes(path)} | {name for _, name in imports(nodes(path))}
            offenders += [f"{place(path)} uses {word}" for word in words & forbidden]
    assert offenders == []


def test_exempt_files_exist_and_need_it():
    for name, reason in ENVIRONMENT_EXEMPT.items():
        assert reason
        assert "environ" in (PACKAGE / name).read_text(encoding="utf-8")


def writes_around(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return dotted(node.func) == "object.__setattr__"
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        return False
    targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
    return any(isinstance(target, ast.Subscript) and dotted(target.value).endswith("__dict__") for target in targets)


def test_only_config_writes_into_sections():
    """Sections are frozen; nobody gets around that by writing into an instance's dict."""
    assert [
        f"{place(path)}:{node.lineno}"
        for path in FILES
        if not place(path).startswith("config/")
        for node in nodes(path)
        if writes_around(node)
    ] == []


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
    module = tuple(ast.walk(ast.parse(source)))
    names = {name for _, name in imports(module)}
    assert {"os", "treadle.trainer.step", "ray.util", "vllm.engine"} <= names
    words = {dotted(node) for node in module}
    assert {"os.environ", "torch.distributed.barrier", "sys._getframe"} <= words
    for line in ("object.__setattr__(section, 'n', 1)", "section.__dict__['n'] = 1", "del section.__dict__['n']"):
        assert any(map(writes_around, ast.walk(ast.parse(line))))


def test_no_function_is_longer_than_a_screen():
    """Kernels aside: Triton has no calls worth the name."""
    long = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if node.end_lineno - node.lineno >= 60 and not is_kernel:
                    long.append(f"{place(path)}:{node.lineno} {node.name}")
    assert long == []
