"""Text runners: the functions of Python and of well-known packages that run the text they are given, by dotted name.

Owns the list, and nothing of how uses are found. A function counts where text alone, as an argument, becomes code, a
command or an unpickled object. sympy counts as a whole: nearly all of its functions pass texts to `sympify`, which
evaluates them.
"""

from fnmatch import fnmatchcase

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
