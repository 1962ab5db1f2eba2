"""Terminal output: the only place that prints, to a terminal or to whatever reads the command's output.

Owns the escaping of text that models, tools, data rows and endpoints wrote: control characters are written out
(`\\x1b`), so no text sets a title, clears the screen, writes to the clipboard or turns the reading direction, and
nothing is read as rich's markup. Knows nothing about what is printed.
Invariant: what `printable` returns holds no control character but line feeds and tabs. `print` is called nowhere else.
"""

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_CONTROLS = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),  # DEL and the C1 controls, some of which begin an escape sequence on their own
    *(0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)),  # line breaks and reading direction
    *range(0xFFF9, 0xFFFC),
)
_ESCAPES = {code: chr(code).encode("unicode_escape").decode("ascii") for code in _CONTROLS}


def printable(text: object) -> str:
    """The text with its control characters written out; line feeds and tabs stay, and `\\r\\n` is a line feed."""
    escaped = str(text).replace("\r\n", "\n").translate(_ESCAPES)
    return escaped.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate pair cannot be printed


def say(text: object = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text of any origin at once. To standard output, where no stream is given."""
    print(printable(text), file=sys.stdout if file is None else file, end=end, flush=True)


def warn(text: object) -> None:
    """Print text to standard error."""
    say(text, file=sys.stderr)


def in_notebook() -> bool:
    """Whether output goes to a notebook: it shows HTML, can replace what it showed, and marks standard error in red."""
    package = sys.modules.get("IPython")
    shell = package.get_ipython() if package is not None else None
    return hasattr(shell, "kernel")


def note(text: object) -> None:
    """Print text that goes with a run and is not its result: to standard error, in a notebook to standard output."""
    say(text, file=sys.stdout if in_notebook() else sys.stderr)


def cell(text: object, style: str = "") -> "Text":
    """Text for a table of rich."""
    from rich.text import Text

    return Text(printable(text), style=style)


def make_console(stream: TextIO | None = None) -> "Console":
    """A console that reads no markup and no emoji codes in the texts it is given."""
    from rich.console import Console

    return Console(file=stream, markup=False, emoji=False, highlight=False)


def show_cursor() -> None:
    """Give the cursor back that a live display has hidden: for when nothing may be left to do it later."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and stream.isatty():
            print("\x1b[?25h", file=stream, end="", flush=True)
