"""Full-text index of a run's messages for the viewer: words, symbols and letters of languages without spaces.

Owns how a text is cut into tokens and what a question means. Lies in a temporary file of this process (FTS5), never in
the run directory: the viewer writes nothing there. It is filled from the newest trajectory to the oldest, as far as a
question has time for; an answer says how far that was, the next one goes on.

    calc 42            both: a word is found by its beginning, and in any case
    "a phrase"         exactly these, one after the other
    one OR other       NOT this
    ####   os._exit(   symbols count, each for itself
    北京               letters of Chinese, Japanese and Thai too
"""

import re
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.errors import RunError
from treadle.inspect.transcript import message_fields
from treadle.journal.codec import label
from treadle.view.queries import RunQuery
from treadle.view.run_pages import RunPages

BUDGET_S = 0.4
"""Seconds that one question spends on the index."""
_BATCH = 500
_MATCHES = 100_000
_APART = re.compile(
    "[^\\w\\s]|_|[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Letters that are tokens of their own: symbols, and those of languages that put no spaces between words."""
_TERM = re.compile(r'"([^"]*)"?|(\S+)')


@dataclass(frozen=True, slots=True)
class SearchTerm:
    """A word or phrase of a question."""

    tokens: tuple[str, ...]
    by_beginning: bool
    """Whether the last word may go on."""

    @property
    def match(self) -> str:
        """As FTS5 takes it."""
        return f'"{" ".join(token.replace(chr(34), chr(34) * 2) for token in self.tokens)}"' + (
            " *" if self.by_beginning else ""
        )

    @property
    def pattern(self) -> "re.Pattern[str]":
        """What it matches in a text, to be marked there."""
        begins = r"(?<![^\W_])" if self.tokens[0].isalnum() and not _APART.match(self.tokens[0]) else ""
        return re.compile(begins + r"\s*".join(map(re.escape, self.tokens)), re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SearchQuestion:
    """What a reader asks for: of each clause one term, and none that is excluded."""

    clauses: tuple[tuple[SearchTerm, ...], ...]
    excluded: tuple[SearchTerm, ...]

    @property
    def match(self) -> str:
        wanted = " AND ".join(f"({' OR '.join(term.match for term in clause)})" for clause in self.clauses)
        return "".join([wanted, *(f" NOT {term.match}" for term in self.excluded)])

    @property
    def patterns(self) -> list["re.Pattern[str]"]:
        return [term.pattern for clause in self.clauses for term in clause]


def read_question(text: str) -> SearchQuestion:
    """A question as a reader types it. RunError: what it lacks."""
    clauses: list[list[SearchTerm]] = []
    excluded: list[SearchTerm] = []
    word = ""
    for found in _TERM.finditer(label(text).replace("\0", " ")):
        if found[2] in ("AND", "OR", "NOT"):
            word = found[2]
            continue
        tokens = tuple(cut_apart(found[1] if found[1] is not None else found[2]).split())
        if not tokens:
            continue
        term = SearchTerm(tokens, found[1] is None and tokens[-1].isalnum())
        if word == "NOT":
            excluded.append(term)
        elif word == "OR" and clauses:
            clauses[-1].append(term)
        else:
            clauses.append([term])
        word = ""
    if not clauses:
        raise RunError("the search needs a word that is to be found, not only words that are not")
    return SearchQuestion(tuple(map(tuple, clauses)), tuple(excluded))


def cut_apart(text: str) -> str:
    """The text with a space around everything that is a token of its own."""
    return _APART.sub(r" \g<0> ", text)


class TextIndex:
    """Full-text index of one run (see the module)."""

    def __init__(self, pages: RunPages) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        # A database without a name: SQLite keeps it in a temporary file of its own, and deletes that on closing.
        self._index = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._index.execute("PRAGMA journal_mode = OFF")
        self._index.execute("PRAGMA synchronous = OFF")
        tokens = "unicode61 remove_diacritics 0 categories 'L* M* N* P* S* Co'"
        self._index.execute(f"CREATE VIRTUAL TABLE said USING fts5(text, content='', tokenize=\"{tokens}\")")
        self._from = 0
        self._through = 0
        """Trajectories from `_from` (exclusive) to `_through` are in the index."""

    def close(self) -> None:
        self._index.close()

    def search(self, question: SearchQuestion) -> tuple[list[int], float]:
        """Trajectories that answer it, the newest first; and the share of the run that is in the index."""
        with self._lock:
            with self._pages.query() as query:
                share = self._fill(query)
            found = self._index.execute(
                "SELECT rowid FROM said WHERE said MATCH ? ORDER BY rowid DESC LIMIT ?", (question.match, _MATCHES)
            ).fetchall()
        return [id for (id,) in found], share

    def _fill(self, query: RunQuery) -> float:
        """Go on with the index for a moment: what is new first, then backwards to the oldest."""
        ends, newest = time.monotonic() + BUDGET_S, int(query.one("SELECT ifnull(max(trajectory), 0) FROM texts")[0])
        oldest = int(query.one("SELECT ifnull(min(trajectory), 1) FROM texts")[0])
        if not self._through:
            self._from = self._through = newest
            self._add(query, newest - 1, newest)
        while self._through < newest and time.monotonic() < ends:
            upto = min(newest, self._through + _BATCH)
            self._add(query, self._through, upto)
            self._through = upto
        while self._from > oldest and time.monotonic() < ends:
            start = max(oldest - 1, self._from - 1 - _BATCH)
            self._add(query, start, self._from - 1)
            self._from = start + 1
        covered = self._through - max(self._from, oldest) + 1
        return min(1.0, covered / max(newest - oldest + 1, 1))

    def _add(self, query: RunQuery, after: int, through: int) -> None:
        found = query.all(
            "SELECT x.trajectory, p.messages, x.messages, t.detail FROM texts x "
            "JOIN trajectories t ON t.id = x.trajectory JOIN prompts p ON p.id = t.prompt "
            "WHERE x.trajectory > ? AND x.trajectory <= ?",
            (after, through),
        )
        found = [
            (id, *(query.decoded(text, f"the text of trajectory {id}") for text in texts), detail)
            for id, *texts, detail in found
        ]
        rows = [
            (id, "\n".join([*_texts(opening), *_texts(rest), cut_apart(detail)])) for id, opening, rest, detail in found
        ]
        self._index.execute("BEGIN")
        self._index.executemany("INSERT INTO said (rowid, text) VALUES (?, ?)", rows)
        self._index.execute("COMMIT")


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [text for message in messages for _, text in message_fields(message)]
    return [cut_apart(text.encode("utf-8", "backslashreplace").decode()) for text in found if text]
