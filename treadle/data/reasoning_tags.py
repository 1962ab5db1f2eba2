"""Reasoning tags: what a model's reasoning stands between, as its chat template writes it.

Owns the search: a template is given a turn with reasoning, in each of the forms that templates take, and what stands
around it is read off. Text only: no id depends on what is found here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treadle.data.chat_template import PROBE, ChatTemplate
from treadle.data.incremental import MARK
from treadle.errors import PromptFailure


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """A pair of texts; reasoning stands between them at the start of a turn."""

    open: str = "<think>"
    close: str = "</think>"


THINK = ReasoningTags()
CHANNELS = ReasoningTags("<|channel|>analysis<|message|>", "<|end|>")
"""Of gpt-oss: all that it says has a header with a channel, and its reasoning is in the channel `analysis`."""

_OPENING = re.compile(r"<[\w:]+>\Z|\[[A-Z_]+\]\Z|<\|START_\w+\|>\Z")
_SPELLED = (ReasoningTags("[THINK]", "[/THINK]"),)
"""Tags that a template may only tell its model about."""


def find_tags(template: ChatTemplate) -> ReasoningTags:
    """The tags of a template; `<think>` where it writes none."""
    for turn in _turns():
        try:
            before, found, after = template.render([*PROBE, turn], ask=False).partition(MARK)
        except PromptFailure:
            continue
        if not found:
            continue
        if before.endswith(CHANNELS.open):
            return CHANNELS
        opening = _OPENING.search(before.rstrip())
        closing = _closing(opening[0]) if opening else ""
        if opening and after.lstrip().startswith(closing):
            return ReasoningTags(opening[0], closing)
    prompt = template.render(PROBE)
    return next((tags for tags in _SPELLED if tags.open in prompt and tags.close in prompt), THINK)


def _turns() -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": "Well.", "reasoning_content": MARK}
    yield {"role": "assistant", "content": "Well.", "thinking": MARK}
    blocks = [{"type": "thinking", "thinking": MARK}, {"type": "text", "text": "Well."}]
    yield {"role": "assistant", "content": blocks}


def _closing(opening: str) -> str:
    if opening.startswith("<|"):
        return opening.replace("START_", "END_", 1)
    return f"{opening[0]}/{opening[1:]}"
