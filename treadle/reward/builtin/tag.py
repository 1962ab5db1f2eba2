"""The part of a response that stands between two tags, such as `<answer>` and `</answer>`.

Invariant: linear in the length of the text, whatever a model wrote.
"""


def read_tag(text: str, tag: str) -> str | None:
    """The text inside the last complete pair of tags, stripped; None where there is no pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end].strip()
