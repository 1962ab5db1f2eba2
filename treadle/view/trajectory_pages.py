"""Trajectory pages: one trajectory for the viewer: messages, turns, rows, times, and its tokens a window at a time.

Owns how a trajectory is laid out for a screen. A window of tokens is cut out by SQL: a
trajectory of a million tokens costs what its window costs.
Invariant: answers are plain JSON values; numbers that are not finite are null; texts are whole or say how much is cut.

A position counts the tokens of a row, prompt first. Annotations are what the trainer computed for each sampled token.
"""

import struct
import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isfinite

from treadle.config import load
from treadle.errors import ConfigError, RunError
from treadle.inspect.transcript import CONTENT, REASONING, message_calls, message_fields
from treadle.journal.codec import unpack_floats, unpack_ints
from treadle.view.queries import Json, RunQuery, sample_line
from treadle.view.row_tree import DECIDING, SIGNALS, read_annotation, read_rows, row_lines
from treadle.view.run_pages import RunPages
from treadle.view.token_text import TokenText, decoded, load_run_tokenizer, shown_piece

WINDOW = 1500
"""Tokens in one answer."""
MAX_TEXT = 20_000
"""Letters of a message in one answer; the rest is asked for."""
CONTEXT = 32
"""Tokens on both sides of a window that are encoded again with it: a text cut anywhere would be other tokens there."""
BINS = 400
"""Columns of the strip that shows a whole row."""


class TrajectoryPages:
    """Pages of single trajectories of one run."""

    def __init__(self, pages: RunPages) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self._text: TokenText | None = None
        self._text_problem: str | None = None

    @property
    def run(self) -> RunPages:
        """The run they are of."""
        return self._pages

    def trajectory(self, id: int) -> Json:
        """Everything but the tokens."""
        with self._pages.query() as query:
            headline = query.headline(id)
            line = sample_line(headline)
            bare = headline.uid.partition("/")[2] if line["validation"] is not None else headline.uid
            siblings = [sample_line(item) for item in query.samples(headline.uid, None)]
            (place,) = self._pages.places(query, [headline])
            rows = read_rows(query, id)
            return {
                **line,
                **place,
                "task": query.task(headline.uid) or query.task(bare),
                "messages": _messages(query, id),
                "extra": _extra(query, id),
                "rows_shown": row_lines(query, id, rows, {**line, **place}, self._settings()),
                "updates": _weight_updates(query, headline.timing.started_at, headline.timing.total_s),
                "siblings": [
                    {key: item[key] for key in ("id", "uid", "sample", "reward", "status")} for item in siblings
                ],
                "annotated": sorted(_annotated_rows(query, id)),
            }

    def _settings(self) -> Mapping[str, str]:
        """Config keys that decide what trains, as the run's config has them."""
        try:
            return {line["key"]: line["value"] for line in self._pages.config() if line["key"] in DECIDING}
        except RunError:
            return {}

    def message(self, id: int, at: int, field: str = CONTENT) -> Json:
        """One field of a message whole."""
        with self._pages.query() as query:
            found = query.messages(id)
        if not 0 <= at < len(found):
            raise RunError(f"trajectory {id} has no message {at}")
        fields = dict(message_fields(found[at]))
        if field not in fields:
            raise RunError(f"message {at} of trajectory {id} has no field {field!r}: it has {', '.join(fields)}")
        return {"text": fields[field]}

    def tokens(self, id: int, row: int, start: int = 0, count: int = WINDOW) -> Json:
        """A window of a row: ids, texts or bytes, mask, logprobs, versions, and the trainer's side where recorded."""
        with self._pages.query() as query:
            size = _row_size(query, id, row)
            start = min(max(start, 0), max(sum(size) - 1, 0))
            count = min(count, WINDOW)
            window, before = _Window(query, id, row, size, start, count), min(start, CONTEXT)
            around = _Window(query, id, row, size, start - before, before + count + CONTEXT)
            shown = self._shown(window) | self._drift(around, before, count)
            return {"row": row, "prompt": size[0], "total": sum(size), "start": start, **shown}

    def row_text(self, id: int, row: int) -> Json:
        """A row as text, cut at its turns: what was given, what was sampled; long rows are cut."""
        text = self._tokenizer()
        if text is None:
            raise RunError(self._text_problem or "the tokenizer of this run cannot be loaded")
        with self._pages.query() as query:
            size = _row_size(query, id, row)
            window = _Window(query, id, row, size, 0, min(sum(size), MAX_TEXT))
            ids, mask = window.ids(), window.mask()
        cuts = groupby(range(len(ids)), key=lambda at: ("prompt" if at < size[0] else "given", "sampled")[mask[at]])
        pieces = [
            {"kind": kind, "text": b"".join(text.bytes_of(ids[at]) for at in places).decode(errors="replace")}
            for kind, places in cuts
        ]
        return {"pieces": pieces, "cut": sum(size) - len(ids)}

    def strip(self, id: int, row: int) -> Json:
        """A whole row in few columns: mean logprob, largest gap to the trainer, newest version, share sampled."""
        with self._pages.query() as query:
            num_prompt, num_response = _row_size(query, id, row)
            window = _Window(query, id, row, (num_prompt, num_response), num_prompt, num_response)
            logprobs, versions, trainer = window.logprobs(), window.versions(), window.annotation("old")
            trainer = trainer or window.annotation("trainer")
            signals = {name: window.annotation(name) or () for name in ("advantage", "entropy", "weight")}
        size = max(1, -(-num_response // BINS))
        cuts = [slice(at, at + size) for at in range(0, num_response, size)]
        bins = [
            _bin(logprobs[cut], versions[cut], trainer[cut] if trainer else ())
            | {name: _mean(values[cut]) for name, values in signals.items()}
            for cut in cuts
        ]
        return {"prompt": num_prompt, "response": num_response, "size": size, "bins": bins}

    def _shown(self, window: "_Window") -> Json:
        ids = window.ids()
        text = self._tokenizer()
        pieces = [text.bytes_of(id) for id in ids] if text is not None else []
        shown: Json = {
            "ids": ids,
            "texts": [decoded(piece) for piece in pieces],
            "bytes": {at: piece.hex(" ") for at, piece in enumerate(pieces) if decoded(piece) is None},
            "problem": self._text_problem,
            "mask": window.mask(),
            "logprobs": window.logprobs(),
            "versions": window.versions(),
            "turns": window.turns(),
        }
        for signal in SIGNALS:
            shown[signal] = window.annotation(signal)
        shown["flags"] = window.flags()
        return shown

    def _drift(self, around: "_Window", first: int, count: int) -> Json:
        """Which tokens would be others if text were encoded again, and which; of `count` tokens from `first` on."""
        text = self._tokenizer()
        if text is None:
            return {"drift": None, "again": {}}
        again = _encode_again(text, around)[first : first + count]
        return {
            "drift": [int(found is not None) for found in again],
            "again": {
                at: [[id, shown_piece(text.bytes_of(id))] for id in found]
                for at, found in enumerate(again)
                if found is not None
            },
        }

    def _tokenizer(self) -> TokenText | None:
        """None where it cannot be loaded; the reason is then shown beside the ids."""
        with self._lock:
            if self._text is None and self._text_problem is None:
                try:
                    self._text = TokenText(load_run_tokenizer(load(self._pages.run_dir / "config.yaml").model))
                except (ConfigError, RunError, OSError, AttributeError) as error:
                    self._text_problem = f"ids without text: {' '.join(str(error).split())[:400]}"
            return self._text


def _encode_again(text: TokenText, window: "_Window") -> list[list[int] | None]:
    """What sampled tokens would be if the text of their stretch of the window were encoded again; None: the same."""
    ids, mask = window.ids(), window.mask()
    found: list[list[int] | None] = [None] * len(ids)
    for sampled, stretch in groupby(range(len(ids)), key=lambda at: mask[at]):
        places = list(stretch)
        if sampled:
            found[places[0] : places[-1] + 1] = text.encode_again([ids[at] for at in places])
    return found


class _Window:
    """Part of a row, cut out of its arrays by SQL. Positions count from the prompt's first token."""

    def __init__(self, query: RunQuery, id: int, row: int, size: tuple[int, int], start: int, count: int) -> None:
        self._query, self._id, self._row = query, id, row
        num_prompt, num_response = size
        self._prompt = (start, min(start + count, num_prompt)) if start < num_prompt else (0, 0)
        self._from = max(0, start - num_prompt)
        self._to = min(max(0, start + count - num_prompt), num_response)
        self._mask = self._response("mask", 1)
        self._before = self._sampled_before()
        self._notes = read_annotation(query, id, row)

    def ids(self) -> list[int]:
        first, last = self._prompt
        prompt = self._query.one(
            "SELECT substr(ifnull(r.prompt_ids, p.ids), ?, ?) FROM rows r JOIN trajectories t ON t.id = r.trajectory "
            "JOIN prompts p ON p.id = t.prompt WHERE r.trajectory = ? AND r.position = ?",
            (first * 4 + 1, (last - first) * 4, self._id, self._row),
        )[0]
        return [*unpack_ints(bytes(prompt)), *unpack_ints(self._response("ids", 4))]

    def mask(self) -> list[int]:
        return [*self._unsampled(0), *self._mask]

    def logprobs(self) -> list[float | None]:
        total = self._query.one(
            "SELECT length(logprobs), length(mask) FROM rows WHERE trajectory = ? AND position = ?",
            (self._id, self._row),
        )
        width = total[0] // total[1] if total[1] else 4
        values = unpack_floats(self._response("logprobs", width), self._to - self._from)
        return self._on_sampled([value for value, on in zip(values, self._mask, strict=True) if on])

    def versions(self) -> list[int]:
        return [*self._unsampled(-1), *unpack_ints(self._response("versions", 4))]

    def turns(self) -> list[Json]:
        """Where turns begin and end, in positions of the window's row."""
        text = self._query.one("SELECT turns FROM rows WHERE trajectory = ? AND position = ?", (self._id, self._row))[0]
        turns = self._query.decoded(text, f"row {self._row} of trajectory {self._id}")
        return [{key: turn[key] for key in ("start", "sampled_end", "end", "stop")} for turn in turns]

    def annotation(self, name: str) -> list[float | None] | None:
        """What the trainer computed, on sampled tokens; None where it is not recorded."""
        blob = self._notes.get(name)
        if blob is None:
            return None
        count = sum(self._mask)
        if len(blob) == 4:  # one value for all
            return self._on_sampled(list(struct.unpack("<f", blob)) * count)
        return self._on_sampled(list(struct.unpack_from(f"<{count}f", blob, 4 * self._before)))

    def flags(self) -> list[int] | None:
        """1: clipped, 2: left out of the loss."""
        blob = self._notes.get("flags")
        if blob is None:
            return None
        found = iter(blob[self._before :] if len(blob) > 1 else blob * sum(self._mask))
        return [*self._unsampled(0), *(next(found) if on else 0 for on in self._mask)]

    def _on_sampled(self, values: Sequence[float]) -> list[float | None]:
        found = iter(values)
        spread: list[float | None] = [_finite(next(found)) if on else None for on in self._mask]
        return [*([None] * (self._prompt[1] - self._prompt[0])), *spread]

    def _unsampled(self, value: int) -> list[int]:
        return [value] * (self._prompt[1] - self._prompt[0])

    def _response(self, column: str, width: int) -> bytes:
        return bytes(
            self._query.one(
                f"SELECT substr({column}, ?, ?) FROM rows WHERE trajectory = ? AND position = ?",
                (self._from * width + 1, (self._to - self._from) * width, self._id, self._row),
            )[0]
        )

    def _sampled_before(self) -> int:
        before = self._query.one(
            "SELECT substr(mask, 1, ?) FROM rows WHERE trajectory = ? AND position = ?",
            (self._from, self._id, self._row),
        )[0]
        return bytes(before).count(1)


def _annotated_rows(query: RunQuery, id: int) -> set[int]:
    if not query.has_annotations():
        return set()
    return {row for (row,) in query.all("SELECT position FROM annotations WHERE trajectory = ?", (id,))}


def _row_size(query: RunQuery, id: int, row: int) -> tuple[int, int]:
    """Tokens of prompt and response."""
    found = query.all(
        "SELECT length(ifnull(r.prompt_ids, p.ids)) / 4, length(r.mask) FROM rows r "
        "JOIN trajectories t ON t.id = r.trajectory JOIN prompts p ON p.id = t.prompt "
        "WHERE r.trajectory = ? AND r.position = ?",
        (id, row),
    )
    if not found:
        dropped = query.headline(id).has_body is False
        reason = "its tokens were dropped to keep the journal within logging.journal_max_mb" if dropped else "no row"
        raise RunError(f"trajectory {id}, row {row}: {reason}")
    return int(found[0][0]), int(found[0][1])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _bin(logprobs: Sequence[float | None], versions: Sequence[int], trainer: Sequence[float | None]) -> Json:
    gaps = [
        abs(there - here)
        for here, there in zip(logprobs, trainer, strict=False)
        if here is not None and there is not None
    ]
    return {
        "logprob": _mean(logprobs),
        "gap": max(gaps) if gaps else None,
        "version": max(versions, default=-1),
        "sampled": sum(version >= 0 for version in versions) / max(len(versions), 1),
    }


def _messages(query: RunQuery, id: int) -> list[Json]:
    """Role, text and calls of each message; long texts are cut."""
    shown = []
    for message in query.messages(id):
        fields = dict(message_fields(message))
        text = fields[CONTENT]
        shown.append(
            {
                "role": str(message.get("role", "")),
                "name": str(message.get("name") or ""),
                "text": text[:MAX_TEXT],
                "cut": max(0, len(text) - MAX_TEXT),
                "thinks": fields.get(REASONING, "")[:MAX_TEXT],
                "calls": [
                    {"name": name, "arguments": arguments[:MAX_TEXT]} for name, arguments in message_calls(message)
                ],
            }
        )
    return shown


def _extra(query: RunQuery, id: int) -> Json:
    found = query.all("SELECT extra, score_extra FROM texts WHERE trajectory = ?", (id,))
    read = [
        None if text is None else query.decoded(text, f"the extra of trajectory {id}")
        for text in (found[0] if found else (None, None))
    ]
    return {"trajectory": read[0], "score": read[1]}


def _weight_updates(query: RunQuery, began: float, total_s: float) -> list[Json]:
    """Pushes of new weights while the session was open: seconds after it began, and the version."""
    found = query.all(
        "SELECT time, json_extract(fields, '$.version') FROM events "
        "WHERE kind = 'weights' AND time BETWEEN ? AND ? AND json_valid(fields) ORDER BY id LIMIT 100",
        (began, began + total_s),
    )
    return [{"at": time - began, "version": version} for time, version in found]


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
