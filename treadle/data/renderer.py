"""Renderer: messages to token ids, for a session that only ever appends.

Owns how a prompt and what follows a sampled turn become ids, which ids end a turn, and the text parsers see. Does not
know what a session did before: a turn's ids are kept as they were sampled and never rendered again.
Invariant: where `parity` says that a boundary agrees, prompt ids + sampled ids + observation ids are the ids of the
full rendering.

Text of messages is not trusted, and not changed either: a special token that is spelled out in a user's, a tool's or
a row's text is encoded as the plain text it is (see `ControlTokens`), so no text ends a turn or begins one. With
`model.allow_special_tokens` prompts may spell them; observations, which tools and environments write, never do.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from treadle.config.rollout import ModelConfig
from treadle.data.chat_template import (
    CHANNELS,
    MARK,
    PROBE,
    ChatTemplate,
    ReasoningTags,
    find_tags,
    open_arguments,
    to_json,
)
from treadle.data.encoder import ControlTokens, Encoder, ScannedTools, special_tokens
from treadle.data.incremental import IncrementalTemplate, MessageShape, Tools, TurnPattern, shape_of
from treadle.data.rendering_parity import BoundaryVerdict, RenderingParity, TurnEnding, check_parity
from treadle.errors import ConfigError, Mistake, PromptFailure
from treadle.model.tokenizer import ChatTokenizer, find_model_path, load_tokenizer, read_stop_ids
from treadle.types import Message

CACHED_PROMPTS = 256
CACHED_TOOLS = 64

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

    parity: RenderingParity
    reasoning_tags: ReasoningTags
    """What reasoning stands between in the text of a turn."""
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
        self._tools = lru_cache(CACHED_TOOLS)(self._read_tools)
        self._drops_reasoning = lru_cache(4)(self._probe_reasoning)
        self.reasoning_tags = find_tags(template)
        self._refused: dict[tuple[str, bool], str] = {}
        self.parity = check_parity(
            self, template, encoder, control, TurnEnding(model.path, closer, not self._trusts_prompts)
        )
        self._refused = _find_refused(self.parity)

    @classmethod
    def create(cls, model: ModelConfig, tokenizer: ChatTokenizer | None = None) -> "Renderer":
        """A renderer with its parity. A given tokenizer is copied: its owner may switch truncation on."""
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
        return self._prompt(to_json(messages), to_json(tools))

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

    def turn(self, messages: Sequence[Message], tools: Tools = (), following: Sequence[Message] = ()) -> Ids:
        """The ids of the last message, an assistant's, as a model samples them: its text and calls, and a stop token.

        `following`: the messages before the next turn; in some templates they decide what ends this one. Special tokens
        that the text spells out are those tokens, as a model writes them; one that ends a turn is refused.
        """
        *before, last = messages
        if isinstance(last.get("content"), str) and (found := self._find_stop(last["content"])) is not None:
            raise PromptFailure(f"an assistant's text spells out {self._encoder.decode([found[1]])!r}: it ends a turn")
        asked = self._template.render(before, tools)
        said = self._say(asked, [*before, last], tools)
        end, stop = self._find_stop(said) or (len(said), self._stop_before(asked + said, messages, following, tools))
        return (*self._encoder.encode_after(said[:end]), stop)

    def _say(self, asked: str, messages: Sequence[Message], tools: Tools) -> str:
        """What the template writes after the header of the last turn, up to its end."""
        last = messages[-1]
        whole = self._template.render(messages, tools, ask=False)
        if whole.startswith(asked):
            return whole[len(asked) :]
        if isinstance(last.get("content"), str) and not last.get("tool_calls"):
            return _answer(last, is_thinking=asked.rstrip().endswith("<think>"))
        raise PromptFailure(
            "the chat template writes an assistant's turn otherwise than it asks for one, so its ids are not known: "
            "give the turn as plain content"
        )

    def _find_stop(self, text: str) -> tuple[int, int] | None:
        """Where a text first spells a stop token, and which."""
        spelled = [(text.find(stop), at) for at in self.stop_token_ids if (stop := self._encoder.decode([at]))]
        return min((found for found in spelled if found[0] >= 0), default=None)

    def _stop_before(self, text: str, messages: Sequence[Message], following: Sequence[Message], tools: Tools) -> int:
        """The stop token of a turn that the template does not close: the header of what follows, or the first."""
        if following:
            rest = self._template.render([*messages, *following], tools, ask=False).removeprefix(text)
            found = self._find_stop(rest)
            if found is not None and not rest[: found[0]].strip():
                return found[1]
        return self.stop_token_ids[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without the stop token at its end. Other special tokens stay: parsers read them."""
        end = len(ids)
        while end and ids[end - 1] in self._stops:
            end -= 1
        return self._encoder.decode(ids[:end])

    def encode(self, text: str) -> Ids:
        """The ids of the text of a scripted or remote model, special tokens in it included; a header precedes it."""
        return tuple(self._encoder.encode_after(text))

    def drops_reasoning(self, *, has_calls: bool, user_follows: bool) -> bool:
        """Whether the template leaves out the reasoning of an earlier assistant turn.

        `has_calls`: the turn calls a tool; `user_follows`: a user's message comes somewhere after it.
        """
        return self._drops_reasoning(has_calls, user_follows)

    def _probe_reasoning(self, has_calls: bool, user_follows: bool) -> bool:
        function = {"name": "probe", "arguments": {"x": "1"}}
        turn: dict[str, Any] = {"role": "assistant", "content": "Well.", "reasoning_content": MARK}
        conversation: list[Message] = [*PROBE, turn]
        if has_calls:
            turn["tool_calls"] = [{"id": "zqcall000", "type": "function", "function": function}]
            conversation.append({"role": "tool", "name": "probe", "tool_call_id": "zqcall000", "content": "1"})
        if has_calls and user_follows:
            conversation.append({"role": "assistant", "content": "Done."})
        if user_follows or not has_calls:
            conversation += PROBE
        tags, other = self.reasoning_tags, [{**message} for message in conversation]
        del other[1]["reasoning_content"]
        if tags == CHANNELS:
            other[1] |= {"content": "" if has_calls else "Well.", "thinking": MARK}
        else:
            other[1] |= {"content": f"{tags.open}\n{MARK}\n{tags.close}\n\nWell."}
        try:
            return not any(MARK in self._template.render(shown) for shown in (conversation, other))
        except PromptFailure:
            return False

    def least_tokens(self, texts: Iterable[str]) -> int:
        """A number of tokens that texts have at least, whatever a template makes of their spaces; encodes nothing."""
        return sum(sum(map(len, text.split())) // self._encoder.longest_token for text in texts)

    def is_fast(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """Whether observations of this shape do without the template."""
        shape = shape_of(messages)
        return shape is not None and self._find_pattern(shape, messages, bool(tools)) is not None

    def _render_prompt(self, messages_json: str, tools_json: str) -> Ids:
        messages, tools = json.loads(messages_json), self._tools(tools_json)
        if not self._trusts_prompts:
            open_arguments(messages)  # JSON text may hide a spelling behind escapes
            marked = self._control.mark(messages, tools)
            if marked is not None:
                text = self._template.render(marked.messages, marked.tools)
                return tuple(self._control.encode(text, marked.mark))
        return tuple(self._encoder.encode(self._template.render_plain(messages, tools.items)))

    def _read_tools(self, tools_json: str) -> ScannedTools:
        return self._control.scan_tools(json.loads(tools_json))

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


def _answer(message: Message, *, is_thinking: bool) -> str:
    """The text of a turn; after a header that opens the reasoning, with that reasoning, or an empty one, closed."""
    content, reasoning = str(message["content"]), message.get("reasoning_content")
    if not is_thinking:
        return content if not reasoning else f"<think>\n{reasoning}\n</think>\n\n{content}"
    if content.lstrip().startswith("<think>"):
        return content.lstrip().removeprefix("<think>").removeprefix("\n")
    return content if "</think>" in content else f"{reasoning or ''}\n</think>\n\n{content}"


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


def _find_refused(parity: RenderingParity) -> dict[tuple[str, bool], str]:
    """Why observations that begin with a message of this role, with or without tools, would come out wrong."""
    boundaries = {
        ("user", False): "assistant → user",
        ("user", True): "assistant → user, with tools",
        ("tool", True): "assistant calls → tool",
    }
    checks = {kind: parity[boundary] for kind, boundary in boundaries.items()}
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
