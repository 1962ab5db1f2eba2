"""Renderer: messages to token ids, for a session that only ever appends.

Owns how a prompt and what follows a sampled turn become ids, which ids end a turn, and the text parsers see. Does not
know what a session did before: a turn's ids are kept as they were sampled and never rendered again.
Invariant: where `proof` says that a boundary agrees, prompt ids + sampled ids + observation ids are the ids of the
full rendering.

Text of messages is not trusted, and not changed either: a special token that is spelled out in a user's, a tool's or
a row's text is encoded as the plain text it is (see `ControlTokens`), so no text ends a turn or begins one. With
`model.allow_special_tokens` prompts may spell them; observations, which tools and environments write, never do.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from treadle.config.rollout import ModelConfig
from treadle.data.chat_template import PROBE, ChatTemplate, open_arguments, to_json
from treadle.data.encoder import ControlTokens, Encoder, MarkedText, special_tokens
from treadle.data.incremental import MARK, IncrementalTemplate, MessageShape, Tools, TurnPattern, shape_of
from treadle.data.rendering_proof import BoundaryVerdict, RenderingProof, TurnEnding, prove
from treadle.errors import ConfigError, Mistake, PromptFailure
from treadle.model.tokenizer import ChatTokenizer, find_model_path, load_tokenizer, read_stop_ids
from treadle.types import Message

CACHED_PROMPTS = 256

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodedPattern:
    """A pattern with its fixed ends already encoded; only the middle depends on the messages."""

    head: Ids
    middle: TurnPattern | None
    skip: int
    """Ids of the middle that belong to its anchor, not to the text."""
    tail: Ids


class Renderer:
    """Turns messages into ids. Built by `create`; safe to share between sessions."""

    proof: RenderingProof
    stop_token_ids: Ids
    """Ids that end a turn: the template's end-of-turn token first, then the tokenizer's and the model's own."""

    def __init__(
        self,
        encoder: Encoder,
        control: ControlTokens,
        template: ChatTemplate,
        stop_token_ids: Ids,
        closer: str,
        model: ModelConfig,
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self._encoder = encoder
        self._control = control
        self._template = template
        self._trusts_prompts = model.allow_special_tokens
        self._stops = frozenset(stop_token_ids)
        self._incremental = IncrementalTemplate(template, [encoder.decode([at]) for at in stop_token_ids], closer)
        self._patterns: tuple[dict[MessageShape, EncodedPattern | None], ...] = ({}, {})  # without tools, with tools
        self._prompt = lru_cache(CACHED_PROMPTS)(self._render_prompt)
        self._refused: dict[tuple[str, bool], str] = {}
        self.proof = prove(self, template, encoder, control, TurnEnding(model.path, closer, not self._trusts_prompts))
        self._refused = _find_refused(self.proof)

    @classmethod
    def create(cls, model: ModelConfig, tokenizer: ChatTokenizer | None = None) -> "Renderer":
        """A renderer with its proof. A given tokenizer is copied: its owner may switch truncation on."""
        tokenizer = load_tokenizer(model) if tokenizer is None else copy.deepcopy(tokenizer)
        template = ChatTemplate.create(tokenizer, model)
        closed = _render_closed_turn(template)
        stop_token_ids = _find_stops(tokenizer, model, closed.partition(MARK)[2])
        renderings = [template.render(PROBE), closed]
        encoder = Encoder.create(tokenizer, renderings)
        control = ControlTokens.create(tokenizer, renderings)
        return cls(encoder, control, template, stop_token_ids, _find_closer(template, tokenizer), model)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The ids of a whole conversation and the next turn's header. Kept by content: n samples, one rendering."""
        return self._prompt(to_json(messages, tools))

    def observation(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The ids that follow a turn's end-of-turn token: what closes it, the new messages, the next turn's header."""
        if self._refused and messages:
            self._refuse_broken(messages, tools)
        marked = self._control.mark(messages)
        if marked is not None:
            text = self._incremental.render(marked.messages, tools)
            return tuple(self._control.encode(text, marked.mark, after=True))
        shape = shape_of(messages)
        encoded = self._find_pattern(shape, messages, bool(tools)) if shape is not None else None
        if encoded is None:
            return tuple(self._encoder.encode_after(self._incremental.render(messages, tools)))
        if encoded.middle is None:
            return encoded.head
        ids = self._encoder.encode_whole(encoded.middle.fill(messages))
        return (*encoded.head, *ids[encoded.skip :], *encoded.tail)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without the stop token at its end. Other special tokens stay: parsers read them."""
        end = len(ids)
        while end and ids[end - 1] in self._stops:
            end -= 1
        return self._encoder.decode(ids[:end])

    def encode(self, text: str) -> Ids:
        """The ids of the text of a scripted or remote model, special tokens in it included; a header precedes it."""
        return tuple(self._encoder.encode_after(text))

    def is_fast(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """Whether observations of this shape do without the template."""
        shape = shape_of(messages)
        return shape is not None and self._find_pattern(shape, messages, bool(tools)) is not None

    def _render_prompt(self, conversation: str) -> Ids:
        marked = None if self._trusts_prompts else self._mark_prompt(conversation)
        if marked is None:
            return tuple(self._encoder.encode(self._template.render_json(conversation)))
        text = self._template.render(marked.messages, marked.tools)
        return tuple(self._control.encode(text, marked.mark))

    def _mark_prompt(self, conversation: str) -> MarkedText | None:
        messages, tools = json.loads(conversation)
        open_arguments(messages)  # JSON text may hide a spelling behind escapes
        return self._control.mark(messages, tools)

    def _refuse_broken(self, messages: Sequence[Message], tools: Tools) -> None:
        reason = self._refused.get((str(messages[0].get("role")), bool(tools)))
        if reason is not None:
            raise PromptFailure(f"the chat template cannot go on after an assistant turn: {reason}")

    def _find_pattern(self, shape: MessageShape, messages: Sequence[Message], tools: bool) -> EncodedPattern | None:
        patterns = self._patterns[tools]
        if shape not in patterns:
            pattern = self._incremental.learn(messages, tools=tools)
            patterns[shape] = None if pattern is None else _encode_pattern(pattern, self._encoder)
        return patterns[shape]


def truncate(ids: Sequence[int], length: int, side: Literal["left", "middle", "right"]) -> Ids:
    """The ids cut to `length`; `side` is the part that is cut out."""
    if len(ids) <= length:
        return tuple(ids)
    kept = {"left": 0, "middle": length - length // 2, "right": length}[side]
    return (*ids[:kept], *ids[len(ids) - (length - kept) :])


def _render_closed_turn(template: ChatTemplate) -> str:
    """A conversation that ends with an assistant turn; empty for templates that cannot render one."""
    try:
        return template.render([*PROBE, {"role": "assistant", "content": MARK}], ask=False)
    except PromptFailure:
        return ""


def _find_stops(tokenizer: ChatTokenizer, model: ModelConfig, closing: str) -> Ids:
    """Stop tokens, in order: the token the template closes a turn with, then what the model lists."""
    special = special_tokens(tokenizer)
    closers = [token for token in special if closing.lstrip().startswith(token)]
    found = [special[max(closers, key=len)]] if closers else []
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    directory = find_model_path(model.path)
    found += read_stop_ids(directory) if directory is not None else ()
    if not found:
        problem = "nothing ends a turn: no eos token, none in generation_config.json, none in the chat template"
        fix = "set eos_token in tokenizer_config.json"
        raise ConfigError([Mistake("model.path", problem, model.path, model.origin("path"), fix)])
    return tuple(dict.fromkeys(found))


def _find_closer(template: ChatTemplate, tokenizer: ChatTokenizer) -> str:
    """The special token that a template closes messages with, other than the last turn; empty where there is none."""
    try:
        after = template.render([{"role": "user", "content": MARK}], ask=False).partition(MARK)[2]
    except PromptFailure:
        return ""
    return max((token for token in special_tokens(tokenizer) if token and after.startswith(token)), key=len, default="")


def _find_refused(proof: RenderingProof) -> dict[tuple[str, bool], str]:
    """Why observations that begin with a message of this role, with or without tools, would come out wrong."""
    boundaries = {
        ("user", False): "assistant → user",
        ("user", True): "assistant → user, with tools",
        ("tool", True): "assistant calls → tool",
    }
    checks = {kind: proof[boundary] for kind, boundary in boundaries.items()}
    return {kind: check.detail for kind, check in checks.items() if check.verdict is BoundaryVerdict.DIFFERS}


def _encode_pattern(pattern: TurnPattern, encoder: Encoder) -> EncodedPattern:
    """Encode the ends of a pattern up to the special tokens nearest to its slots."""
    if not pattern.slots:
        return EncodedPattern(tuple(encoder.encode_after(pattern.literals[0])), None, 0, ())
    first, *between, last = pattern.literals
    starts = [first.rfind(token) + len(token) for token in encoder.cuts if token in first]
    ends = [last.find(token) for token in encoder.cuts if token in last]
    start, end = max(starts, default=0), min(ends, default=len(last))
    middle = TurnPattern((encoder.anchor + first[start:], *between, last[:end]), pattern.slots)
    head, tail = encoder.encode_after(first[:start]), encoder.encode(last[end:])
    return EncodedPattern(tuple(head), middle, 1 if encoder.anchor else 0, tuple(tail))
