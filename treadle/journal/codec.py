"""Codec: records as SQLite columns and back; any value as JSON text.

Owns the form of every stored record and the one JSON dialect of the journal. Knows nothing of connections, threads or
files.
Invariant: ids, mask, versions and logprobs come back bit for bit, or the digest of their row shows that they do not.
Logprobs take four bytes each where every value is a float32, as engines give them, and eight otherwise; the length of
the blob says which. `encode` returns strict JSON that SQLite can store, whatever a loop, a tool or a model put into a
value; what JSON can hold comes back equal (tuples as lists), numbers that are not finite come back too, and the rest
comes back as its `repr`.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any

from treadle.errors import Boundary
from treadle.journal.records import Headline, PartEntry, RowAnnotation
from treadle.types import (
    NOTHING,
    Completion,
    Message,
    Outcome,
    Provenance,
    RecordedCompletion,
    Row,
    Score,
    Status,
    StopReason,
    Task,
    Timing,
    ToolCall,
    ToolResult,
    ToolStatus,
    Trajectory,
    Turn,
)

_NOT_FINITE = "$float"
_MAX_DEPTH = 64


def _stand_in(value: object) -> object:
    """A value of JSON's own types in place of one that is not."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return repr(value)


# A circular reference ends in a RecursionError; a check of every container would cost more.
_fast = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"), default=_stand_in
).encode
_ascii = json.JSONEncoder(
    ensure_ascii=True, check_circular=False, allow_nan=False, separators=(",", ":"), default=_stand_in
).encode


def encode(value: object) -> str:
    """`value` as JSON text."""
    try:
        return storable(_fast(value), value)
    except (TypeError, ValueError, RecursionError):
        return _ascii(_plain(value, 0))


def storable(text: str, value: object) -> str:
    """`text`, or the escaped form of `value` where half a surrogate pair would keep SQLite from storing it."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _ascii(value)
    return text


def label(text: str) -> str:
    """A plain string for a column: as it is, unless it holds half a surrogate pair, which is then spelt out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _plain(value: object, depth: int) -> object:
    """A copy that holds only what JSON can hold; slow, for values the fast way refuses."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NOT_FINITE: repr(float(value))}
    if depth == _MAX_DEPTH:
        return f"<{type(value).__name__} nested too deep>"
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain(_stand_in(value), depth + 1)


def decode(text: str) -> Any:
    """The value behind `text`."""
    return json.loads(text, object_hook=_revive) if _NOT_FINITE in text else json.loads(text)


def _revive(found: dict[str, Any]) -> Any:
    if found.keys() == {_NOT_FINITE}:
        return float(found[_NOT_FINITE])
    return found


Value = str | bytes | float | int | None
Values = tuple[Value, ...]
Mask = bytes

_SEAL_BYTES = 8


def seal(values: Iterable[Value]) -> bytes:
    """A digest of stored values: what SQLite gives back has the same, unless a bit of it has changed."""
    digest = blake2b(digest_size=_SEAL_BYTES)
    for value in values:
        if isinstance(value, str):
            kind, content = b"t", value.encode()
        elif isinstance(value, bytes):
            kind, content = b"b", value
        elif value is None or value != value:  # SQLite keeps a NaN as NULL
            kind, content = b"n", b""
        else:
            kind, content = b"f", struct.pack("<d", float(value) + 0.0)  # a whole number loses the sign of zero there
        digest.update(kind + struct.pack("<q", len(content)))
        digest.update(content)
    return digest.digest()


def sealed(values: Values) -> Values:
    """`values` with their digest after them."""
    return (*values, seal(values))


def is_intact(stored: Sequence[Value]) -> bool:
    """Whether stored values are as they were written; the last is their digest."""
    return seal(stored[:-1]) == stored[-1]


def pack_ints(values: Sequence[int]) -> bytes:
    """Four bytes for each; `struct` does this in half the time of `array`."""
    return struct.pack(f"<{len(values)}i", *values)


def unpack_ints(blob: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(blob) // 4}i", blob)


def pack_floats(values: tuple[float, ...]) -> bytes:
    """Four bytes for each where that keeps every value, else eight."""
    form = f"<{len(values)}f"
    try:
        blob = struct.pack(form, *values)
        exact = struct.unpack(form, blob) == values
    except OverflowError:
        exact = False
    return blob if exact else struct.pack(f"<{len(values)}d", *values)


def unpack_floats(blob: bytes, count: int) -> tuple[float, ...]:
    return struct.unpack(f"<{count}{'f' if len(blob) == 4 * count else 'd'}", blob)


def row_values(trajectory_id: int, position: int, row: Row, mask: Mask) -> Values:
    """The columns of `rows`. The first row's prompt is in `prompts`."""
    return (
        trajectory_id,
        position,
        pack_ints(row.prompt_ids) if position else None,
        pack_ints(row.ids),
        mask,
        pack_floats(row.logprobs),
        pack_ints(row.versions),
        pack_floats(row.processed_logprobs) if row.processed_logprobs else None,
        encode([_turn_fields(turn) for turn in row.turns]),
    )


def _unpack_optional(blob: bytes | None, count: int) -> tuple[float, ...]:
    return () if blob is None else unpack_floats(blob, count)


def read_row(
    prompt_ids: bytes, ids: bytes, mask: bytes, logprobs: bytes, versions: bytes, processed: bytes | None, turns: str
) -> Row:
    ids_T = unpack_ints(ids)
    return Row(
        unpack_ints(prompt_ids),
        ids_T,
        tuple(mask),
        unpack_floats(logprobs, len(ids_T)),
        unpack_ints(versions),
        tuple(_read_turn(**fields) for fields in decode(turns)),
        _unpack_optional(processed, len(ids_T)),
    )


def _turn_fields(turn: Turn) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "start": turn.start,
        "sampled_end": turn.sampled_end,
        "end": turn.end,
        "stop": turn.stop,
        "generate_s": turn.generate_s,
        "tool_s": turn.tool_s,
        "replica": turn.replica,
    }
    if turn.calls:
        fields["calls"] = [_call_fields(call) for call in turn.calls]
    if turn.results:
        fields["results"] = [_result_fields(result) for result in turn.results]
    if turn.reward is not None:
        fields["reward"] = turn.reward
    if turn.started_s is not None:
        fields["started_s"] = turn.started_s
    return fields


def _read_turn(stop: str, calls: Sequence[Any] = (), results: Sequence[Any] = (), **fields: Any) -> Turn:
    return Turn(
        stop=StopReason(stop),
        calls=tuple(ToolCall(**call) for call in calls),
        results=tuple(ToolResult(**{**result, "status": ToolStatus(result["status"])}) for result in results),
        **fields,
    )


def _call_fields(call: ToolCall) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": call.name, "arguments": call.arguments, "id": call.id}
    if call.problem is not None:
        fields["problem"] = call.problem
    return fields


def _result_fields(result: ToolResult) -> dict[str, Any]:
    fields: dict[str, Any] = {"text": result.text, "status": result.status, "seconds": result.seconds}
    if result.reward is not None:
        fields["reward"] = result.reward
    if result.extra:
        fields["extra"] = result.extra
    if result.truncated:
        fields["truncated"] = True
    return fields


def part_values(start: int, written_at: float, part: RecordedCompletion) -> Values:
    """The columns of `parts`."""
    said = part.completion
    answer: dict[str, Any] = {"stop": said.stop, "text": said.text, "replica": said.replica}
    if said.calls:
        answer["calls"] = [_call_fields(call) for call in said.calls]
    return sealed(
        (
            *(label(part.uid), part.sample, part.row, part.number, start, written_at, part.asked, part.digest),
            *(pack_ints(said.ids), pack_floats(said.logprobs), pack_ints(said.versions)),
            *(pack_floats(said.processed_logprobs) if said.processed_logprobs else None, encode(answer)),
        )
    )


def annotation_values(row: RowAnnotation) -> Values:
    """The columns of `annotations` from `position` on, then what names the trajectory."""
    return (*sealed(row[3:]), label(row.uid), row.sample, row.attempt)


def read_part(uid: str, stored: Sequence[Any]) -> PartEntry:
    """The columns of `parts`, in their order; `uid` as it was asked for."""
    sample, row, number, start, written_at, asked, digest = stored[1:8]
    if not is_intact(stored):
        nothing = Completion((), (), (), StopReason.ABORT)
        return PartEntry(
            start, written_at, RecordedCompletion(uid, sample, number, asked, digest, nothing, row), is_intact=False
        )
    ids, logprobs, versions, processed, answer = stored[8:13]
    ids_T = unpack_ints(ids)
    completion = _read_answer(ids_T, unpack_floats(logprobs, len(ids_T)), unpack_ints(versions), **decode(answer))
    completion = replace(completion, processed_logprobs=_unpack_optional(processed, len(ids_T)))
    return PartEntry(start, written_at, RecordedCompletion(uid, sample, number, asked, digest, completion, row))


def _read_answer(
    ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    versions: tuple[int, ...],
    stop: str,
    text: str,
    replica: str,
    calls: Sequence[Any] = (),
) -> Completion:
    parsed = tuple(ToolCall(**call) for call in calls)
    return Completion(ids, logprobs, versions, StopReason(stop), text, replica, parsed)


def headline_values(
    start: int, written_at: float, id: int, prompt: int, trajectory: Trajectory, masks: Sequence[Mask], body: bytes
) -> Values:
    """The columns of `trajectories`; `body` is the digest of what is stored elsewhere."""
    outcome, timing, reward, rows = trajectory.outcome, trajectory.timing, trajectory.reward, trajectory.rows
    boundary = None if outcome.boundary is None else outcome.boundary.value
    made_from = trajectory.provenance
    digests = (made_from.sampling, made_from.prompt, made_from.scoring, made_from.row)
    values: Values = (
        *(id, start, written_at, label(trajectory.uid), trajectory.sample, trajectory.attempt, prompt),
        # `.value`: SQLite's binding is slow for anything but plain strings.
        *(label(trajectory.data_source), outcome.status.value, outcome.reason.value, boundary, label(outcome.detail)),
        *((None, None) if reward is None else (reward.value, encode(reward.parts))),
        *(len(rows), sum(len(row.turns) for row in rows), len(rows[0].prompt_ids) if rows else 0),
        *(sum(map(len, masks)), sum(mask.count(1) for mask in masks)),
        *(timing.started_at, timing.total_s, timing.generate_s, timing.tool_s),
        *(timing.score_s, timing.queue_s),
        *(" ".join(digests) if all(digests[:2]) else None, body),
    )
    return sealed(values)


def read_headline(stored: Sequence[Any], has_body: bool) -> Headline:
    """The columns of `trajectories`, in their order."""
    id, start, written_at, uid, sample, attempt, _, data_source = stored[:8]
    status, reason, boundary, detail, reward, parts = stored[8:14]
    num_rows, num_turns, prompt_tokens, response_tokens, num_sampled = stored[14:19]
    intact = is_intact(stored)
    if not intact:  # none of it is trusted, not even the outcome
        status, reason, boundary, detail = Status.FAILED, StopReason.FAILURE, None, "the record is damaged"
        reward = parts = None
    return Headline(
        id=id,
        start=start,
        written_at=written_at,
        uid=uid,
        sample=sample,
        attempt=attempt,
        outcome=Outcome(Status(status), StopReason(reason), Boundary(boundary) if boundary else None, detail),
        # SQLite keeps a NaN as NULL; the parts say that there was a reward at all.
        reward=None if parts is None else Score(math.nan if reward is None else reward, decode(parts)),
        timing=Timing(*stored[19:25]),
        provenance=Provenance(*stored[25].split(" ")) if intact and stored[25] is not None else Provenance(),
        is_intact=intact,
        data_source=data_source,
        num_rows=num_rows,
        num_turns=num_turns,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        num_sampled=num_sampled,
        has_body=has_body,
    )


def text_values(trajectory_id: int, opening: int, trajectory: Trajectory) -> Values:
    """The columns of `texts`; the first `opening` messages are in `prompts`."""
    return (
        trajectory_id,
        encode(trajectory.messages[opening:]),
        _optional(trajectory.extra),
        _optional(trajectory.reward.extra) if trajectory.reward else None,
    )


def read_messages(*texts: str) -> tuple[Message, ...]:
    return tuple(message for text in texts for message in decode(text))


def read_extra(text: str | None) -> Mapping[str, Any]:
    return NOTHING if text is None else decode(text)


def _optional(extra: Mapping[str, Any]) -> str | None:
    return encode(extra) if extra else None


def task_values(task: Task) -> Values:
    """The columns of `tasks`."""
    fields = {
        "messages": task.messages,
        "ground_truth": task.ground_truth,
        "agent": task.agent,
        "n": task.n,
        "tools": task.tools,
        "tool_kwargs": task.tool_kwargs,
        "environment_kwargs": task.environment_kwargs,
        "extra": task.extra,
        **({"renamed": task.renamed} if task.renamed else {}),
    }
    return sealed((label(task.uid), label(task.data_source), encode(fields)))


def read_task(uid: str, data_source: str, text: str) -> Task:
    fields = decode(text)
    messages, tools = fields.pop("messages"), fields.pop("tools")
    return Task(uid, tuple(messages), data_source=data_source, tools=None if tools is None else tuple(tools), **fields)
