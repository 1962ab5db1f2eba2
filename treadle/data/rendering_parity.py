"""Rendering parity: where incremental and full rendering give the same ids, checked once per tokenizer and template.

Owns the list of role boundaries that agent loops cross, and the comparison. Knows a renderer only by its calls.
Invariant: a boundary agrees only if every id is the same, from the first of the prompt to the last of the next header.
It keeps what full rendering would not if the one difference is what the model itself sampled: its reasoning, or the
token it ended a turn with. Any other difference is refused where a session would cross it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from treadle.data.chat_template import FALLBACK_FORMAT, ChatTemplate
from treadle.data.encoder import ControlTokens, Encoder
from treadle.data.incremental import PROBE_TOOLS, Tools
from treadle.errors import PromptFailure
from treadle.types import Message

REASON = "Let me see."
START: tuple[Message, ...] = ({"role": "user", "content": "Add 1 and 2."},)


IGNORES_TOOLS = (
    f"the chat template ignores tools: their schemas are written into the prompt, in {FALLBACK_FORMAT} format"
)


class BoundaryVerdict(StrEnum):
    """Result of the comparison at one boundary."""

    AGREES = "agrees"
    KEEPS = "keeps"
    """Only what the model sampled itself is kept where full rendering drops or replaces it."""
    DIFFERS = "differs"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class BoundaryCheck:
    """One boundary, and the result there."""

    boundary: str
    verdict: BoundaryVerdict
    fast: bool = False
    """Whether observations at this boundary do without the template."""
    detail: str = ""
    full: str = ""
    incremental: str = ""
    """The first text that differs, in either rendering."""

    def __str__(self) -> str:
        speed = "" if self.verdict is BoundaryVerdict.REFUSED else "by pattern" if self.fast else "by template (slow)"
        lines = [f"  {self.verdict:8} {self.boundary:47} {speed}".rstrip()]
        if self.detail:
            lines.append(f"           {self.detail}")
        if self.verdict in (BoundaryVerdict.KEEPS, BoundaryVerdict.DIFFERS):
            lines += [f"           full:        {self.full!r}", f"           incremental: {self.incremental!r}"]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class RenderingParity:
    """Every boundary that was checked. Sessions append, so a difference changes no tokens; it is reported."""

    model: str
    end_of_turn: str
    shows_tools: bool
    """Whether the template itself shows the schemas of tools; where not, they are written into messages."""
    checks: tuple[BoundaryCheck, ...]
    call: str = ""
    """An assistant turn that calls `zq_probe`, as the template writes it; empty where it writes none."""

    @property
    def differences(self) -> tuple[BoundaryCheck, ...]:
        """Boundaries where a session holds other ids than full rendering gives."""
        return tuple(
            check for check in self.checks if check.verdict in (BoundaryVerdict.KEEPS, BoundaryVerdict.DIFFERS)
        )

    def __getitem__(self, boundary: str) -> BoundaryCheck:
        return next(check for check in self.checks if check.boundary == boundary)

    def __str__(self) -> str:
        agreeing = sum(check.verdict is BoundaryVerdict.AGREES for check in self.checks)
        head = f"{self.model}: incremental and full rendering agree at {agreeing} of {len(self.checks)} boundaries"
        silent = [] if self.shows_tools else [f"  {IGNORES_TOOLS}"]
        return "\n".join([f"{head}; turns end with {self.end_of_turn!r}", *silent, *map(str, self.checks)])


class IncrementalRenderer(Protocol):
    """The calls of a renderer that are checked."""

    stop_token_ids: tuple[int, ...]

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]: ...

    def observation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]: ...

    def is_fast(self, messages: Sequence[Message], tools: Tools = ()) -> bool: ...


@dataclass(frozen=True, slots=True)
class BoundaryCase:
    """A conversation that crosses a boundary: how it starts, then assistant turns with the messages after each."""

    boundary: str
    steps: tuple[tuple[Message, tuple[Message, ...]], ...]
    start: tuple[Message, ...] = START
    tools: Tools = ()
    spells: bool = False
    """Whether texts spell out special tokens, which must stay text."""


@dataclass(frozen=True, slots=True)
class TurnEnding:
    """How a model's turns end."""

    model: str
    closer: str
    """The token that ends messages in full rendering; empty where there is none."""
    escapes_special_tokens: bool
    """Whether special tokens in the text of prompts stay text."""


def _cases(spelled: str) -> Iterator[BoundaryCase]:
    system: Message = {"role": "system", "content": "Be brief."}
    ask: Message = {"role": "user", "content": "And now?"}
    first, second = (
        {"role": "tool", "content": "3", "name": "zq_probe", "tool_call_id": f"zqcall00{at}"} for at in (0, 1)
    )
    plain: Message = {"role": "assistant", "content": "Done."}
    reasons: Message = {"role": "assistant", "content": f"<think>\n{REASON}\n</think>\n\nDone."}
    call, both = ({"role": "assistant", "content": "", "tool_calls": _calls(count)} for count in (1, 2))
    yield BoundaryCase("assistant → user", ((plain, (ask,)),))
    yield BoundaryCase("system … assistant → user", ((plain, (ask,)),), start=(system, *START))
    yield BoundaryCase("assistant → user, with tools", ((plain, (ask,)),), tools=PROBE_TOOLS)
    yield BoundaryCase("assistant → user → assistant → user", ((plain, (ask,)), (plain, (ask,))))
    yield BoundaryCase("assistant → tool", ((plain, (first,)),), tools=PROBE_TOOLS)
    yield BoundaryCase("assistant calls → tool", ((call, (first,)),), tools=PROBE_TOOLS)
    yield BoundaryCase("assistant calls → tool, tool", ((both, (first, second)),), tools=PROBE_TOOLS)
    yield BoundaryCase(
        "assistant calls → tool → assistant calls → tool", ((call, (first,)), (call, (first,))), tools=PROBE_TOOLS
    )
    yield BoundaryCase(
        "assistant calls → tool → assistant → user", ((call, (first,)), (plain, (ask,))), tools=PROBE_TOOLS
    )
    yield BoundaryCase("assistant reasons → user", ((reasons, (ask,)),))
    yield BoundaryCase("assistant reasons → tool", ((reasons, (first,)),), tools=PROBE_TOOLS)
    yield BoundaryCase(
        "assistant reasons → tool → assistant → user", ((reasons, (first,)), (plain, (ask,))), tools=PROBE_TOOLS
    )

    if spelled:
        loud_ask, loud_tool = ({**message, "content": f"a{spelled}b"} for message in (ask, first))
        loud = tuple({**message, "content": f"{spelled} {message['content']}"} for message in (system, *START))
        yield BoundaryCase("assistant → user, special tokens as text", ((plain, (loud_ask,)),), spells=True)
        yield BoundaryCase("prompt, special tokens as text", ((plain, (ask,)),), start=loud, spells=True)
        yield BoundaryCase(
            "assistant calls → tool, special tokens as text", ((call, (loud_tool,)),), tools=PROBE_TOOLS, spells=True
        )


def _calls(count: int) -> list[Message]:
    function = {"name": "zq_probe", "arguments": {"x": "1"}}
    return [{"id": f"zqcall00{at}", "type": "function", "function": function} for at in range(count)]


def check_parity(
    renderer: IncrementalRenderer,
    template: ChatTemplate,
    encoder: Encoder,
    control: ControlTokens,
    ending: TurnEnding,
) -> RenderingParity:
    """Compare both renderings at every boundary."""
    prover = _Prover(renderer, template, encoder, control, ending)
    cases = _cases(prover.spell() if ending.escapes_special_tokens else "")
    shown = not template.dialect.ignores_tools
    checks = tuple(prover.check(case) for case in cases)
    return RenderingParity(ending.model, prover.end_of_turn, shown, checks, prover.write_call())


@dataclass(frozen=True, slots=True)
class _Appended:
    """The ids a session would hold, and at which positions a model ended its turns."""

    ids: list[int]
    ends: set[int]


@dataclass(frozen=True, slots=True)
class _Prover:
    renderer: IncrementalRenderer
    template: ChatTemplate
    encoder: Encoder
    control: ControlTokens
    ending: TurnEnding

    @property
    def end_of_turn(self) -> str:
        return self.encoder.decode(self.renderer.stop_token_ids[:1])

    def spell(self) -> str:
        """The control tokens of a short conversation, spelled out."""
        ids = self.encoder.encode_whole(self.template.render(START))
        found = dict.fromkeys([*self.renderer.stop_token_ids[:1], *(at for at in ids if at in self.control.ids)])
        return "".join(self.encoder.decode([at]) for at in found if at in self.control.ids)

    def write_call(self) -> str:
        turn: Message = {"role": "assistant", "content": "", "tool_calls": _calls(1)}
        try:
            header = self.template.render(START, PROBE_TOOLS)
            text = _turn_text(header, self.template.render([*START, turn], PROBE_TOOLS, ask=False), "")
        except PromptFailure:
            return ""
        return self.encoder.decode(self.up_to_stop(self.encoder.encode_after(text))[:-1]) or text

    def check(self, case: BoundaryCase) -> BoundaryCheck:
        conversation = [*case.start, *(message for turn, new in case.steps for message in (turn, *new))]
        try:
            full = self.render(conversation, case)
            appended = self.append(case, full)
            forged = self.count_forged(conversation, case, full)
        except PromptFailure as failure:
            return BoundaryCheck(case.boundary, BoundaryVerdict.REFUSED, detail=str(failure))
        fast = not case.spells and all(self.renderer.is_fast(new, case.tools) for _, new in case.steps)
        if forged:
            return BoundaryCheck(
                case.boundary, BoundaryVerdict.DIFFERS, fast, f"text of messages becomes {forged} special tokens"
            )
        incremental = appended.ids
        if full == incremental:
            return BoundaryCheck(case.boundary, BoundaryVerdict.AGREES, fast)
        at = _first_difference(full, incremental)
        shown = (self.encoder.decode(ids[max(at - 4, 0) : at + 12]) for ids in (full, incremental))
        return BoundaryCheck(case.boundary, *self.explain(full, appended, fast), *shown)

    def render(self, conversation: Sequence[Message], case: BoundaryCase) -> list[int]:
        """Full rendering; by the renderer itself where the tokenizer alone would read text as special tokens."""
        if case.spells:
            return list(self.renderer.prompt(conversation, case.tools))
        return self.encoder.encode_whole(self.template.render(conversation, case.tools))

    def count_forged(self, conversation: Sequence[Message], case: BoundaryCase, full: Sequence[int]) -> int:
        """How many special tokens there are that would not be there if texts spelled none."""
        if not case.spells:
            return 0
        quiet = [{**message, "content": message["content"].replace(self.spell(), "")} for message in conversation]
        plain = self.encoder.encode_whole(self.template.render(quiet, case.tools))
        return abs(sum(at in self.control.ids for at in full) - sum(at in self.control.ids for at in plain))

    def append(self, case: BoundaryCase, full: Sequence[int]) -> _Appended:
        """The ids a session would hold after this conversation."""
        conversation = list(case.start)
        ids, ends = list(self.renderer.prompt(conversation, case.tools)), set[int]()
        for turn, new in case.steps:
            # A plain turn is taken as the full rendering writes it; one that reasons, as it is written while it is last
            plain = REASON not in turn["content"] and ids == full[: len(ids)]
            sampled = self.up_to_stop(full[len(ids) :]) if plain else []
            ids += sampled or self.sample(conversation, turn, case.tools, full[len(ids) :])
            ends.add(len(ids) - 1)
            ids += self.renderer.observation(new, case.tools)
            conversation += [turn, *new]
        return _Appended(ids, ends)

    def sample(self, conversation: Sequence[Message], turn: Message, tools: Tools, full: Sequence[int]) -> list[int]:
        """What a model would sample as this turn, with its stop token; `full` is what the full rendering has there."""
        header = self.template.render(conversation, tools)
        written = self.template.render([*conversation, turn], tools, ask=False)
        ids = self.encoder.encode_after(_turn_text(header, written, turn["content"]))
        stops = self.renderer.stop_token_ids
        follows = [token for token in full[len(ids) : len(ids) + 1] if token in stops]
        return self.up_to_stop(ids) or [*ids, *(follows or stops[:1])]

    def up_to_stop(self, ids: Sequence[int]) -> list[int]:
        stops = self.renderer.stop_token_ids
        return list(ids[: next((at + 1 for at, token in enumerate(ids) if token in stops), 0)])

    def explain(self, full_ids: Sequence[int], appended: _Appended, fast: bool) -> tuple[BoundaryVerdict, bool, str]:
        full, incremental = self.encoder.decode(full_ids), self.encoder.decode(appended.ids)
        if full == incremental:
            return BoundaryVerdict.KEEPS, fast, "same text, cut into other tokens"
        if self.aligns(full_ids, appended):
            return (
                BoundaryVerdict.KEEPS,
                fast,
                f"a turn ends as it was sampled; full rendering {self.describe_ending()}",
            )
        if self.bare(full) == self.bare(incremental):
            if incremental.count(REASON) > full.count(REASON):
                return BoundaryVerdict.KEEPS, fast, "full rendering would drop earlier reasoning here"
            return BoundaryVerdict.KEEPS, fast, "full rendering would drop the empty reasoning of an earlier turn here"
        return BoundaryVerdict.DIFFERS, fast, "full rendering would rewrite earlier text here"

    def describe_ending(self) -> str:
        closer = self.ending.closer
        return f"writes {closer!r} there" if closer not in ("", self.end_of_turn) else "leaves its last token out"

    def aligns(self, full: Sequence[int], appended: _Appended) -> bool:
        """Whether ids are the same but for the tokens that a model ended its turns with."""
        at = 0
        closer = self.encoder.encode_whole(self.ending.closer) if self.ending.closer else []
        for position, token in enumerate(appended.ids):
            if at < len(full) and full[at] == token:
                at += 1
            elif position not in appended.ends:
                return False
            elif at < len(full) and [full[at]] == closer:
                at += 1
        return at == len(full)

    def bare(self, text: str) -> str:
        """A rendering without reasoning, and without the tokens that end turns."""
        for stop in {self.ending.closer, *(self.encoder.decode([at]) for at in self.renderer.stop_token_ids)} - {""}:
            text = text.replace(stop, "")
        text = re.sub(r"(?s)<think>.*?</think>", "", text)
        return "".join(re.sub(r"</?think>", "", text).split())


_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
"""Reasoning that the header of a turn begins, or begins and ends, in the model's place."""


def _turn_text(header: str, written: str, content: str) -> str:
    """Text of a turn after its header, when it is the last of a conversation."""
    before = _OPENED.sub("", header)
    if written.startswith(header):
        text = written[len(header) :]
    elif written.startswith(before) and not header.rstrip().endswith("</think>"):
        text = written[len(before) :].removeprefix("<think>")
    else:
        text = content
    if REASON in content and REASON not in text:
        return content.removeprefix("<think>\n") if header.rstrip().endswith("<think>") else content
    return text


def _first_difference(left: Sequence[int] | str, right: Sequence[int] | str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
