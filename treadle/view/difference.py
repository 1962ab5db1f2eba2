"""Difference of two rows: any two rows of trajectories of the open runs, from their first different token on.

Owns how two rows are lined up: from the beginning of their prompts, or, where the prompts are of different tasks or
turns, from the beginning of their responses. Each side is a window of tokens as the screen of one row has it, with the
trainer's side of each token where it is recorded.
Invariant: both windows begin the same number of tokens before the first difference, or at the beginning.
"""

from dataclasses import dataclass

from treadle.errors import RunError
from treadle.view.queries import Json, RunQuery, sample_line
from treadle.view.row_tree import first_difference
from treadle.view.trajectory_pages import TrajectoryPages

CONTEXT = 48
"""Tokens before the first difference."""
SHOWN = 400
"""Tokens of each side in one answer."""


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A row of a trajectory of an open run."""

    pages: TrajectoryPages
    id: int
    row: int = 0


def compare_rows(one: RowPlace, other: RowPlace, *, responses: bool = False, skip: int = 0) -> Json:
    """Two rows from their first different token on, or `skip` tokens later; with `responses`, without their prompts."""
    (prompt, response, line), (other_prompt, other_response, other_line) = (_read_side(place) for place in (one, other))
    ids = (response, other_response) if responses else (prompt + response, other_prompt + other_response)
    shared = first_difference(*ids)
    offsets = [len(blob) // 4 if responses else 0 for blob in (prompt, other_prompt)]
    start = (0 if shared is None else max(0, shared - CONTEXT)) + max(0, skip)
    starts = [offset + start for offset in offsets]
    sides = [place.pages.tokens(place.id, place.row, at, SHOWN) for place, at in zip((one, other), starts, strict=True)]
    return {
        "same": shared is None,
        "shared": min(map(len, ids)) // 4 if shared is None else shared,
        "first": [None if shared is None else offset + shared for offset in offsets],
        "same_prompt": prompt == other_prompt,
        "starts": starts,
        "more": any(at + SHOWN < side["total"] for at, side in zip(starts, sides, strict=True)),
        "lines": [line, other_line],
        "sides": sides,
    }


def locate(pages: TrajectoryPages, name: str) -> Json:
    """The trajectory that a person names: its number in the journal, or its task and sample (`TASK/0`)."""
    with pages.run.query() as query:
        if name.isdecimal() and len(name) < 19:
            return {"id": query.headline(int(name)).id}
        uid, slash, sample = name.rpartition("/")
        if slash and sample.isdecimal():
            for item in query.samples(uid, None):
                if item.sample == int(sample):
                    return {"id": item.id}
        samples = query.samples(name, None)
    if not samples:
        raise RunError(
            f"{pages.run.name} has no trajectory {name!r}: give its number, or a task with its sample: TASK/0"
        )
    return {"id": samples[0].id}


def _read_side(place: RowPlace) -> tuple[bytes, bytes, Json]:
    """Ids of prompt and response as they are stored, and what the screen tells of the row."""
    pages = place.pages.run
    with pages.query() as query:
        headline = query.headline(place.id)
        prompt, response = _stored_ids(query, place)
        line = sample_line(headline)
        siblings = [item.id for item in query.samples(headline.uid, None)]
        (trained,) = pages.places(query, [headline])
    return prompt, response, {**line, **trained, "run": pages.name, "row": place.row, "siblings": siblings}


def _stored_ids(query: RunQuery, place: RowPlace) -> tuple[bytes, bytes]:
    found = query.all(
        "SELECT ifnull(r.prompt_ids, p.ids), r.ids FROM rows r JOIN trajectories t ON t.id = r.trajectory "
        "JOIN prompts p ON p.id = t.prompt WHERE r.trajectory = ? AND r.position = ?",
        (place.id, place.row),
    )
    if found:
        return bytes(found[0][0]), bytes(found[0][1])
    count = int(query.one("SELECT count(*) FROM rows WHERE trajectory = ?", (place.id,))[0])
    if count:
        raise RunError(f"trajectory {place.id} has no row {place.row}: its rows are 0 to {count - 1}")
    raise RunError(f"trajectory {place.id} has no tokens: they were dropped for logging.journal_max_mb, or it failed")
