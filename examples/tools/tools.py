"""Two kinds of tools: a function is one as it stands; a class is one with state, made anew for each session."""

from treadle.rollout.tools import tool


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: first number
        b: second number
    """
    return a * b


class Notebook:
    """Remembers what the agent writes down, for as long as its session lasts."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @tool
    async def write_note(self, text: str) -> str:
        """Write a line into the notebook.

        Args:
            text: the line
        """
        self.lines.append(text)
        return f"{len(self.lines)} lines"

    @tool
    async def read_notes(self) -> str:
        """Read the whole notebook."""
        return "\n".join(self.lines)
