"""Hostile model outputs through what serves and shows them: streams, dialects, graders of programs, pages."""

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

from treadle.cli.main import main
from treadle.data.chat_template import THINK, ReasoningTags
from treadle.errors import RunError
from treadle.gateway import anthropic_messages, openai_chat, openai_responses
from treadle.gateway.counters import GatewayCounters
from treadle.gateway.event_stream import write_whole
from treadle.gateway.request import ChatCall, ReplySet, RequestError, TurnReply
from treadle.gateway.responses import encode_events
from treadle.gateway.turn_reader import PartialTurn, split_reasoning
from treadle.reward.builtin import code_tests
from treadle.rollout.parsers import parser
from treadle.sandbox.protocol import ExecResult
from treadle.view.server import Viewer

SCHEMA = {"type": "object", "properties": {}}
BODIES: Mapping[str, dict[str, Any]] = {
    "chat": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b"},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "c"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stop": ["e"],
        "max_tokens": 5,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "messages": {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "b"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "c"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
        "stop_sequences": ["e"],
        "stream": True,
    },
    "responses": {
        "model": "policy",
        "instructions": "a",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "c"},
        ],
        "tools": [
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
        ],
        "max_output_tokens": 5,
        "stream": True,
    },
}
"""A request of each dialect with everything that is read."""

DIALECTS = (openai_chat, anthropic_messages, openai_responses)
_TAG = re.compile(r"<[a-zA-Z/!?]")
_OUR_TAGS = re.compile(
    r"</?(?:!doctype html|html|head|meta|title|style|body|h1|h2|p|b|pre|div|span|mark)(?: [^<>]*)?>", re.IGNORECASE
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def rng_of(text: str) -> Random:
    """The same choices for the same text."""
    return Random(crc32(text.encode("utf-8", "surrogatepass")))


def check_stream(text: str) -> None:
    """A turn in pieces of one to nine bytes: what is shown is the beginning of what the whole turn has."""
    rng, hermes = rng_of(text), parser("hermes")
    ids = text.encode("utf-8", "surrogatepass")[:20_000]
    whole, is_thinking, can_call = ids.decode("utf-8", "replace"), rng.random() < 0.3, rng.random() < 0.5
    starts = hermes.starts if can_call else None
    tags = rng.choice([THINK, ReasoningTags("[THINK]", "[/THINK]")])
    turn = PartialTurn(
        lambda some: bytes(some).decode("utf-8", "replace"),
        mark="m", created=0, prompt_tokens=1, stops=(), call_starts=starts, is_thinking=is_thinking, tags=tags,
    )  # fmt: skip
    at = 0
    while at < len(ids):
        size = rng.randint(1, 9)
        turn.feed(at, tuple(ids[at : at + size]))
        at += size
    parsed = hermes.parse(whole)
    content = parsed.content if can_call and not any(call.problem for call in parsed.calls) else whole
    reasoning, said = ("", content) if turn.is_plain else split_reasoning(content, tags, is_thinking)
    shown = {kind: "".join(piece for other, piece in turn.pieces if other == kind) for kind in ("reasoning", "text")}
    assert reasoning.startswith(shown["reasoning"]), "reasoning"
    assert said.startswith(shown["text"]), "text"
    assert not shown["text"] or reasoning == shown["reasoning"], "text before the end of the reasoning"


def check_dialects(text: str) -> None:
    """Written as an answer and as events, read again as the next request, and put into every place of a request."""
    rng = rng_of(text)
    parsed = parser("hermes").parse(text)
    reasoning, said = split_reasoning(parsed.content, THINK)
    calls = [ChatCall(call.name, call.arguments, f"call_m{at}") for at, call in enumerate(parsed.calls)]
    reply = TurnReply("m", said, reasoning, (*calls, ChatCall(text[:80] or "f", {text[:80]: text}, "call_m")))
    answer = ReplySet((reply,), "policy")
    for dialect in DIALECTS:
        json.dumps(dialect.format_response(answer), ensure_ascii=False).encode("utf-8", "replace")
        for event in encode_events(write_whole(dialect.open_events(), answer)).split(b"\n\n")[:-1]:
            assert event.count(b"data: ") >= 1 and event.count(b"\n") <= 1, "an event of several lines"
        dialect.parse_request(_next_request(dialect, json.loads(json.dumps(dialect.format_response(answer)))))
        body = json.loads(json.dumps(BODIES[dialect.NAME]))
        _put(body, text, rng)
        refused: RequestError | None = None
        try:
            request = dialect.parse_request(body)
        except RequestError as error:
            refused = error
        else:
            request.repeat_key(request.keys(), request.root_key())
        for error in (refused, RequestError(text, option=text)):
            if error is not None:
                json.dumps(dialect.format_error(error), ensure_ascii=False).encode("utf-8", "replace")
                encode_events(dialect.format_error_events(error))
                _count(error, text)


def _next_request(dialect: Any, response: dict[str, Any]) -> dict[str, Any]:
    """The response, as an agent of its dialect sends it back."""
    if dialect is openai_chat:
        return {"messages": [{"role": "user", "content": "b"}, response["choices"][0]["message"]]}
    if dialect is openai_responses:
        return {"input": [{"role": "user", "content": "b"}, *response["output"]]}
    turns = [{"role": "user", "content": "b"}, {"role": "assistant", "content": response["content"]}]
    return {"max_tokens": 5, "messages": turns}


def _put(body: Any, text: str, rng: Random) -> None:
    """Replace one value, at any depth, by the text or by a value of another type."""
    node = body
    while True:
        places = list(node) if isinstance(node, dict) else range(len(node))
        place = rng.choice([*places]) if places else None
        if place is None:
            return
        if not isinstance(node[place], dict | list) or not node[place] or rng.random() < 0.3:
            others = [
                text,
                text,
                text,
                None,
                [],
                {},
                [text],
                {"type": text},
                {text[:40]: text},
                -1,
                1e308,
                True,
                [[[[]]]],
            ]
            node[place] = rng.choice(others)
            return
        node = node[place]


def _count(error: RequestError, text: str) -> None:
    counters = GatewayCounters()
    counters.add_refused(error.option)
    counters.add_notes([text] * 40)
    counters.requests[text[:40]] += 1
    assert len(counters.as_extra()["notes"]) <= 16
    json.dumps(counters.as_extra())


def check_code_tests(text: str) -> None:
    """What a program printed, compared with what is expected; and the program in a response."""
    assert isinstance(code_tests.read_program(text), str)
    printed = ExecResult(0, text.encode("utf-8", "replace"))
    for name in (None, "f"):
        program = code_tests.Program("", code_tests.LANGUAGES["python"], name, 1.0, code_tests.TOLERANCE)
        for expected in (42, "42", [1, 2], {"a": [1.5, None]}, [["x"]], text[:200]):
            assert program._is_expected(printed, expected) in (True, False)
    for depth in (1, len(text)):
        wrapped = ExecResult(0, ("[" * depth + text).encode("utf-8", "replace"))
        assert not program._is_expected(wrapped, 42)


def make_pages_check(at_once: int = 40) -> Callable[[str], None]:
    """Texts share a run; where one breaks its pages, each is tried alone."""
    texts: list[str] = []

    def check(text: str) -> None:
        texts.append(text)
        if len(texts) < at_once:
            return
        together = [*texts]
        texts.clear()
        try:
            check_pages(*together)
        except Exception:
            for alone in together:
                check_pages(alone)
            raise

    return check


def check_pages(*texts: str) -> None:
    """Every page of the viewer, its exports, and `treadle show`, of a run whose texts these are."""
    from tests.view_runs import made, write_run

    with TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        items = []
        for at, text in enumerate(texts):
            rng = rng_of(text)
            said = (
                {"role": "user", "content": text},
                {"role": "assistant", "content": text, "reasoning_content": text},
            )
            score = {"parts": {text[:40]: 1.0}}
            item = made(f"{at} {text[:60]}", 0, 1.0, **score, ids=tuple(rng.randrange(400) for _ in range(9)))
            items.append(_replace(item, messages=said, data_source=text[:200], extra={text[:40]: text}))
        write_run(run_dir, *items)
        viewer = Viewer({"run": run_dir})
        try:
            _check_viewer(viewer, texts)
        finally:
            viewer.close()
        _check_show(run_dir)


def _replace(item: Any, **fields: Any) -> Any:
    from dataclasses import replace

    return replace(item, **fields)


def _check_viewer(viewer: Viewer, texts: tuple[str, ...]) -> None:
    first = 8  # those before are of every run that `write_run` writes
    for path in ("runs", "overview", "ends", "steps", "groups", "config", "waits", "metrics", "findings"):
        _check_answer(viewer.answer(f"api/{path}", {"run": "run"}).body, path)
    for at, text in enumerate(texts):
        id, rng = str(first + at), rng_of(text)
        path = rng.choice(("trajectory", "tokens", "row_text", "strip"))
        with suppress(RunError):  # this run has no tokenizer where there is none to be had
            _check_answer(viewer.answer(f"api/{path}", {"run": "run", "id": id}).body, path)
        with suppress(RunError):
            given = {"run": "run", rng.choice(("text", "uid", "part")): text[:200]}
            _check_answer(viewer.answer("api/find", given).body, "find")
        page = viewer.answer("api/export", {"run": "run", "id": id}).body.decode()
        left = _TAG.search(_OUR_TAGS.sub("", page))
        assert left is None, f"markup in an export: {page[left.start() : left.start() + 60]!r}" if left else ""
        assert not _CONTROL.search(page), "a control character in an export"
        if not at % 8:
            for line in viewer.answer("api/export", {"run": "run", "id": id, "form": "jsonl"}).body.splitlines():
                json.loads(line)


def _check_answer(body: bytes, path: str) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{path} has the number {constant}")

    json.loads(body, parse_constant=refuse)


def _check_show(run_dir: Path) -> None:
    for words in ([], ["--findings"], ["--json"], ["--worst", "--limit", "1000"]):
        shown = io.StringIO()
        with redirect_stdout(shown), redirect_stderr(shown), suppress(SystemExit):
            main(["show", str(run_dir), "3", *words] if "--findings" not in words else ["show", str(run_dir), *words])
        found = shown.getvalue()
        found.encode()
        assert "Traceback" not in found
        assert not [letter for letter in found if letter not in "\n\t" and ord(letter) < 0x20]
        if words == ["--json"]:
            assert all(math.isfinite(json.loads(line)["reward"]) for line in found.splitlines())
