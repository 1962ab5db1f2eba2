"""docs/troubleshooting.md quotes messages as the code has them."""

import ast
import re
from pathlib import Path

from tests.package_source import FILES, nodes

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = PAGE.partition("## By its message\n")[2].partition("\n## ")[0].splitlines()
MESSAGES = [message for row in ROWS[5:] for message in re.findall(r"`([^`]+)`", row.split("|")[1:2][0] if row else "")]


def test_every_message_on_the_page_is_one_of_the_code():
    texts = [
        node.value
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    pieces = {piece.strip() for message in MESSAGES for piece in message.split("…") if piece.strip(" ,;")}
    assert len(MESSAGES) >= 15
    assert [piece for piece in sorted(pieces) if not any(piece in text for text in texts)] == []
