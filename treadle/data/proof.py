"""Where incremental and full rendering agree, found out once for the tokenizer and template at hand.

Owns the list of role boundaries that agent loops cross, and the comparison. Knows a renderer only by its calls.
Invariant: a boundary agrees only if every id is the same, from the first of the prompt to the last of the next header.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from treadle.data.continuation import PROBE_TOOLS, Tools
from treadle.data.encoder import Encoder
from treadle.data.template import ChatTemplate
from treadle.errors import PromptFailure
from treadle.types import Message

REASON = "Let me see."
START: tuple[Message, ...] = ({"role": "user", "content": "Add 1 and 2."},)


class Verdict(StrEnum):
    """What the comparison of one boundary came to."""

    AGREES = "agrees"
    DIFFERS = "differs"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Check:
    """One boundary, and what was found there."""

    boundary: str
    verdict: Verdict
    fast: bool = False
    """Whether observations at this boundary do without the template."""
    detail: str = ""
    full: str = ""
    incremental: str = ""
    """The first text that differs, in either rendering."""

    def __str__(self) -> str:
        speed = "" if self.verdict is Verdict.REFUSED else "by pattern" if self.fast else "by template (slow)"
        lines = [f"  {self.verdict:8} {self.boundary:47} {speed}".rstrip()]
        if self.detail:
            lines.append(f"           {self.detail}")
        if self.verdict is Verdict.DIFFERS:
            lines += [f"           full:        {self.full!r}", f"           incremental: {self.incremental!r}"]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Proof:
    """Every boundary that was looked at. Sessions append, so a difference changes no tokens: it is worth knowing."""

    model: str
    end_of_turn: str
    shows_tools: bool
    """Whether the template tells the model about its tools at all."""
    checks: tuple[Check, ...]

    @property
    def differences(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict is Verdict.DIFFERS)

    def __getitem__(self, boundary: str) -> Check:
        return next(check for check in self.checks if check.boundary == boundary)

    def __str__(self) -> str:
        agreeing = sum(check.verdict is Verdict.AGREES for check in self.checks)
        head = f"{self.model}: incremental and full rendering agree at {agreeing} of {len(self.checks)} boundaries"
        silent = [] if self.shows_tools else ["  the template does not tell the model about its tools"]
        return "\n".join([f"{head}; turns end with {self.end_of_turn!r}", *silent, *map(str, self.checks)])


class Incremental(Protocol):
    """The calls of a renderer that are put to the proof."""

    stop_token_ids: tuple[int, ...]

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]: ...

    def observation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]: ...

    def is_fast(self, messages: Sequence[Message], tools: Tools = ()) -> bool: ...


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation that crosses a boundary: how it starts, then assistant turns with the messages after each."""

    boundary: str
    steps: tuple[tuple[Message, tuple[Message, ...]], ...]
    start: tuple[Message, ...] = START
    tools: Tools = ()


def _cases() -> Iterator[Case]:
    system: Message = {"role": "system", "content": "Be brief."}
    ask: Message = {"role": "user", "content": "And now?"}
    first, second = (
        {"role": "tool", "content": "3", "name": "zq_probe", "tool_call_id": f"zqcall00{at}"} for at in (0, 1)
    )
    plain: Message = {"role": "assistant", "content": "Done."}
    reasons: Message = {"role": "assistant", "content": f"<think>\n{REASON}\n</think>\n\nDone."}
    call, both = ({"role": "assistant", "content": "", "tool_calls": _calls(count)} for count in (1, 2))
    yield Case("assistant → user", ((plain, (ask,)),))
    yield Case("system … assistant → user", ((plain, (ask,)),), start=(system, *START))
    yield Case("assistant → user, with tools", ((plain, (ask,)),), tools=PROBE_TOOLS)
    yield Case("assistant → user → assistant → user", ((plain, (ask,)), (plain, (ask,))))
    yield Case("assistant → tool", ((plain, (first,)),), tools=PROBE_TOOLS)
    yield Case("assistant calls → tool", ((call, (first,)),), tools=PROBE_TOOLS)
    yield Case("assistant calls → tool, tool", ((both, (first, second)),), tools=PROBE_TOOLS)
    yield Case(
        "assistant calls → tool → assistant calls → tool", ((call, (first,)), (call, (first,))), tools=PROBE_TOOLS
    )
    yield Case("assistant calls → tool → assistant → user", ((call, (first,)), (plain, (ask,))), tools=PROBE_TOOLS)
    yield Case("assistant reasons → user", ((reasons, (ask,)),))
    yield Case("assistant reasons → tool", ((reasons, (first,)),), tools=PROBE_TOOLS)
    yield Case("assistant reasons → tool → assistant → user", ((reasons, (first,)), (plain, (ask,))), tools=PROBE_TOOLS)


def _calls(count: int) -> list[Message]:
    function = {"name": "zq_probe", "arguments": {"x": "1"}}
    return [{"id": f"zqcall00{at}", "type": "function", "function": function} for at in range(count)]


def prove(renderer: Incremental, template: ChatTemplate, encoder: Encoder, model: str) -> Proof:
    """Compare both renderings at every boundary."""
    prover = _Prover(renderer, template, encoder)
    shown = template.render(START, PROBE_TOOLS) != template.render(START)
    return Proof(model, prover.end_of_turn, shown, tuple(prover.check(case) for case in _cases()))


@dataclass(frozen=True, slots=True)
class _Prover:
    renderer: Incremental
    template: ChatTemplate
    encoder: Encoder

    @property
    def end_of_turn(self) -> str:
        return self.encoder.decode(self.renderer.stop_token_ids[:1])

    def check(self, case: Case) -> Check:
        conversation = [*case.start, *(message for turn, new in case.steps for message in (turn, *new))]
        try:
            full = self.encoder.encode_whole(self.template.render(conversation, case.tools))
            incremental = self.append(case, full)
        except PromptFailure as failure:
            return Check(case.boundary, Verdict.REFUSED, detail=str(failure))
        fast = all(self.renderer.is_fast(new, case.tools) for _, new in case.steps)
        if full == incremental:
            return Check(case.boundary, Verdict.AGREES, fast)
        at = _first_difference(full, incremental)
        shown = (self.encoder.decode(ids[max(at - 4, 0) : at + 12]) for ids in (full, incremental))
        return Check(case.boundary, Verdict.DIFFERS, fast, self.explain(full, incremental), *shown)

    def append(self, case: Case, full: Sequence[int]) -> list[int]:
        """The ids a session would hold after this conversation."""
        conversation = list(case.start)
        ids = list(self.renderer.prompt(conversation, case.tools))
        for turn, new in case.steps:
            # A plain turn is taken as the full rendering writes it; one that reasons, as it is written while it is last
            plain = REASON not in turn["content"] and ids == full[: len(ids)]
            sampled = self.up_to_stop(full[len(ids) :]) if plain else []
            ids += sampled or self.sample(conversation, turn, case.tools, full[len(ids) :])
            ids += self.renderer.observation(new, case.tools)
            conversation += [turn, *new]
        return ids

    def sample(self, conversation: Sequence[Message], turn: Message, tools: Tools, full: Sequence[int]) -> list[int]:
        """What a model would sample as this turn, with its stop token; `full` is what the full rendering has there."""
        header = self.template.render(conversation, tools)
        written = self.template.render([*conversation, turn], tools, ask=False)
        text = written.removeprefix(header) if written.startswith(header) else turn["content"]
        ids = self.encoder.encode_after(text)
        stops = self.renderer.stop_token_ids
        follows = [token for token in full[len(ids) : len(ids) + 1] if token in stops]
        return self.up_to_stop(ids) or [*ids, *(follows or stops[:1])]

    def up_to_stop(self, ids: Sequence[int]) -> list[int]:
        stops = self.renderer.stop_token_ids
        return list(ids[: next((at + 1 for at, token in enumerate(ids) if token in stops), 0)])

    def explain(self, full_ids: Sequence[int], incremental_ids: Sequence[int]) -> str:
        full, incremental = self.encoder.decode(full_ids), self.encoder.decode(incremental_ids)
        if full == incremental:
            return "same text, cut into other tokens"
        if incremental.count(REASON) > full.count(REASON):
            return "full rendering would drop earlier reasoning here"
        if incremental.count("<think>") > full.count("<think>"):
            return "full rendering would drop the empty reasoning of an earlier turn here"
        if incremental.count(self.end_of_turn) > full.count(self.end_of_turn):
            return "full rendering leaves out the token that turns end with"
        return "full rendering would rewrite earlier text here"


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
