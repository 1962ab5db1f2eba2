"""Export: trajectories as one HTML file that opens without a network, or as lines of JSON.

Owns the form of the file. It holds no script at all: what a model wrote is escaped text in it, control characters and
direction marks are written out, and its policy forbids everything but its own style. Tokens are coloured by logprob in
five classes; what a finding is about is marked.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape

from treadle.inspect.detectors import RunFinding
from treadle.inspect.run_records import RunRecords
from treadle.inspect.transcript import CONTENT, REASONING, content_text, to_json
from treadle.view.queries import Json
from treadle.view.run_pages import RunPages
from treadle.view.trajectory_pages import TrajectoryPages

MAX_TOKENS = 20_000
"""Of one row, in the file."""
BEFORE = 200
"""Tokens before the span of a finding, in the file."""
COMPARED = 50
"""Tokens of a span, in the table of sampler and trainer."""
MAX_ROWS = 16
"""Rows of a trajectory, in the file."""
_LIMITS = (-0.05, -0.5, -1.5, -4.0)
"""Logprobs between the five classes of colour."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root{{color-scheme:light dark;--ink:#1d2127;--soft:#626a75;--line:#d9dde2;--ground:#fbfbfa;--l1:#fdf1cf;
--l2:#fbd38a;--l3:#f3a35c;--l4:#e07a4a}}
@media(prefers-color-scheme:dark){{:root{{--ink:#e4e7eb;--soft:#98a1ac;--line:#343a42;--ground:#14171b;--l1:#3b3420;
--l2:#5c4720;--l3:#7d4f24;--l4:#96492b}}}}
body{{font:15px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--ground);max-width:62rem;margin:2rem auto;
padding:0 1.25rem}}h1{{font-size:1.25rem}}h2{{font-size:1.05rem;margin-top:2.5rem;border-top:1px solid var(--line);
padding-top:1.5rem}}.soft{{color:var(--soft)}}pre{{white-space:pre-wrap;overflow-wrap:anywhere;margin:.25rem 0 1rem;
font:13.5px/1.55 ui-monospace,monospace;unicode-bidi:plaintext}}.role{{font-weight:600;font-size:.85rem}}
.tokens span{{unicode-bidi:isolate}}.l1{{background:var(--l1)}}.l2{{background:var(--l2)}}.l3{{background:var(--l3)}}
.l4{{background:var(--l4)}}.given{{color:var(--soft)}}.ctl{{color:#b3501e;font-size:.85em;unicode-bidi:isolate}}
.call{{border-left:3px solid var(--line);padding-left:.75rem}}mark{{background:#ffd75e;color:#1d2127}}
.tokens mark{{outline:2px solid #b3501e}}td,th{{text-align:right;padding:.15rem .75rem .15rem 0;font-weight:400}}
th{{color:var(--soft)}}td:nth-child(2){{text-align:left;font-family:ui-monospace,monospace}}</style></head><body>
<h1>{title}</h1>{found}
<p class="soft">Exported by treadle view. Tokens are coloured by the sampler's logprob: the darker, the
less likely; grey ones were not sampled.</p>
{body}</body></html>
"""


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
"""Control characters, marks that turn the reading direction, and halves of surrogate pairs: as in the viewer."""


def export_jsonl(pages: RunPages, ids: Sequence[int], found: RunFinding | None = None) -> str:
    """One line for each trajectory, as `treadle show --json` writes it; with the finding it is exported for."""
    lines = [to_json(item) for item in RunRecords(pages.run_dir).of_ids(ids)]
    if found is not None:
        lines = [json.dumps({**json.loads(line), "finding": asdict(found)}) for line in lines]
    return "".join(f"{line}\n" for line in lines)


def export_page(trajectories: TrajectoryPages, ids: Sequence[int], found: RunFinding | None = None) -> str:
    """One page for all of them; what a finding is about is told at the top and marked in its trajectory."""
    shown = [trajectories.trajectory(id) for id in ids]
    title = visible(f"{shown[0]['uid']}, {len(shown)} samples" if len(shown) > 1 else _name(shown[0]))
    body = "\n".join("\n".join(_section(trajectories, item, found)) for item in shown)
    told = "" if found is None else f"<p><b>{visible(found.kind)}</b>: {visible(found.detail)}</p>"
    return _PAGE.format(title=title, body=body, found=told)


def visible(text: str) -> str:
    """Text as HTML that shows every letter of it, also those that a browser would act on."""
    return _CONTROL.sub(_write_out, escape(text))


def _write_out(found: "re.Match[str]") -> str:
    code = ord(found[0])
    return f"<span class='ctl'>{chr(0x2400 + code) if code < 32 else f'U+{code:04X}'}</span>"


def _name(item: Json) -> str:
    return f"{item['uid']}/{item['sample']}"


def _section(trajectories: TrajectoryPages, item: Json, found: RunFinding | None) -> Iterator[str]:
    reward = "no reward" if item["reward"] is None else f"reward {item['reward']:g}"
    parts = ", ".join(f"{name} {value}" for name, value in item["parts"].items())
    facts = [reward, parts, f"{item['status']} ({item['reason']})", f"{item['tokens']:,} sampled tokens"]
    facts += [f"step {item['step']}"] if item["step"] is not None else []
    facts += ["undone, or replaced by a later attempt"] if item["replaced"] else []
    yield f"<h2>{visible(_name(item))}</h2><p class='soft'>{visible(' · '.join(fact for fact in facts if fact))}</p>"
    if item["detail"]:
        yield f"<pre>{visible(item['detail'])}</pre>"
    span = found if found is not None and found.id == item["id"] else None
    for at, message in enumerate(item["messages"]):
        yield f"<div class='role'>{visible(message['role'])} {visible(message['name'])}</div>"
        yield from _fields(trajectories, item, at, span if span is not None and span.message == at else None)
    if item["task"] and item["task"].get("ground_truth") is not None:
        yield f"<div class='role'>ground truth</div><pre dir='auto'>{_truth(item)}</pre>"
    rows = _positions(item, span) if item["has_body"] else []
    for row in rows:
        yield f"<div class='role'>tokens of row {row}</div>"
        yield from _row(trajectories, item["id"], row, span if span is not None and span.row == row else None)
    if rows and item["rows"] > len(rows):
        yield f"<p class='soft'>… {item['rows'] - len(rows):,} more rows</p>"


def _positions(item: Json, span: RunFinding | None) -> list[int]:
    """The first rows, and the one that has the span."""
    first = [row["position"] for row in item["rows_shown"][:MAX_ROWS]]
    if span is None or span.row is None or span.row in first:
        return first
    return [*first[: MAX_ROWS - 1], span.row]


def _truth(item: Json) -> str:
    return visible(content_text(item["task"]["ground_truth"]))


def _fields(trajectories: TrajectoryPages, item: Json, at: int, span: RunFinding | None) -> Iterator[str]:
    """The texts of a message; the one that holds the span is whole."""
    message = item["messages"][at]
    cut = f"\n… {message['cut']:,} more letters" if message["cut"] else ""
    texts = [(REASONING, "", message["thinks"], ""), (CONTENT, "", message["text"], cut)]
    texts += [(f"call-{n}", call["name"], call["arguments"], "") for n, call in enumerate(message["calls"])]
    for name, label, text, more in texts:
        if span is not None and span.field == name and span.start is not None:
            whole = trajectories.message(item["id"], at, name)["text"]
            inner = "".join(
                (visible(whole[: span.start]), "<mark>", visible(whole[span.start : span.end]), "</mark>")
            ) + visible(whole[span.end :])
            more = ""
        else:
            inner = visible(text)
        shown = f"<b>{visible(label)}</b> " if label else ""
        if inner or name == CONTENT:
            kind = " class='call'" if name.startswith("call-") else " class='soft'" if name == REASONING else ""
            yield f"<pre dir='auto'{kind}>{shown}{inner}{visible(more)}</pre>"


def _row(trajectories: TrajectoryPages, id: int, row: int, span: RunFinding | None) -> Iterator[str]:
    """The tokens of a row, from shortly before a span on; what is left out is said before and behind them."""
    first, last = (span.start or 0, span.end or 0) if span is not None else (0, 0)
    begin = at = max(0, first - BEFORE)
    total, marked = at + 1, list[_Marked]()
    yield "<pre class='tokens'>" + (f"{_left_out(begin, 'before these')}\n" if begin else "")
    while at < min(total, begin + MAX_TOKENS):
        window = trajectories.tokens(id, row, at, begin + MAX_TOKENS - at)
        total = window["total"]
        for number in range(len(window["ids"])):
            token = f'<span class="{_colour(window["mask"][number], window["logprobs"][number])}">'
            token += f"{visible(_text(window, number))}</span>"
            if first <= at + number < last:
                marked.append(_marked(window, number))
                token = f'<mark title="{marked[-1].told()}">{token}</mark>'
            yield token
        at += len(window["ids"])
    marks = f", {last - at:,} of them to be marked" if last > at else ""
    yield (f"\n{_left_out(total - at, f'after these{marks}')}" if total > at else "") + "</pre>"
    if any(token.trainer is not None for token in marked):
        yield from _sides(marked)


def _left_out(count: int, where: str) -> str:
    """A line of its own for tokens that the file does not hold; nothing where there are none."""
    return f"<span class='soft'>… {count:,} {'token' if count == 1 else 'tokens'} {where}</span>" if count > 0 else ""


@dataclass(frozen=True, slots=True)
class _Marked:
    """A token of a span: the sampler's and the trainer's side of it."""

    position: int
    text: str
    sampler: float | None
    trainer: float | None

    def figures(self) -> tuple[str, str, str]:
        gap = None if self.sampler is None or self.trainer is None else self.trainer - self.sampler
        shown = ["–" if value is None else f"{value:.5f}" for value in (self.sampler, self.trainer, gap)]
        return shown[0], shown[1], shown[2]

    def told(self) -> str:
        sampler, trainer, gap = self.figures()
        return f"token {self.position}: sampler {sampler}, trainer {trainer}, gap {gap}"


def _marked(window: Json, at: int) -> _Marked:
    """As the viewer has it: the gap is against the policy at the start of the step where that is recorded."""
    trainer = window["old"] or window["trainer"]
    return _Marked(
        window["start"] + at, _text(window, at), window["logprobs"][at], None if trainer is None else trainer[at]
    )


def _sides(marked: Sequence[_Marked]) -> Iterator[str]:
    """Sampler and trainer on the tokens of a span, the largest gap first."""
    known = [token for token in marked if token.sampler is not None and token.trainer is not None]
    known.sort(key=lambda token: -abs((token.trainer or 0.0) - (token.sampler or 0.0)))
    yield "<table><tr><th>token</th><th>text</th><th>sampler logprob</th><th>trainer logprob</th><th>gap</th></tr>"
    for token in known[:COMPARED]:
        cells = "".join(f"<td>{figure}</td>" for figure in token.figures())
        yield f"<tr><td>{token.position}</td><td>{visible(token.text)}</td>{cells}</tr>"
    yield "</table>"
    if len(known) > COMPARED:
        yield f"<p class='soft'>… and {len(known) - COMPARED:,} more tokens with a smaller gap</p>"


def _text(window: Json, at: int) -> str:
    """A token as text; bytes of half a character, or the id where there is no tokenizer."""
    text = window["texts"][at] if window["texts"] else f"[{window['ids'][at]}]"
    return f"⟨{window['bytes'][at]}⟩" if text is None else str(text)


def _colour(sampled: int, logprob: float | None) -> str:
    if not sampled:
        return "given"
    return f"l{sum(logprob < limit for limit in _LIMITS)}" if logprob is not None else "l0"
