"""Tool-call formats: each one read from the text its model writes, and what is refused.

Hostile output: no text makes a parser raise, take long, or give more than it may.
"""

import json
import pickle
import sys
import time
import types
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.config.rollout import TOOL_FORMATS
from treadle.errors import ConfigError
from treadle.rollout.parsers import MAX_CALL_CHARS, MAX_CALLS, PARSERS, Parsed, Untyped, parser
from treadle.types import ToolCall

HERMES = parser("hermes")

ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
    "jamba": '<tool_calls>[{"name": "add", "arguments": {"a": 1, "b": "x"}}]</tool_calls>',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
    "internlm": '<|action_start|><|plugin|>\n{"name": "add", "parameters": {"a": 1, "b": "x"}}<|action_end|>',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "b": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>x</parameter>\n"
    "</function>\n</seed:tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    "gpt-oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|>',
}

CLOSING = {
    "hermes": "</tool_call>",
    "jamba": "</tool_calls>",
    "granite": "}]",
    "internlm": "<|action_end|>",
    "mistral": "}",
    "kimi": "<|tool_call_end|>",
    "deepseek_v3": "<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁end｜>",
    "deepseek_v32": "</｜DSML｜invoke>",
    "minimax": "</invoke>",
    "qwen3_coder": "</function>",
    "seed_oss": "</function>",
    "glm": "</tool_call>",
    "llama3_json": "}}",
    "gpt-oss": "}",
}


def plain(arguments: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in arguments.items()}


def problem_of(text: str, name: str = "hermes") -> str:
    (call,) = parser(name).parse(text).calls
    assert call.problem is not None
    return call.problem


def test_every_format_is_covered_here() -> None:
    assert ONE_CALL.keys() == CLOSING.keys() == PARSERS.keys()
    assert tuple(PARSERS) == TOOL_FORMATS


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_is_read_and_leaves_no_content(name: str) -> None:
    parsed = parser(name).parse(ONE_CALL[name])
    (call,) = parsed.calls
    assert (call.name, plain(call.arguments), call.problem) == ("add", {"a": "1", "b": "x"}, None)
    assert parsed.content == ""


@pytest.mark.parametrize("name", PARSERS)
def test_text_without_a_call_comes_back_as_it_was(name: str) -> None:
    text = "  The answer is {42}.\n"
    assert parser(name).parse(text) == Parsed(text, ())


@pytest.mark.parametrize("name", PARSERS)
def test_the_marker_is_in_every_turn_with_a_call(name: str) -> None:
    assert parser(name).marker in ONE_CALL[name]


@pytest.mark.parametrize("name", sorted(PARSERS.keys() - {"llama3_json", "gpt-oss"}))
def test_text_around_calls_is_content_and_calls_keep_their_order(name: str) -> None:
    second = ONE_CALL[name].replace("add", "sub")
    between = "" if name in ("mistral", "granite") else "then "
    parsed = parser(name).parse(f"First {ONE_CALL[name]}{between}{second}")
    assert [call.name for call in parsed.calls] == ["add", "sub"]
    assert parsed.content.split() == ["First", *between.split()]


@pytest.mark.parametrize(("name", "closing"), CLOSING.items())
def test_a_call_cut_off_before_its_end_is_never_made(name: str, closing: str) -> None:
    text = ONE_CALL[name]
    for end in range(text.index(closing) + len(closing)):
        assert all(call.problem for call in parser(name).parse(text[:end]).calls)


def test_a_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    (call,) = HERMES.parse('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>').calls
    assert call == ToolCall("f", {"x": "</tool_call>"})


def test_a_call_that_is_only_thought_about_is_not_made() -> None:
    thought = '<think>maybe <tool_call>{"name": "f"}</tool_call></think>'
    assert HERMES.parse(f"{thought}No.") == Parsed(f"{thought}No.", ())
    parsed = HERMES.parse(f'{thought}<tool_call>{{"name": "g"}}</tool_call>')
    assert [call.name for call in parsed.calls] == ["g"]
    assert parsed.content == thought


def test_arguments_may_be_an_object_a_json_string_or_missing() -> None:
    for written in ('{"a": 1}', '"{\\"a\\": 1}"'):
        (call,) = HERMES.parse(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>').calls
        assert call == ToolCall("f", {"a": 1})
    for written in ('{"name": "f"}', '{"name": "f", "arguments": null}'):
        assert HERMES.parse(f"<tool_call>{written}</tool_call>").calls == (ToolCall("f", {}),)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ('{"name": 7, "arguments": {}}', "name its tool"),
        ('{"arguments": {}}', "name its tool"),
        ('{"name": " ", "arguments": {}}', "name its tool"),
        (f'{{"name": "{"n" * 200}"}}', "over 128 characters"),
        ('{"name": "f", "arguments": [1]}', "must be an object"),
        ('{"name": "f", "arguments": "[1]"}', "must be an object"),
        ('{"name": "f", "arguments": "{"}', "the arguments are not JSON"),
        ('{"name": "f", "arguments": "{} x"}', "more text after"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "-Infinity is not JSON"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "too large"),
        (f'{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}', "not JSON"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "'a' is given more than once"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        (f'{{"name": "f", "arguments": {{"a": {"[" * 70 + "]" * 70}}}}}', "nested"),
        (f'{{"name": "f", "arguments": {{"a": {"[" * 100_000}}}}}', "nested"),
        ('"add"', "must be an object"),
        ('{"name": "f", }', "not JSON"),
        ('{"name": "f"}}', "expected </tool_call>"),
    ],
)
def test_a_malformed_call_is_a_problem_the_model_can_read(payload: str, words: str) -> None:
    assert words in problem_of(f"<tool_call>{payload}</tool_call>")


def test_an_unclosed_call_is_a_problem() -> None:
    assert "not closed with </tool_call>" in problem_of('<tool_call>{"name": "f", "arguments": {}}')


def test_a_call_over_the_size_limit_is_a_problem() -> None:
    long = "x" * (MAX_CALL_CHARS + 1)
    assert f"over {MAX_CALL_CHARS}" in problem_of(
        f'<tool_call>{{"name": "f", "arguments": {{"a": "{long}"}}}}</tool_call>'
    )
    assert "not closed" in problem_of(f"<function=f><parameter=a>{long}</parameter></function>", "qwen3_coder")
    assert f"over {MAX_CALL_CHARS}" in problem_of(
        f'<|channel|>commentary to=functions.f<|message|>{{"a": "{long}"}}<|call|>', "gpt-oss"
    )


def test_a_call_just_under_the_size_limit_is_read() -> None:
    (call,) = HERMES.parse(f'<tool_call>{{"name": "f", "arguments": {{"a": "{"x" * 260_000}"}}}}</tool_call>').calls
    assert call.problem is None


def test_too_many_calls_are_one_problem() -> None:
    calls = HERMES.parse('<tool_call>{"name": "f"}</tool_call>' * 10_000).calls
    assert [call.problem for call in calls[:MAX_CALLS]] == [None] * MAX_CALLS
    assert len(calls) == MAX_CALLS + 1
    assert "more than 64 calls" in (calls[-1].problem or "")
    listed = parser("jamba").parse(f"<tool_calls>[{','.join(['{}'] * 10_000)}]</tool_calls>").calls
    assert len(listed) == MAX_CALLS + 1


def test_a_malformed_call_leaves_the_next_one_alone() -> None:
    parsed = HERMES.parse('<tool_call>{oops</tool_call>so <tool_call>{"name": "f"}</tool_call>!')
    assert [call.problem is None for call in parsed.calls] == [False, True]
    assert parsed.content == "so !"
    unclosed = HERMES.parse('<tool_call>{"name": "f" <tool_call>{"name": "g"}</tool_call>')
    assert [call.name for call in unclosed.calls] == ["", "g"]


def test_one_malformed_call_of_a_list_leaves_the_others_alone() -> None:
    calls = parser("jamba").parse('<tool_calls>[{"name": "f"}, 7, {"name": "g"}]</tool_calls>').calls
    assert [call.problem is None for call in calls] == [True, False, True]


def test_raw_line_breaks_in_strings_are_read() -> None:
    (call,) = HERMES.parse('<tool_call>{"name": "f", "arguments": {"code": "a\nb"}}</tool_call>').calls
    assert call.arguments == {"code": "a\nb"}


def test_text_arguments_leave_their_type_to_the_schema() -> None:
    text = "<function=f><parameter=a>\n\n 1\n</parameter></function>"
    (call,) = parser("qwen3_coder").parse(text).calls
    assert call.arguments == {"a": "\n 1"}
    assert type(call.arguments["a"]) is Untyped


def test_a_format_that_marks_strings_keeps_them_typed() -> None:
    (call,) = parser("deepseek_v32").parse(ONE_CALL["deepseek_v32"]).calls
    assert [type(value) for value in call.arguments.values()] == [Untyped, str]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "more than once"),
        ("<function=f><parameter=a>1</parameter>junk</function>", "expected </function>"),
        ("<function=f><parameter=a>1", "parameter 'a' is not closed"),
        ("<function=></function>", "name its tool"),
        ("<function=f", "not closed with >"),
    ],
)
def test_malformed_text_arguments_are_a_problem(text: str, words: str) -> None:
    assert words in problem_of(text, "qwen3_coder")


def test_glm_reads_a_call_without_arguments_or_line_breaks() -> None:
    assert parser("glm").parse("<tool_call>now</tool_call>").calls == (ToolCall("now", {}),)
    (call,) = parser("glm").parse("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>").calls
    assert call == ToolCall("f", {"a": "1"})
    assert "expected <arg_value>" in problem_of("<tool_call>f<arg_key>a</arg_key>1</tool_call>", "glm")


def test_mistral_reads_lists_and_call_ids() -> None:
    older = parser("mistral").parse('Sure. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc"}]')
    assert older == Parsed("Sure.", (ToolCall("f", {"a": 1}, "abc"),))
    newer = parser("mistral").parse("[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}")
    assert newer.calls == (ToolCall("f", {}, "abc"),)


def test_kimi_keeps_the_call_id() -> None:
    (call,) = parser("kimi").parse(ONE_CALL["kimi"]).calls
    assert call.id == "functions.add:0"


def test_llama_reads_several_calls_and_the_tag() -> None:
    llama = parser("llama3_json")
    parsed = llama.parse('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}')
    assert parsed.calls == (ToolCall("f", {}), ToolCall("g", {"a": 1}))
    assert parsed.content == ""


def test_llama_takes_json_without_a_name_for_speech() -> None:
    for text in ('{"city": "Oslo"}', '{"city": "Oslo", "person": {"name": "Kari"}}', "{not json", 'so {"name": "f"}'):
        assert parser("llama3_json").parse(text) == Parsed(text, ())
    assert "not JSON" in problem_of('{"name": "f", "parameters": {', "llama3_json")


def test_harmony_tells_what_is_said_from_what_is_thought() -> None:
    text = (
        "<|channel|>analysis<|message|>to add, call add<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Adding.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": 1}<|call|>'
    )
    assert parser("gpt-oss").parse(text) == Parsed("Adding.", (ToolCall("add", {"a": 1}),), "to add, call add")
    final = "<|channel|>analysis<|message|>easy<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>"
    assert parser("gpt-oss").parse(final) == Parsed("3", (), "easy")


def test_an_unknown_format_names_the_key_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.multi_turn\.format: .*'herms'(.|\n)*did you mean 'hermes'"):
        parser("herms")


class Shouting:
    marker = "CALL"

    def parse(self, text: str) -> Parsed:
        if "boom" in text:
            raise KeyError("boom")
        return Parsed("", (ToolCall("f", {}),))


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("custom_formats")
    module.Shouting = Shouting  # type: ignore[attr-defined]
    module.function = lambda text: Parsed(text, ())  # type: ignore[attr-defined]
    module.number = 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "custom_formats", module)


@pytest.mark.usefixtures("custom")
def test_a_custom_format_comes_by_import_path_and_cannot_raise() -> None:
    shouting = parser("custom_formats:Shouting")
    assert shouting.marker == "CALL"
    assert shouting.parse("CALL f").calls == (ToolCall("f", {}),)
    (call,) = shouting.parse("boom").calls
    assert call.problem is not None and "KeyError: 'boom'" in call.problem
    assert parser("custom_formats:function").parse("hello") == Parsed("hello", ())


@pytest.mark.usefixtures("custom")
@pytest.mark.parametrize("path", ["custom_formats:number", "custom_formats:Shoutin", "no_such_module:x", ":x"])
def test_a_bad_import_path_names_key_and_value(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser(path)
    (mistake,) = caught.value.mistakes
    assert mistake.key == "rollout.multi_turn.format"
    assert mistake.value in (path, path.partition(":")[0])  # of a module that is missing, its name


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
