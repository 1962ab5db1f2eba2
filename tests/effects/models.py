"""Models that several cases share: saved once, and gone with the process."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.policies import save_tiny_model
from tests.reward_models import save_causal, save_classifier

_KEPT: list[TemporaryDirectory[str]] = []


def _directory() -> Path:
    _KEPT.append(TemporaryDirectory())
    return Path(_KEPT[-1].name)


@cache
def tiny_model() -> Path:
    """A few thousand random weights, and no tokenizer."""
    return save_tiny_model(_directory())


@cache
def chat_model(seed: int = 0) -> Path:
    """With the golden tokenizer and its template."""
    return save_causal(_directory() / "model", seed=seed)


@cache
def classifier(seed: int = 0) -> Path:
    return save_classifier(_directory() / "model", seed=seed)
