"""A reward function of one's own: plain Python, any of the arguments below by name."""


def short(response: str, most: int) -> float:
    """1 for an answer of at most so many characters."""
    return float(len(response) <= most)
