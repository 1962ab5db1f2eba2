"""Source scan: the first use of a text runner that a function can reach, by the syntax trees of the user's modules.

    reached    what the function names: functions, classes and values of its module, and of the user's modules that it
               imports; statements that run when those are imported; functions that a decorator of theirs may register
    read       names through `import … as`, `from … import`, `run = exec`, `importlib.import_module("os")` and
               `getattr(os, "system")`; a text runner counts where it is called, and where it is passed on as a value

Owns the list of text runners, which are functions of Python and of well-known packages where text alone, as an
argument, becomes code, a command or an unpickled object; and how sources are read. sympy counts as a whole: nearly all
of its functions pass texts to `sympify`, which evaluates them. Imports no module that it reads, and knows no pickles. A
function that is reached by a name put together at run time, or by a package that is installed, is not seen.
"""

import ast
import builtins
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import resolve_name
from pathlib import Path

from treadle.config.plugin import find_in_working_directory, find_source, is_own_module, parse_source, source_file

_PATTERNS: tuple[str, ...] = (
    *(
        "builtins.exec",
        "builtins.eval",
        "builtins.compile",
        "code.*",
        "codeop.*",
        "runpy.run_*",
        "timeit.[tr]*",
        "timeit.Timer",
    ),
    *("cProfile.run*", "profile.run*", "pdb.run*", "trace.Trace", "importlib.util.spec_from_file_location"),
    *("os.system", "os.popen", "os.exec*", "os.spawn*", "os.posix_spawn*", "pty.*", "_posixsubprocess.*"),
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_*", "subprocess.get*"),
    *("asyncio.create_subprocess_*", "asyncio.subprocess.create_subprocess_*", "multiprocessing.*Process"),
    *("pickle.load*", "pickle.Unpickler", "_pickle.load*", "marshal.load*", "shelve.open", "dill.load*"),
    *("cloudpickle.load*", "joblib.load", "jsonpickle.decode", "yaml.load*", "yaml.unsafe_load*", "yaml.full_load*"),
    *("pandas.eval", "pandas.read_pickle", "DataFrame.eval", "DataFrame.query", "numexpr.*"),
    *("sympy.*", "latex2sympy*", "math_verify.*", "pexpect.*", "sh.*", "plumbum.*"),
)
"""A star stands for any letters, dots too."""

WHOLE_MODULES = frozenset({"builtins", "subprocess", "pty", "runpy", "sympy", "numexpr"})
"""Modules that lead to such a function where they are passed on as a value."""

DATA_FRAMES = ("pandas", {"eval": "DataFrame.eval", "query": "DataFrame.query"})
"""Methods of objects whose type no source tells: they count in a file that imports the package, with an argument."""


_SAME = {"posix": "os", "nt": "os"}
"""Modules that functions say they are of, and the one that they are called through."""


def runs_text(name: str) -> str | None:
    """The text runner that a dotted name leads to, as it is to be called in messages; None where it is none."""
    top, dot, rest = name.partition(".")
    parts = f"{_SAME.get(top, top)}{dot}{rest}".split(".")
    for end in range(len(parts), 0, -1):
        found = ".".join(parts[:end])
        if any(fnmatchcase(found, pattern) for pattern in _PATTERNS):
            return found.removeprefix("builtins.")
    return None


_MAX_MODULES = 200
_BUILTINS = frozenset(dir(builtins))
_IMPORTERS = frozenset({"importlib.import_module", "builtins.__import__"})
_HARMLESS_DECORATORS = (
    "builtins.",
    "functools.",
    "dataclasses.",
    "contextlib.",
    "typing.",
    "abc.",
    "enum.",
    "treadle.",
)
"""Decorators that keep a function where it is defined, under its name."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class TextRun:
    """A use of a text runner, in a file of the user's."""

    file: str
    line: int
    name: str
    called: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {'calls' if self.called else 'uses'} {self.name}"


class SourceModule:
    """One file: what its names stand for."""

    def __init__(self, name: str, file: Path, tree: ast.Module) -> None:
        self.file = file
        self.definitions: dict[str, list[ast.AST]] = {}
        """Functions, classes and assignments of the module, by name."""
        self.statements: list[ast.AST] = []
        """What runs when it is imported, but for the bodies of functions."""
        self._package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        self._imported: dict[str, set[str]] = {}
        self._stars: list[str] = []
        for node in ast.walk(tree):
            self._read_imports(node)
        for node in ast.walk(tree):
            self._read_bindings(node)
        self._read_statements(tree.body)
        self.has_data_frames = any(found.startswith(DATA_FRAMES[0]) for found in self._all_imported())

    def _all_imported(self) -> Iterator[str]:
        return (name for names in self._imported.values() for name in names)

    def _read_imports(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self._imported.setdefault(name, set()).add(alias.name if alias.asname else name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = resolve_name("." * node.level + base, self._package) if self._package else base
            for alias in node.names:
                if alias.name == "*":
                    self._stars.append(base)
                else:
                    self._imported.setdefault(alias.asname or alias.name, set()).add(f"{base}.{alias.name}")

    def _read_bindings(self, node: ast.AST) -> None:
        """`run = os.system`, and functions that set a name of the module."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and (found := self.stands_for(node.value)):
                    self._imported.setdefault(target.id, set()).update(found)
        elif isinstance(node, _Function):
            for inner in ast.walk(node):
                for name in inner.names if isinstance(inner, ast.Global) else ():
                    self.definitions.setdefault(name, []).append(node)

    def _read_statements(self, body: Iterable[ast.AST]) -> None:
        for node in body:
            if isinstance(node, _Function | ast.ClassDef):
                self.definitions.setdefault(node.name, []).append(node)
                if any(map(self._may_register, node.decorator_list)):
                    self.statements.append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                self.statements.append(node)
                for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self.definitions.setdefault(name.id, []).append(node)
            elif isinstance(node, ast.If) and "__main__" in ast.dump(node.test):
                self._read_statements(node.orelse)
            elif isinstance(node, ast.expr | ast.Expr):
                self.statements.append(node)
            else:
                self._read_statements(ast.iter_child_nodes(node))

    def _may_register(self, decorator: ast.expr) -> bool:
        found = self.stands_for(decorator.func if isinstance(decorator, ast.Call) else decorator)
        return not found or not all(name.startswith(_HARMLESS_DECORATORS) for name in found)

    def stands_for(self, node: ast.expr) -> set[str]:
        """The dotted names that an expression may stand for; none where it is no name, or of this module."""
        if isinstance(node, ast.Name):
            found = set(self._imported.get(node.id, ()))
            if not found and node.id not in self.definitions:
                found |= {f"{star}.{node.id}" for star in self._stars}
                found |= {f"builtins.{node.id}"} if node.id in _BUILTINS else set()
            return {"builtins"} if node.id == "__builtins__" else found
        if isinstance(node, ast.Attribute):
            return {f"{base}.{node.attr}" for base in self.stands_for(node.value)}
        if isinstance(node, ast.Subscript) and isinstance(name := _constant(node.slice), str):
            return {f"{base}.{name}" for base in self.stands_for(node.value) if base == "builtins"}
        if isinstance(node, ast.Call) and node.args:
            return self._result_of(node)
        return set()

    def _result_of(self, call: ast.Call) -> set[str]:
        """What a call gives that imports by a constant name, or looks up a constant attribute."""
        function, first = self.stands_for(call.func), call.args[0]
        if function & _IMPORTERS and isinstance(name := _constant(first), str):
            return {name}
        if "builtins.getattr" in function and len(call.args) > 1 and isinstance(name := _constant(call.args[1]), str):
            return {f"{base}.{name}" for base in self.stands_for(first)}
        return set()


class SourceScan:
    """A search over the user's modules; each definition is looked at once."""

    def __init__(self) -> None:
        find_in_working_directory()
        self._modules: dict[str, SourceModule | None] = {}
        self._seen: set[int] = set()
        self._waiting: deque[tuple[SourceModule, ast.AST]] = deque()
        self._top = ""
        """The top package of the function's module, which may be an installed one."""

    def find(self, module: str, name: str) -> TextRun | None:
        """The first use that a function of a module, or of a file, can reach."""
        self._top = module.partition(".")[0]
        self._reach(module, name.partition(".")[0])
        return self._search()

    def find_any(self, names: Iterable[str]) -> TextRun | None:
        """The first use that these dotted names of modules of the user's can reach."""
        for name in names:
            self._follow(name)
        return self._search()

    def _search(self) -> TextRun | None:
        while self._waiting:
            module, node = self._waiting.popleft()
            for chain, called, arguments in _chains(node):
                if found := self._judge(module, chain, called, arguments):
                    return found
                self._reach_names(module, chain)
        return None

    def _judge(self, module: SourceModule, chain: ast.expr, called: bool, arguments: bool) -> TextRun | None:
        names = module.stands_for(chain)
        runners = [found for name in names if (found := runs_text(name))]
        runners += [] if called else sorted(names & WHOLE_MODULES)
        if isinstance(chain, ast.Attribute) and not names and called and arguments and module.has_data_frames:
            runners += [found for method, found in DATA_FRAMES[1].items() if method == chain.attr]
        return TextRun(module.file.name, chain.lineno, min(runners), called) if runners else None

    def _reach_names(self, module: SourceModule, chain: ast.expr) -> None:
        for name in module.stands_for(chain):
            self._follow(name)
        root = _root(chain)
        if isinstance(root, ast.Name):
            self._add(module, module.definitions.get(root.id, ()))

    def _follow(self, dotted: str) -> None:
        """To what a dotted name of the user's own is."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            if self._load(module) is not None:
                self._reach(module, parts[end] if end < len(parts) else None)
                return

    def _reach(self, module: str, name: str | None) -> None:
        """A name of a module, or all of it where the name is not found there."""
        found = self._load(module)
        if found is None:
            return
        names = set() if name is None else found.stands_for(ast.Name(name))
        nodes = [] if name is None else found.definitions.get(name, [])
        for dotted in names:
            self._follow(dotted)
        self._add(found, nodes if nodes or names else [node for every in found.definitions.values() for node in every])
        self._add(found, found.statements)

    def _add(self, module: SourceModule, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            if id(node) not in self._seen:
                self._seen.add(id(node))
                self._waiting.append((module, node))

    def _load(self, name: str) -> SourceModule | None:
        if name not in self._modules:
            self._modules[name] = self._read(name) if len(self._modules) < _MAX_MODULES else None
        return self._modules[name]

    def _read(self, name: str) -> SourceModule | None:
        is_file = name.endswith(".py")
        if not (is_file or name.partition(".")[0] == self._top or is_own_module(name)):
            return None
        file = source_file(name) if is_file else find_source(name)
        if file is None:
            return None
        try:
            return SourceModule("" if is_file else name, file, parse_source(file.read_bytes()))
        except (SyntaxError, ValueError, RecursionError):  # the real import reports it
            return None


def _chains(node: ast.AST) -> Iterator[tuple[ast.expr, bool, bool]]:
    """Names and attributes that are read below a node, each as long as it is; whether it is called, and with any
    argument by position. Annotations are not read."""
    waiting: list[tuple[ast.AST, bool, bool]] = [(node, False, False)]
    while waiting:
        here, called, arguments = waiting.pop()
        if isinstance(here, ast.Call):
            yield from _looked_up(here)
            waiting += [(item, False, False) for item in (*here.args, *here.keywords)]
            waiting.append((here.func, True, bool(here.args)))
        elif isinstance(here, ast.Name | ast.Attribute | ast.Subscript):
            if isinstance(here.ctx, ast.Load):
                yield here, called, arguments
            root = _root(here)
            if not isinstance(root, ast.Name):
                below = ast.iter_child_nodes(root) if isinstance(root, ast.Subscript) else [root]
                waiting += [(item, False, False) for item in below]
        else:
            waiting += [(item, False, False) for item in _evaluated(here)]


def _root(chain: ast.expr) -> ast.expr:
    while isinstance(chain, ast.Attribute):
        chain = chain.value
    return chain


def _looked_up(call: ast.Call) -> Iterator[tuple[ast.expr, bool, bool]]:
    """`getattr(os, "system")`, which is a chain too."""
    if isinstance(call.func, ast.Name) and call.func.id == "getattr":
        yield call, False, False


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    annotations = {"annotation", "returns", "type_comment"}
    for field, value in ast.iter_fields(node):
        if field not in annotations:
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST))


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None
