"""Detectors of findings: what a person would want to look at in a group or a sample, each with its span.

Owns the rules and the span of a finding, so that a viewer marks exactly what was matched: letters (Unicode code points)
of one field of a message, as `message_fields` cuts it, or tokens of a row. Reads records alone. Imports no torch.
Invariant: a span lies inside its field or row.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from struct import pack
from typing import Literal

from treadle.inspect.gaps import TokenGap
from treadle.inspect.run_records import RecordedTrajectory, RolloutPurpose
from treadle.inspect.transcript import CONTENT, message_fields

FindingKind = Literal["tampering", "echo", "format_only", "growth", "gap", "repetition", "identical", "no_signal"]

_EXCERPT = 160
_FORM = re.compile(r"(?i)format|length|style|tag|think|overlong|penalt|brevity|language")
"""Names of reward parts that judge the form of an answer."""
_TAMPERING = re.compile(
    r"(?i)\b(?:sys\.exit\(\s{0,9}0|os\._exit\(|pytest\.skip|unittest\.skip|@skip\b|monkeypatch|mock\.patch|conftest\.py|"
    r"assert\s{1,9}True\b|def\s{1,9}__eq__|__import__\(['\"]builtins|rm\s{1,9}-r?f?\s{1,9}\S{0,60}?tests?\b|"
    r"(?:>|write|edit|sed\s{1,9}-i)\S{0,20}\s{1,9}\S{0,60}?test_\w{1,60}\.py|chmod\s{1,9}\S{1,20}\s{1,9}\S{0,60}?tests?\b|"
    r"reward_?(?:fn|function|hack)|grader\.py|checker\.py|expected_outputs?\b|answer_?key\b|hard-?code)"
)
"""Every repeat has a bound: a rewarded answer made for it would else take this search hours."""
_MIN_ECHO = 5
_MIN_REPEATED, _MAX_PERIOD = 48, 32
_MIN_IDENTICAL = 32
"""Sampled tokens from which on equal answers are worth a look: short ones are the same wherever a task is solved."""
_MIN_GAP = 0.1
"""Nats between sampler and trainer on a token that was sampled by the weights it trains."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """Something to look at, and where."""

    kind: FindingKind
    uid: str
    sample: int
    id: int
    """Of the trajectory in the journal."""
    step: int | None
    """The step that trained on it; None for a validation."""
    validation: int | None
    """The step after which it was a validation; None for training."""
    detail: str
    message: int | None = None
    """Which message of the conversation has the span."""
    field: str | None = None
    """Which field of it, by the name that `message_fields` gives it."""
    row: int | None = None
    """Which row has the span, where it is one of tokens."""
    start: int | None = None
    end: int | None = None
    """The span, in letters of the field or in tokens of the row, its prompt first."""
    excerpt: str = ""


@dataclass(frozen=True, slots=True)
class LookedAtGroup:
    """What was found in a group, and the length and reward of each sample, less the mean of the group."""

    num_samples: int
    findings: tuple[RunFinding, ...]
    centred: tuple[tuple[float, float, int], ...] = ()
    """The last is the sample's place in `samples`."""
    samples: tuple[tuple[str, int, int, int | None], ...] = field(default=(), repr=False)
    """uid, sample, id and step of each that is in `centred`."""
    is_validation: bool = False


def look_at_group(samples: Sequence[RecordedTrajectory], gaps: Sequence[TokenGap | None]) -> LookedAtGroup:
    """Every finding of a group; `gaps` has the largest of each sample that counts, where it is annotated.

    A validation teaches nothing and may be sampled greedily: only its samples are looked at, not what they have in
    common.
    """
    survivors = [item for item in samples if item.headline.outcome.ok]
    found = [finding for item in survivors for finding in _look_at_sample(item)]
    if samples and samples[0].purpose is RolloutPurpose.VALIDATION:
        return LookedAtGroup(len(samples), tuple(found), is_validation=True)
    found = [*_look_at_rewards(survivors), *_look_at_tokens(survivors), *found]
    for item, gap in zip(samples, gaps, strict=True):
        found += _find_gap(item, gap)
    scored = [(float(item.headline.num_sampled), item.reward, item) for item in survivors if item.reward is not None]
    if len(scored) < 2:
        return LookedAtGroup(len(samples), tuple(found))
    length = sum(length for length, _, _ in scored) / len(scored)
    reward = sum(reward for _, reward, _ in scored) / len(scored)
    centred = tuple((own - length, got - reward, at) for at, (own, got, _) in enumerate(scored))
    places = tuple((item.headline.uid, item.headline.sample, item.headline.id, item.step) for _, _, item in scored)
    return LookedAtGroup(len(samples), tuple(found), centred, places)


def _look_at_rewards(samples: Sequence[RecordedTrajectory]) -> Iterator[RunFinding]:
    rewards = [item.reward for item in samples if item.reward is not None]
    if len(rewards) > 1 and min(rewards) == max(rewards) and not samples[0].trajectory.seats:
        # Seats are compared each with its like: the mean over both sides of a game says nothing.
        yield _finding("no_signal", samples[0], f"all {len(rewards)} samples have reward {rewards[0]:g}")


def _look_at_tokens(samples: Sequence[RecordedTrajectory]) -> Iterator[RunFinding]:
    """Most of a group the same, and long: sampling has lost its variety, or the engine its randomness."""
    same = Counter(_sampled_ids(item) for item in samples if item.trajectory.rows)
    most, count = same.most_common(1)[0] if same else (b"", 0)
    if len(most) >= 4 * _MIN_IDENTICAL and count > 1 and 2 * count > len(samples):
        item = next(item for item in samples if item.trajectory.rows and _sampled_ids(item) == most)
        yield _finding("identical", item, f"{count} of {len(samples)} samples are the same {len(most) // 4} tokens")


def _look_at_sample(item: RecordedTrajectory) -> Iterator[RunFinding]:
    yield from _find_repetition(item)
    if item.reward is None or item.reward <= 0:
        return
    yield from _find_form_only(item)
    yield from _find_echo(item)
    if found := _first_match(_TAMPERING, _spoken(item)):
        yield _span("tampering", item, f"rewarded {item.reward:g}, and wrote {found.text[slice(*found.span)]!r}", found)


def _find_form_only(item: RecordedTrajectory) -> Iterator[RunFinding]:
    parts = item.headline.reward.parts if item.headline.reward else {}
    form = {name: value for name, value in parts.items() if _FORM.search(name)}
    others = {name: value for name, value in parts.items() if name not in form}
    if others and any(value > 0 for value in form.values()) and all(value <= 0 for value in others.values()):
        shown = ", ".join(f"{name} {value:g}" for name, value in parts.items())
        detail = f"reward {item.reward:g} from {shown}"
        spoken = [place for place in _spoken(item) if place.field == CONTENT and place.text.strip()]
        if not spoken:
            yield _finding("format_only", item, detail)
            return
        last = spoken[-1]
        yield _span("format_only", item, detail, _Place(last.message, last.field, last.text, _last_line(last.text)))


def _last_line(text: str) -> tuple[int, int]:
    """The last line that is not empty: what an answer ends with."""
    end = len(text.rstrip())
    return text.rfind("\n", 0, end) + 1, end


def _find_echo(item: RecordedTrajectory) -> Iterator[RunFinding]:
    """A truth that the prompt holds as a word of its own, and that the answer repeats."""
    truth = _as_text(item.ground_truth)
    if len(truth) < _MIN_ECHO:
        return
    before, after = r"(?<!\w)", r"(?!\w)"  # nor part of a longer number, such as 2,345 in 12,345 or in 2,345.6
    before += r"(?<!\d[.,])" if truth[0].isdigit() else ""
    after += r"(?![.,]\d)" if truth[-1].isdigit() else ""
    word = re.compile(f"{before}{re.escape(truth)}{after}")
    given = _first_match(word, _before_the_model(item))
    if given is not None and _first_match(word, _spoken(item)) is not None:
        yield _span("echo", item, f"message {given.message} holds the ground truth, and the answer repeats it", given)


def _as_text(truth: object) -> str:
    """A text, or a number as it is written; other truths, such as lists, have no one way to be written."""
    if isinstance(truth, str):
        return truth
    return str(truth) if isinstance(truth, int | float) and not isinstance(truth, bool) else ""


def _find_gap(item: RecordedTrajectory, gap: TokenGap | None) -> Iterator[RunFinding]:
    """A token of the weights it trains on: sampler and trainer should agree but for rounding."""
    if gap is None or abs(gap.gap) < _MIN_GAP:
        return
    detail = (
        f"sampler {gap.sampler:.3f}, trainer {gap.trainer:.3f} at token {gap.position} of row {gap.row}, "
        "sampled by the weights it trains on"
    )
    yield _token_span("gap", item, detail, gap.row, gap.position, gap.position + 1)


def _find_repetition(item: RecordedTrajectory) -> Iterator[RunFinding]:
    for number, row in enumerate(item.trajectory.rows):
        places = list(compress(range(len(row.ids)), row.mask))
        ids = list(compress(row.ids, row.mask))
        if len(ids) < _MIN_REPEATED or not _compresses(ids):
            continue
        if found := _longest_repeat(ids):
            period, start, length = found
            first, last = (len(row.prompt_ids) + places[at] for at in (start, start + length - 1))
            place = f" of row {number}" if number else ""
            detail = f"{period} tokens repeat {length // period} times from token {first}{place}"
            yield _token_span("repetition", item, detail, number, first, last + 1)
            return


def _compresses(ids: Sequence[int]) -> bool:
    """A quick look: what repeats takes little room when compressed."""
    raw = pack(f"<{len(ids)}i", *ids)
    return len(zlib.compress(raw, 1)) < 0.35 * len(raw)


def _longest_repeat(ids: Sequence[int]) -> tuple[int, int, int] | None:
    """The longest stretch in which every token equals the one a period before it: (period, start, length)."""
    best: tuple[int, int, int] | None = None
    for period in range(1, _MAX_PERIOD + 1):
        run = 0
        for at in range(period, len(ids) + 1):
            if at < len(ids) and ids[at] == ids[at - period]:
                run += 1
                continue
            length = run + period
            if length >= max(_MIN_REPEATED, 4 * period) and (best is None or length > best[2]):
                best = (period, at - length, length)
            run = 0
    return best


@dataclass(frozen=True, slots=True)
class _Place:
    """A text of a message, and a span of it."""

    message: int
    field: str
    text: str
    span: tuple[int, int] = (0, 0)


def _spoken(item: RecordedTrajectory) -> Iterator[_Place]:
    """What the model wrote: content, reasoning, and the arguments of calls."""
    first = _first_turn(item)
    for at, message in enumerate(item.trajectory.messages):
        if at >= first and message.get("role") == "assistant":
            for name, text in message_fields(message):
                yield _Place(at, name, text)


def _before_the_model(item: RecordedTrajectory) -> Iterator[_Place]:
    for at, message in enumerate(item.trajectory.messages[: _first_turn(item)]):
        for name, text in message_fields(message):
            yield _Place(at, name, text)


def _first_turn(item: RecordedTrajectory) -> int:
    """Which message is the model's first: it wrote one for each turn, the last ones; those before are the prompt's.

    A conversation may go on over several rows; in an episode of several agents each row is one of its own.
    """
    counts = [len(row.turns) for row in item.trajectory.rows]
    turns = max(counts, default=0) if item.trajectory.seats else sum(counts)
    spoken = [at for at, message in enumerate(item.trajectory.messages) if message.get("role") == "assistant"]
    own = spoken[max(0, len(spoken) - turns) :]
    return own[0] if own else len(item.trajectory.messages)


def _first_match(word: "re.Pattern[str]", texts: Iterator[_Place]) -> _Place | None:
    for place in texts:
        if found := word.search(place.text):
            return _Place(place.message, place.field, place.text, found.span())
    return None


def _sampled_ids(item: RecordedTrajectory) -> bytes:
    row = item.trajectory.rows[0]
    ids = list(compress(row.ids, row.mask))
    return pack(f"<{len(ids)}i", *ids)


def _finding(kind: FindingKind, item: RecordedTrajectory, detail: str) -> RunFinding:
    headline, is_validation = item.headline, item.purpose is RolloutPurpose.VALIDATION
    step, validation = (None, item.step) if is_validation else (item.step, None)
    return RunFinding(kind, headline.uid, headline.sample, headline.id, step, validation, detail)


def _span(kind: FindingKind, item: RecordedTrajectory, detail: str, place: _Place) -> RunFinding:
    start, end = place.span
    excerpt = place.text[max(0, start - _EXCERPT // 2) : end + _EXCERPT // 2]
    return replace(
        _finding(kind, item, detail),
        message=place.message,
        field=place.field,
        start=start,
        end=end,
        excerpt=excerpt[: 4 * _EXCERPT],
    )


def _token_span(kind: FindingKind, item: RecordedTrajectory, detail: str, row: int, start: int, end: int) -> RunFinding:
    return replace(_finding(kind, item, detail), row=row, start=start, end=end)
