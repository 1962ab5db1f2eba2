"""Hostile output: no text makes a parser raise, take long, or give more than it may."""

import json
import pickle
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.rollout.parsers import MAX_CALLS, PARSERS, Parsed, parser

TAGS = [
    *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<function=", "</function>", "<parameter=", "</parameter>", ">", '<invoke name="', "</invoke>", '">', "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", "<|message|>", "<|call|>", "to=f "),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|channel|>", "<|action_end|>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "function", "\n```json\n", "```", "[CALL_ID]"),
    *(
        '{"name": "f"',
        ', "arguments": ',
        '{"a": 1}',
        "}",
        "{",
        "[",
        "]",
        '"',
        "\\",
        "\\ud800",
        "\ufffd",
        "NaN",
        "1e999",
    ),
]

hostile = st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=8)), max_size=30).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(parsed: Parsed) -> None:
    assert len(parsed.calls) <= MAX_CALLS + 1
    for call in parsed.calls:
        assert call.problem or call.name.strip()
        assert isinstance(call.arguments, dict)
        json.dumps(call.arguments, allow_nan=False)
    assert pickle.loads(pickle.dumps(parsed)) == parsed


@relaxed
@given(hostile)
def test_no_text_makes_any_parser_raise(text: str) -> None:
    for name in PARSERS:
        parsed = parser(name).parse(text)
        check(parsed)
        if parser(name).marker not in text:
            assert parsed == Parsed(text, ())


@relaxed
@given(st.dictionaries(st.text(), values, max_size=4), st.text(alphabet="abc_", min_size=1), st.booleans())
def test_what_json_wrote_is_read_back(arguments: dict[str, object], name: str, ascii_only: bool) -> None:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    (call,) = parser("hermes").parse(f"<tool_call>{written}</tool_call>").calls
    assert (call.name, call.arguments, call.problem) == (name, arguments, None)


@relaxed
@given(st.data())
def test_a_mutated_call_never_raises(data: st.DataObject) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "</tool_call>"}]}}\n</tool_call>'
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    check(parser("hermes").parse(text[:start] + data.draw(hostile) + text[end:]))


PIECES = [
    *TAGS,
    '<tool_call>{"name": "f", "arguments": {"a": "',
    "<function=f><parameter=a>",
    "<tool_call>f<arg_key>",
    " ",
]
ALL_STARTS = "".join(parser(name).marker for name in PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_a_flood_of_one_tag_takes_no_time(name: str) -> None:
    for piece in PIECES:
        flood = piece * (200_000 // len(piece))
        started = time.process_time()
        check(parser(name).parse(flood))
        check(parser(name).parse(ALL_STARTS + flood))
        assert time.process_time() - started < 0.5, piece
