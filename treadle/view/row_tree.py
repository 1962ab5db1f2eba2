"""Row tree of a trajectory: where each row branched off, what it holds, whether it trained and why not.

Owns what counts as a fork, and the reasons; both by what the journal holds, with the config where it holds nothing.
"""

from collections.abc import Mapping, Sequence

from treadle.journal.codec import is_intact, unpack_ints
from treadle.view.queries import Json, RunQuery

ROWS = 256
"""Rows of a trajectory in one answer."""
DECIDING = ("algorithm.mask_truncated", "trainer.critic_warmup")
"""Config keys that decide what trains."""
SIGNALS = ("trainer", "old", "reference", "advantage", "entropy", "weight")
"""What annotations hold for each sampled token, by column."""


def read_rows(query: RunQuery, id: int) -> list[Json]:
    found = query.all(
        "SELECT r.position, ifnull(r.prompt_ids, p.ids), r.ids, r.mask, r.versions, r.turns FROM rows r "
        "JOIN trajectories t ON t.id = r.trajectory JOIN prompts p ON p.id = t.prompt "
        f"WHERE r.trajectory = ? ORDER BY r.position LIMIT {ROWS}",
        (id,),
    )
    return [
        {
            "position": at,
            "prompt": bytes(prompt),
            "ids": bytes(ids),
            "mask": bytes(mask),
            "versions": bytes(versions),
            "turns": query.decoded(turns, f"row {at} of trajectory {id}"),
        }
        for at, prompt, ids, mask, versions, turns in found
    ]


def row_lines(query: RunQuery, id: int, rows: Sequence[Json], line: Json, settings: Mapping[str, str]) -> list[Json]:
    """Rows for the tree: where each branched off, what it holds, whether it trained and why not."""
    wholes = [row["prompt"] + row["ids"] for row in rows]
    shown = []
    for at, row in enumerate(rows):
        versions = {version for version in unpack_ints(row["versions"]) if version >= 0}
        sampled = row["mask"].count(1)
        parent, shared = _branch(row["prompt"], rows[:at], wholes)
        is_trained, why = _explain_training(read_annotation(query, id, row["position"]), sampled, line, settings)
        shown.append(
            {
                "position": row["position"],
                "parent": parent,
                "shared": shared,
                "prompt": len(row["prompt"]) // 4,
                "response": len(row["mask"]),
                "sampled": sampled,
                "versions": [min(versions), max(versions)] if versions else [],
                "turns": row["turns"],
                "trained": is_trained,
                "why": why,
            }
        )
    return shown


def _branch(prompt: bytes, earlier: Sequence[Json], wholes: Sequence[bytes]) -> tuple[int | None, int]:
    """The earlier row that this one forks from, and after how many tokens.

    A fork holds the whole prompt of its parent: every chat begins alike, so that a shared beginning alone says nothing.
    What forks from none begins on its own: a sub-agent, or a conversation that was made shorter.
    """
    best, shared = None, 0
    for at in reversed(range(len(earlier))):
        own = len(earlier[at]["prompt"])
        more = max(own, 4 * shared + 4)
        if more > len(prompt) or prompt[:more] != wholes[at][:more]:
            continue
        first = first_difference(prompt, wholes[at])
        best, shared = earlier[at]["position"], len(prompt) // 4 if first is None else first
    return best, shared


def _explain_training(
    notes: Mapping[str, bytes | None], sampled: int, line: Json, settings: Mapping[str, str]
) -> tuple[bool, str]:
    """Whether a row changed the weights, and why; by its annotations where there are any, else by the config."""
    if line["status"] == "failed":
        return False, f"not trained: the session failed at {line['boundary']}"
    if line["validation"] is not None:
        return False, "not trained: a validation"
    step: int | None = line["step"]
    if step is None:
        why = "undone, or replaced by a later attempt" if line["replaced"] else "no step in force took it"
        return False, f"not trained: {why}"
    if not sampled:
        return False, "not trained: no token of it was sampled"
    if line["status"] == "truncated" and settings.get("algorithm.mask_truncated") == "true":
        return False, f"in step {step}, and left out of the loss: cut off (algorithm.mask_truncated)"
    if step <= int(settings.get("trainer.critic_warmup") or 0):
        return False, f"step {step} trained the critic alone (trainer.critic_warmup)"
    flags, advantage = notes.get("flags"), notes.get("advantage")
    if flags and all(flag & 2 for flag in flags):
        return False, f"in step {step}, and left out of the loss: every token was masked"
    if advantage is not None and not any(advantage):
        return False, f"in step {step} with advantage 0: it taught nothing"
    if flags is None:
        return True, f"in step {step}; whether tokens were masked is not recorded"
    left = sum(1 for flag in flags if flag & 2)
    return True, f"trained at step {step}" + (f", {left} of {sampled} tokens left out of the loss" if left else "")


def first_difference(one: bytes, other: bytes) -> int | None:
    """The first token that differs; None where both are the same."""
    if one == other:
        return None
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:  # the longest common beginning, by halving
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[: middle * 4] == other[: middle * 4] else (low, middle - 1)
    return low


def read_annotation(query: RunQuery, id: int, row: int) -> Mapping[str, bytes | None]:
    if not query.has_annotations():
        return {}
    columns = (*SIGNALS, "flags")
    found = query.all(
        f"SELECT position, step, {', '.join(columns)}, digest FROM annotations "
        "WHERE trajectory = ? AND position = ? ORDER BY id DESC LIMIT 1",
        (id, row),
    )
    if not found or not is_intact(found[0]):
        return {}
    return dict(zip(columns, found[0][2:-1], strict=True))
