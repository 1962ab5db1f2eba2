"""Journal queries of the viewer: one read-only connection, asked in SQL; trajectories, groups, tasks, events, metrics.

Owns the SQL and what a trajectory or a group is in a list. Imports no torch.
Invariant: answers are plain JSON values or headlines; every error of SQLite is a RunError with a sentence.
"""

import re
import sqlite3
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from treadle.errors import RunError
from treadle.inspect.transcript import content_text
from treadle.journal import Headline, schema
from treadle.journal.codec import decode, encode, is_intact, label, read_headline

Json = dict[str, Any]

PREVIEW = 280
"""Letters of a text in a list."""
COLUMNS = ",".join(f"t.{column}" for column in schema.TRAJECTORIES.columns)
HAS_BODY = "EXISTS (SELECT 1 FROM texts x WHERE x.trajectory = t.id)"
_LATEST = (
    "NOT EXISTS (SELECT 1 FROM trajectories later "
    "WHERE later.uid = t.uid AND later.sample = t.sample AND later.id > t.id)"
)
_NOTABLE = (
    "stall",
    "remove",
    "stale",
    "dropped",
    "dropped_headlines",
    "over_size",
    "changed",
    "set_aside",
    "validation_lost",
)
"""Events that the run's screen lists."""


class RunQuery:
    """Queries over one connection; every error of SQLite is a RunError with a sentence."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise RunError(f"cannot read the journal {self._path}: {error}") from error

    def decoded(self, text: str, what: str) -> Any:
        """The value behind a JSON column; `what` names it where it is damaged."""
        try:
            return decode(text)
        except (ValueError, TypeError, RecursionError):  # TypeError: the text of a number that JSON lacks is no text
            raise self.damage(what) from None

    def damage(self, what: str) -> RunError:
        return RunError(f"{what} cannot be read: the journal {self._path} is damaged there")

    def one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self.all(sql, values)[0]

    def step_events(self, after: int) -> list[Any]:
        """The next steps and resumes: id, kind, time, step, version, number of groups."""
        return self.all(
            "SELECT id, kind, time, json_extract(fields, '$.step'), json_extract(fields, '$.version'), "
            "json_array_length(fields, '$.groups') FROM events "
            "WHERE id > ? AND kind IN ('step', 'resume') AND json_valid(fields) ORDER BY id LIMIT 1000",
            (after,),
        )

    def groups_of(self, event: int) -> list[tuple[str, list[tuple[int, int]]]]:
        """The groups that a step trained on: uid, and (sample, attempt) of each trajectory."""
        stored = self.all("SELECT start, time, kind, fields, digest FROM events WHERE id = ?", (event,))
        if not stored or not is_intact(stored[0]):
            return []
        return [
            (uid, [(sample, attempt) for sample, attempt in samples]) for uid, samples in decode(stored[0][3])["groups"]
        ]

    def uids(self, prefix: str, after: str, limit: int) -> list[str]:
        """Tasks with trajectories, in the order of their names."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else "\U0010ffff"
        found = self.all(
            "SELECT DISTINCT uid FROM trajectories WHERE uid >= ? AND uid > ? AND uid < ? ORDER BY uid LIMIT ?",
            (label(prefix), label(after), label(end), limit),
        )
        return [uid for (uid,) in found]

    def uids_named(self, bare: str) -> list[str]:
        """The same task in every epoch of training (`UID@1` and so on) and in every validation."""
        name = label(bare)
        found = self.all(
            "SELECT DISTINCT uid FROM trajectories WHERE uid = ? OR (uid > ? AND uid < ?) "
            "OR (uid GLOB 'validation-*' AND substr(uid, instr(uid, '/') + 1) = ?)",
            (name, f"{name}@", f"{name}A", name),
        )
        return [uid for (uid,) in found if task_name(uid) == bare]

    def samples(self, uid: str, named: Sequence[tuple[int, int]] | None) -> list[Headline]:
        """The trajectories of a task: those that a step names, or else the latest attempt of each sample."""
        latest = "" if named is not None else f"AND {_LATEST}"
        found = self.all(
            f"SELECT {COLUMNS}, {HAS_BODY} FROM trajectories t WHERE uid = ? {latest} ORDER BY sample, id LIMIT 2048",
            (label(uid),),
        )
        headlines = [read_headline(stored[:-1], bool(stored[-1])) for stored in found]
        if named is None:
            return headlines
        newest = {(item.sample, item.attempt): item for item in headlines}
        return [newest[name] for name in named if name in newest]

    def ids_of(self, uid: str, named: Sequence[tuple[int, int]]) -> set[int]:
        """The trajectories of a task that a step names, as `samples` finds them: the newest of each name."""
        found = self.all(
            "SELECT sample, attempt, max(id) FROM trajectories WHERE uid = ? GROUP BY sample, attempt", (label(uid),)
        )
        newest = {(sample, attempt): id for sample, attempt, id in found}
        return {newest[name] for name in named if name in newest}

    def first_sample(self, uid: str) -> Json:
        """A task as it was sampled once, with its first sample."""
        line = sample_line(self.samples(uid, None)[0])
        return {key: line[key] for key in ("uid", "id", "sample", "validation")}

    def headline(self, id: int) -> Headline:
        found = self.all(f"SELECT {COLUMNS}, {HAS_BODY} FROM trajectories t WHERE id = ?", (id,))
        if not found:
            raise RunError(f"there is no trajectory {id} in {self._path}")
        return read_headline(found[0][:-1], bool(found[0][-1]))

    def group_line(self, uid: str, named: Sequence[tuple[int, int]] | None) -> Json:
        """A group in a list: the question, and of each sample how it ended."""
        samples = [sample_line(headline) for headline in self.samples(uid, named)]
        rewards = [item["reward"] for item in samples if item["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        spread = (sum((value - mean) ** 2 for value in rewards) / len(rewards)) ** 0.5 if mean is not None else None
        return {"uid": uid, "asked": self.question(uid), "samples": samples, "mean": mean, "spread": spread}

    def question(self, uid: str) -> str:
        """The beginning of the last message before the model's first; where it is damaged, a sentence that says so."""
        found = self.all("SELECT messages FROM prompts WHERE uid = ? ORDER BY id DESC LIMIT 1", (label(uid),))
        try:
            messages = self.decoded(found[0][0], f"the prompt of {uid!r}") if found else []
        except RunError as error:
            return str(error)
        return content_text(messages[-1].get("content"))[:PREVIEW] if messages else ""

    def last_words(self, id: int) -> str:
        """The end of what the model said last; where it is damaged, a sentence that says so."""
        found = self.all("SELECT messages FROM texts WHERE trajectory = ?", (id,))
        try:
            messages = self.decoded(found[0][0], f"the text of trajectory {id}") if found else []
        except RunError as error:
            return str(error)
        spoken = [message for message in messages if message.get("role") == "assistant"]
        return content_text(spoken[-1].get("content"))[-PREVIEW:] if spoken else ""

    def messages(self, id: int) -> list[Mapping[str, Any]]:
        """The conversation of a trajectory; nothing where the journal dropped it."""
        found = self.all(
            "SELECT p.messages, x.messages FROM trajectories t JOIN prompts p ON p.id = t.prompt "
            "JOIN texts x ON x.trajectory = t.id WHERE t.id = ?",
            (id,),
        )
        what = f"the text of trajectory {id}"
        return [message for text in found[0] for message in self.decoded(text, what)] if found else []

    def task(self, uid: str) -> Json | None:
        """A task as it was given; None where the journal does not have it."""
        found = self.all("SELECT uid, data_source, task, digest FROM tasks WHERE uid = ?", (label(uid),))
        if not found:
            return None
        if not is_intact(found[0]):
            return {"problem": "the record of this task is not as it was written"}
        fields = decode(found[0][2])
        return {"source": found[0][1], "ground_truth": fields.get("ground_truth"), "messages": fields.get("messages")}

    def metrics_after(self, after: int) -> list[tuple[int, float, int, Mapping[str, float]]]:
        found = self.all(
            "SELECT id, time, step, items, digest FROM metrics WHERE id > ? ORDER BY id LIMIT 2000", (after,)
        )
        return [(stored[0], stored[1], stored[2], self._measured(stored[1:])) for stored in found]

    def metrics_of(self, steps: Sequence[int]) -> dict[int, Mapping[str, float]]:
        if not steps:
            return {}
        found = self.all(
            "SELECT time, step, items, digest FROM metrics WHERE step BETWEEN ? AND ?", (min(steps), max(steps))
        )
        merged: dict[int, dict[str, float]] = {}
        for stored in found:
            merged.setdefault(stored[1], {}).update(self._measured(stored))
        return dict(merged)

    def _measured(self, stored: Sequence[Any]) -> Mapping[str, float]:
        """The values of a measurement, which has a digest."""
        what = f"a measurement of step {stored[1]}"
        if not is_intact(stored):
            raise self.damage(what)
        values: Mapping[str, float] = self.decoded(stored[2], what)
        return values

    def notable(self) -> list[Json]:
        """The last events that tell of trouble or of a change."""
        marks = ",".join("?" * len(_NOTABLE))
        found = self.all(
            "SELECT id, start, time, kind, fields, digest FROM events "
            f"WHERE kind IN ({marks}) ORDER BY id DESC LIMIT 50",
            _NOTABLE,
        )
        return [
            {"time": stored[2], "kind": stored[3], "fields": _short_fields(decode(stored[4]))}
            for stored in found
            if is_intact(stored[1:])
        ]

    def has_annotations(self) -> bool:
        return bool(self.all("SELECT 1 FROM sqlite_master WHERE name = 'annotations'"))


def _short_fields(fields: Mapping[str, Any]) -> Json:
    """Fields of an event for a line: a dozen at most, long values cut."""
    return {name: _short_value(value) for name, value in list(fields.items())[:12]}


def _short_value(value: object) -> object:
    if isinstance(value, float):
        return finite(value)
    return value if isinstance(value, int) else (value if isinstance(value, str) else encode(value))[:PREVIEW]


def sample_line(headline: Headline) -> Json:
    """A trajectory in a list."""
    outcome, timing = headline.outcome, headline.timing
    reward = None if headline.reward is None else finite(headline.reward.value)
    return {
        "id": headline.id,
        "uid": headline.uid,
        "sample": headline.sample,
        "attempt": headline.attempt,
        "status": outcome.status,
        "reason": outcome.reason,
        "boundary": outcome.boundary,
        "detail": outcome.detail[:2000],
        "reward": reward,
        "parts": {} if headline.reward is None else {k: finite(v) for k, v in headline.reward.parts.items()},
        "tokens": headline.num_sampled,
        "prompt_tokens": headline.prompt_tokens,
        "response_tokens": headline.response_tokens,
        "turns": headline.num_turns,
        "rows": headline.num_rows,
        "source": headline.data_source,
        "at": timing.started_at,
        "seconds": {
            "total": timing.total_s,
            "queue": timing.queue_s,
            "generate": timing.generate_s,
            "tool": timing.tool_s,
            "score": timing.score_s,
        },
        "has_body": headline.has_body,
        "intact": headline.is_intact,
        "validation": validation_of(headline.uid),
    }


def validation_of(uid: str) -> int | None:
    number, slash, _ = uid.removeprefix("validation-").partition("/")
    return int(number) if slash and uid.startswith("validation-") and number.isdecimal() else None


_EPOCH = re.compile(r"@[0-9]+$")


def task_name(uid: str) -> str:
    """The name of a task without the validation or the epoch that it was sampled in."""
    return uid.partition("/")[2] if validation_of(uid) is not None else _EPOCH.sub("", uid)


def finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
