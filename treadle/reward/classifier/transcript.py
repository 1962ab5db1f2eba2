"""What a classifier reads: a trajectory as token ids of the classifier's own tokenizer.

Owns the way from messages to ids: the model's chat template over the conversation, or a prompt of the config's own.
Refuses to know what is computed with them. Imports no torch where the tokenizer's files allow it.
Invariant: at most `max_length` ids; no special token in them was spelled out by the trajectory.
"""

import asyncio
from dataclasses import replace
from typing import Literal, cast

from treadle.config.model import ModelConfig
from treadle.config.reward import ClassifierConfig
from treadle.data.encoder import Encoder
from treadle.data.renderer import truncate
from treadle.data.template import ChatTemplate
from treadle.errors import ConfigError, Mistake, PromptFailure
from treadle.model.tokenizer import ChatTokenizer, load_tokenizer
from treadle.reward.failure import Fault, ScoreFailure
from treadle.reward.guard import Guard
from treadle.reward.prompt import Prompt
from treadle.types import Task, Trajectory

Side = Literal["left", "middle", "right"]


class Transcript:
    """Built by `create`; exactly one of `template` and `prompt` is there."""

    def __init__(
        self,
        classifier: ClassifierConfig,
        tokenizer: ChatTokenizer,
        template: ChatTemplate | None,
        prompt: Prompt | None,
        guard: Guard,
    ) -> None:
        self._classifier, self._tokenizer, self._guard = classifier, tokenizer, guard
        self._template, self._prompt = template, prompt
        self._encoder = Encoder(tokenizer)

    @classmethod
    async def create(cls, classifier: ClassifierConfig) -> "Transcript":
        """Load the tokenizer. A ConfigError with keys relative to the classifier's section where it cannot be used."""
        model = ModelConfig(path=classifier.path)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            template = None if classifier.prompt is not None else ChatTemplate.create(tokenizer, model)
        except ConfigError as error:
            raise ConfigError([_move(mistake) for mistake in error.mistakes]) from error
        guard = Guard.of(tokenizer)
        prompt = None if classifier.prompt is None else Prompt.create(classifier.prompt, guard)
        return cls(classifier, tokenizer, template, prompt, guard)

    def read(self, task: Task, trajectory: Trajectory) -> tuple[int, ...]:
        """The ids of one trajectory; a ScoreFailure where it cannot be rendered, or is too long."""
        if self._template is not None:
            return self._fit(self._encoder.encode_whole(self._render(self._template, trajectory)))
        assert self._prompt is not None, "one of the two is there"
        text = self._prompt.render(task, trajectory)
        return self._fit(self._tokenizer.encode(text, add_special_tokens=True))

    def _render(self, template: ChatTemplate, trajectory: Trajectory) -> str:
        try:
            return template.render(self._guard.clean(trajectory.messages), ask=False)
        except PromptFailure as failure:
            raise ScoreFailure(Fault.PROMPT, f"cannot read this conversation: {failure}") from failure

    def _fit(self, ids: list[int]) -> tuple[int, ...]:
        most, overlong = self._classifier.max_length, self._classifier.overlong
        if not ids:
            raise ScoreFailure(Fault.PROMPT, "was given an empty text")
        if len(ids) > most and overlong == "error":
            problem = f"was given a text of {len(ids)} tokens; max_length is {most} (overlong: truncate_left cuts it)"
            raise ScoreFailure(Fault.PROMPT, problem)
        return truncate(ids, most, cast(Side, overlong.removeprefix("truncate_")))


def _move(mistake: Mistake) -> Mistake:
    """A mistake about a `model` section, as one about a classifier. It has no key for a chat template, but a prompt."""
    key = "prompt" if mistake.key == "model.custom_chat_template" else mistake.key.removeprefix("model.")
    return replace(mistake, key=key, origin=None, fix=None if key == "prompt" else mistake.fix)
