"""Transcript: a recorded trajectory as text for people, as JSON for programs, and the difference of two.

Owns the layout: one heading, reward parts, how it ended, then the messages by role, with the status and seconds of tool
calls beside their results. Text of models and tools is data here; whatever prints it escapes it (`treadle.terminal`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from treadle.inspect.run_records import RecordedTrajectory, RolloutPurpose
from treadle.types import Message, ToolResult, ToolStatus, Turn

CONTENT = "content"
REASONING = "reasoning"
_LABEL = 10
"""Columns of the role before each message."""

_STYLES = {"system": "dim", "user": "cyan", "assistant": "", "tool": "magenta"}


@dataclass(frozen=True, slots=True)
class TranscriptLine:
    """A line of a transcript, and its style on a terminal."""

    text: str
    style: str = ""


def describe_trajectory(recorded: RecordedTrajectory) -> str:
    """The transcript as plain text."""
    return "\n".join(line.text for line in transcript_lines(recorded))


def transcript_lines(recorded: RecordedTrajectory) -> Iterator[TranscriptLine]:
    """The transcript, line by line, with styles."""
    yield TranscriptLine(f"── {describe_place(recorded)}", "bold")
    for line in _facts(recorded):
        yield TranscriptLine(f"   {line}", "dim")
    if not recorded.headline.has_body:
        yield TranscriptLine("   its messages were dropped to keep the journal within logging.journal_max_mb", "yellow")
    elif not recorded.headline.is_intact:
        yield TranscriptLine("   its record is not as it was written: the journal is damaged", "red")
    yield from _message_lines(recorded)


def describe_place(recorded: RecordedTrajectory) -> str:
    """Which trajectory it is, and its reward."""
    headline, place = recorded.headline, ""
    if recorded.step is not None:
        word = "validation after step" if recorded.purpose is RolloutPurpose.VALIDATION else "step"
        place = f", {word} {recorded.step}"
    attempt = f", attempt {headline.attempt + 1}" if headline.attempt else ""
    source = f", {headline.data_source}" if headline.data_source else ""
    reward = "no reward" if recorded.reward is None else f"reward {recorded.reward:g}"
    return f"{recorded.name}{attempt}{place}{source}: {reward}"


def _facts(recorded: RecordedTrajectory) -> Iterator[str]:
    headline = recorded.headline
    if headline.reward is not None and headline.reward.parts:
        yield "reward parts: " + ", ".join(f"{name} {value:g}" for name, value in headline.reward.parts.items())
    extra = {} if recorded.trajectory.reward is None else recorded.trajectory.reward.extra
    if extra:
        yield f"reward extra: {_json(extra)}"
    if recorded.ground_truth is not None:
        yield f"ground truth: {recorded.ground_truth}"
    outcome = headline.outcome
    if outcome.ok:
        yield f"{outcome.status}, stop reason {outcome.reason}"
    else:
        yield f"failed at {outcome.boundary}: {outcome.detail}"
    yield from _gateway_facts(recorded.trajectory.extra)
    forks = f", {_count(headline.num_rows - 1, 'fork')}" if headline.num_rows > 1 else ""
    yield (
        f"{_count(headline.num_turns, 'turn')}, {_count(headline.prompt_tokens, 'prompt token')}, "
        f"{_count(headline.response_tokens, 'response token')} ({headline.num_sampled:,} sampled){forks}, "
        f"{headline.timing.total_s:.2f} s"
    )


def _gateway_facts(extra: Mapping[str, Any]) -> Iterator[str]:
    """What an agent did with the gateway: its requests, how turns came back, and what does not train."""
    counted, notes = extra.get("gateway"), extra.get("notes")
    if notes:
        yield f"notes: {_json(notes)}"
    if not isinstance(counted, Mapping):
        return
    shown = []
    for name, value in counted.items():
        if isinstance(value, Mapping):
            shown.append(f"{name} {', '.join(f'{kind} {content_text(number)}' for kind, number in value.items())}")
        elif isinstance(value, int):
            shown.append(f"{name} {value}")
    if shown:
        yield f"gateway: {'; '.join(shown)}"
    for note in counted.get("notes", ()):
        yield f"gateway: {note}"
    for turn in counted.get("untrained", ()):
        model = f" of the model {turn['model']}" if turn.get("model") else ""
        yield f"not trained, {turn.get('why')}{model}, {_count(turn.get('tokens', 0), 'token')}: {turn.get('text')!r}"


def _message_lines(recorded: RecordedTrajectory) -> Iterator[TranscriptLine]:
    messages = recorded.trajectory.messages
    results = _results_by_message(recorded)
    for at, message in enumerate(messages):
        role = str(message.get("role", ""))
        note = _describe_result(message, results.get(at))
        if note:
            yield TranscriptLine(f"{'':{_LABEL}} [{note}]", "dim")
        for row, text in enumerate(_texts(message)):
            label = role if row == 0 else ""
            yield TranscriptLine(f"{label:{_LABEL}} {text}", _STYLES.get(role, ""))


def _texts(message: Message) -> list[str]:
    """Lines of a message: its content, its reasoning where kept apart, and calls that are not part of the content."""
    lines: list[str] = []
    if reasoning := message.get("reasoning_content"):
        lines += [f"(thinks) {line}" for line in str(reasoning).split("\n")]
    content = message.get("content")
    if content is not None and content != "":
        lines += (content if isinstance(content, str) else _json(content)).split("\n")
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        shown = arguments if isinstance(arguments, str) else _json(arguments)
        lines.append(f"→ {function.get('name', '?')}({shown})")
    return lines or [""]


def content_text(content: object) -> str:
    """The text of a message's content, whatever its form."""
    if content is None:
        return ""
    return content if isinstance(content, str) else _json(content)


def message_calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and arguments of the calls that a message holds apart from its content."""
    stored = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [call.get("function") for call in stored]
    calls = [own if isinstance(own, Mapping) else call for own, call in zip(functions, stored, strict=True)]
    return [(str(call.get("name", "")), content_text(call.get("arguments"))) for call in calls]


def message_fields(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts of a message by name: content, reasoning, and `call-0`, `call-1` … for the arguments of calls."""
    yield CONTENT, content_text(message.get("content"))
    if message.get("reasoning_content"):
        yield REASONING, content_text(message.get("reasoning_content"))
    yield from ((f"call-{at}", arguments) for at, (_, arguments) in enumerate(message_calls(message)))


def _turns(recorded: RecordedTrajectory) -> Sequence[Turn]:
    rows = recorded.trajectory.rows
    return rows[0].turns if rows else ()


def _results_by_message(recorded: RecordedTrajectory) -> dict[int, ToolResult]:
    """The result behind each tool message; empty where an agent loop wrote messages of its own."""
    messages = recorded.trajectory.messages
    at = [index for index, message in enumerate(messages) if message.get("role") == "tool"]
    results = [result for turn in _turns(recorded) for result in turn.results]
    return dict(zip(at, results, strict=True)) if len(at) == len(results) else {}


def _describe_result(message: Message, result: ToolResult | None) -> str:
    if message.get("role") != "tool":
        return ""
    name = str(message.get("name") or "tool")
    if result is None:
        return name
    parts = [f"{name}: {result.status}", f"{result.seconds:.2f} s"]
    if result.truncated:
        parts.append("output cut")
    if result.reward is not None:
        parts.append(f"reward {result.reward:g}")
    return ", ".join(parts)


def diff_trajectories(one: RecordedTrajectory, other: RecordedTrajectory) -> Iterator[TranscriptLine]:
    """What differs between two transcripts, in the form of a unified diff, after the facts of both."""
    for mark, recorded in (("-", one), ("+", other)):
        style = "red" if mark == "-" else "green"
        yield TranscriptLine(f"{mark * 3} {describe_place(recorded)}", f"bold {style}")
        for line in _facts(recorded):
            yield TranscriptLine(f"{mark}   {line}", "dim")
    before, after = ([line.text for line in _message_lines(item)] for item in (one, other))
    lines = list(unified_diff(before, after, lineterm="", n=max(len(before), len(after))))[3:]
    if not lines:
        yield TranscriptLine("the messages are the same")
    for line in lines:
        yield TranscriptLine(line, {"-": "red", "+": "green"}.get(line[:1], ""))


def to_json(recorded: RecordedTrajectory) -> str:
    """A trajectory as one line of JSON, in ASCII."""
    headline, trajectory = recorded.headline, recorded.trajectory
    outcome, reward = headline.outcome, trajectory.reward or headline.reward
    fields = {
        "uid": headline.uid,
        "sample": headline.sample,
        "attempt": headline.attempt,
        "purpose": recorded.purpose,
        "step": recorded.step,
        "data_source": headline.data_source,
        "status": outcome.status,
        "stop_reason": outcome.reason,
        "failed_at": outcome.boundary,
        "detail": outcome.detail,
        "reward": recorded.reward,
        "reward_parts": None if reward is None else dict(reward.parts),
        "reward_extra": None if reward is None else dict(reward.extra),
        "ground_truth": recorded.ground_truth,
        "turns": headline.num_turns,
        "prompt_tokens": headline.prompt_tokens,
        "response_tokens": headline.response_tokens,
        "sampled_tokens": headline.num_sampled,
        "seconds": headline.timing.total_s,
        "intact": headline.is_intact,
        "extra": dict(trajectory.extra) if headline.has_body else None,
        "messages": [dict(message) for message in trajectory.messages] if headline.has_body else None,
        "tool_calls": [_call_json(turn) for turn in _turns(recorded) if turn.calls],
    }
    return json.dumps(fields, default=str)


def _call_json(turn: Turn) -> list[dict[str, Any]]:
    """The calls of a turn with how each ended."""
    results = [*turn.results, *([None] * (len(turn.calls) - len(turn.results)))]
    return [
        {
            "name": call.name,
            "arguments": dict(call.arguments),
            "problem": call.problem,
            "status": None if result is None else ToolStatus(result.status),
            "seconds": None if result is None else result.seconds,
        }
        for call, result in zip(turn.calls, results, strict=False)
    ]


def _json(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
