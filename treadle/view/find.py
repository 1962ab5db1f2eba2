"""Find: trajectories of a run by text and by figures, page by page.

Owns the filters of the viewer, each a condition in SQL, their order, and the excerpt that shows a hit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.errors import RunError
from treadle.inspect.gaps import TokenGap
from treadle.inspect.transcript import message_fields
from treadle.journal.codec import label
from treadle.view.queries import Json, RunQuery
from treadle.view.row_index import EchoIndex, GapIndex, RowIndex
from treadle.view.run_pages import RunPages
from treadle.view.text_index import SearchQuestion, TextIndex, read_question

AROUND = 90
"""Letters before and after a hit."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A filter of the viewer: the condition that its value puts on a trajectory `t`."""

    sql: str
    convert: type[str] | type[float] | type[int] = str


CONDITIONS = {
    "uid": Condition("t.uid = ?"),
    "source": Condition("t.data_source = ?"),
    "status": Condition("t.status = ?"),
    "reason": Condition("t.reason = ?"),
    "boundary": Condition("t.boundary = ?"),
    "min_reward": Condition("t.reward >= ?", float),
    "max_reward": Condition("t.reward <= ?", float),
    "min_tokens": Condition("t.num_sampled >= ?", int),
    "max_tokens": Condition("t.num_sampled <= ?", int),
    "min_turns": Condition("t.num_turns >= ?", int),
    "max_turns": Condition("t.num_turns <= ?", int),
    "min_rows": Condition("t.num_rows >= ?", int),
    "min_seconds": Condition("t.total_s >= ?", float),
}
"""By the name that a URL gives them."""

ECHOES = ("exact", "equivalent", "reduced", "edited")
"""How a turn came back in the next request of an agent behind the gateway."""
_PART = "json_extract(t.parts, ?) {sign} ?"


def conditions(given: Mapping[str, str]) -> tuple[list[str], list[Any]]:
    """The SQL of the filters in a URL, and its values; a RunError names one that cannot be read."""
    clauses, values = list[str](), list[Any]()
    for name, condition in CONDITIONS.items():
        if given.get(name):
            clauses.append(condition.sql)
            values.append(_convert(name, given[name], condition.convert))
    if given.get("part"):
        name, sign, value = _split_part(given["part"])
        clauses.append(_PART.format(sign=sign))
        values += [f'$."{label(name)}"', value]
    if given.get("validation") in ("yes", "no"):
        clauses.append(f"t.uid {'' if given['validation'] == 'yes' else 'NOT '}GLOB 'validation-[0-9]*/*'")
    return clauses, values


def _convert(name: str, text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise RunError(f"{name} must be a number, not {text[:80]!r}") from None
    if isinstance(value, int) and abs(value) >= 2**63:
        raise RunError(f"{name} must be below 2^63 in size, not {text[:80]}")
    return label(value) if isinstance(value, str) else value


def _split_part(text: str) -> tuple[str, str, float]:
    """`format<1` as name, sign and number."""
    for sign in ("<=", ">=", "<", ">", "="):
        name, found, value = text.partition(sign)
        if found and '"' not in name:
            return name.strip(), sign, float(_convert("part", value, float))
    raise RunError(f"part must be such as answer<1 or format>=0.5, not {text!r}")


@dataclass(frozen=True, slots=True)
class Indexes:
    """What a search needs beside the journal, each made by the first question for it."""

    texts: TextIndex
    gaps: GapIndex
    rows: RowIndex
    echoes: EchoIndex

    @classmethod
    def of(cls, pages: RunPages) -> "Indexes":
        return cls(TextIndex(pages), GapIndex(pages), RowIndex(pages), EchoIndex(pages))


def find(pages: RunPages, indexes: Indexes, given: Mapping[str, str]) -> Json:
    """A page of what a URL asks for: `q` for words, any of `CONDITIONS`, step, tool, version, part, gap, order."""
    clauses, values = conditions(given)
    order = given.get("order") or "new"
    if order not in ("new", "worst", "best", "gap"):
        raise RunError(f"order must be new, worst, best or gap, not {order!r}")
    share, question, gaps = 1.0, None, None
    if given.get("q", "").strip():
        question = read_question(given["q"])
        ids, share = indexes.texts.search(question)
        clauses.append("t.id IN (SELECT value FROM json_each(?))")
        values.append(str(ids))
    if given.get("version") or given.get("tool"):
        version = _convert("version", given["version"], int) if given.get("version") else None
        ids, read = indexes.rows.find(version, given.get("tool") or None)
        share = min(share, read)
        clauses.append("t.id IN (SELECT value FROM json_each(?))")
        values.append(str(ids))
    if given.get("echo"):
        if given["echo"] not in ECHOES:
            raise RunError(f"echo must be one of {', '.join(ECHOES)}, not {given['echo']!r}")
        ids, read = indexes.echoes.find(given["echo"])
        share = min(share, read)
        clauses.append("t.id IN (SELECT value FROM json_each(?))")
        values.append(str(ids))
    if given.get("step"):
        clauses.append("t.id IN (SELECT value FROM json_each(?))")
        values.append(str(pages.ids_of_step(_convert("step", given["step"], int))))
    if given.get("min_gap") or order == "gap":
        gaps, share = _read_gaps(indexes, share)
        clauses.append("gap_of(t.id) >= ?")
        values.append(_convert("min_gap", given.get("min_gap") or "0", float))
    before = _convert("before", given["before"], int) if given.get("before") else None
    found = pages.samples(" AND ".join(clauses) or "1", values, before, order, gaps)
    if question is not None:
        with pages.query() as query:
            for line in found["samples"]:
                line["hit"] = _first_hit(query, line["id"], question)
    return {**found, "indexed": share}


def _read_gaps(indexes: Indexes, share: float) -> tuple[Mapping[int, TokenGap], float]:
    gaps, read = indexes.gaps.read()
    return gaps, min(share, read)


def _first_hit(query: RunQuery, id: int, question: SearchQuestion) -> Json | None:
    """Where the first of the words stands that is in a message: its place, and the text around it."""
    for pattern in question.patterns:
        for at, message in enumerate(query.messages(id)):
            for name, text in message_fields(message):
                if found := pattern.search(text):
                    start, end = found.span()
                    return {
                        **{"message": at, "field": name, "start": start, "end": end},
                        "before": text[max(0, start - AROUND) : start],
                        "match": text[start:end][:AROUND],
                        "after": text[end : end + AROUND],
                    }
    return None
