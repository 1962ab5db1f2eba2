"""Three dialects, one request: what real programs send is read, what cannot be kept is refused by its name."""

import asyncio
import json
from typing import Any

import pytest

from tests.gateways import DIALECTS, TOOLS, agent
from tests.rollouts import rollout
from treadle.gateway import openai_responses, request_body
from treadle.gateway.counters import MAX_OPTIONS, OTHERS, GatewayCounters
from treadle.gateway.event_stream import write_whole
from treadle.gateway.options import CONSTRAINING
from treadle.gateway.placement import fold
from treadle.gateway.request import (
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    MAX_MODEL_CHARS,
    ChatCall,
    ChatMessage,
    Choice,
    ContextExhausted,
    Finish,
    Overloaded,
    ReplySet,
    RequestError,
    TurnReply,
    TurnRequest,
)
from treadle.gateway.request_body import KnownTools, TooManyValues

USER = {"role": "user", "content": "Hi."}
TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {}}}}

BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Add."}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
        "max_completion_tokens": 9,
        "stop": "END",
        "temperature": 0.2,
        "stream": True,
    },
    "messages": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=ab12"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": "Add."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "sig"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}],
            },
        ],
        "tools": [
            {"name": "add", "description": "Add.", "input_schema": TOOL["parameters"]},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "tool_choice": {"type": "any"},
        "max_tokens": 9,
        "stop_sequences": ["END"],
        "temperature": 0.2,
        "stream": True,
        "metadata": {"user_id": "x"},
        "context_management": {"edits": []},
    },
    "responses": {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [
            {"type": "namespace", "name": "math", "tools": [{"type": "function", **TOOL}]},
            {"type": "web_search"},
            {"type": "custom", "name": "apply_patch"},
        ],
        "tool_choice": "required",
        "max_output_tokens": 9,
        "temperature": 0.2,
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
    },
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_conversation_is_the_same_request(dialect: str) -> None:
    request = DIALECTS[dialect].parse_request({"model": "policy", **BODIES[dialect]})
    given = [(message.role, message.text, message.reasoning, message.call_id) for message in request.messages]
    assert given == [
        ("system", "Be brief.", "", ""),
        ("user", "Add.", "", ""),
        ("assistant", "", "Hm.", ""),
        ("tool", "2", "", "c1"),
    ]
    assert request.messages[2].calls == (ChatCall("add", {"a": 1}, "c1"),)
    assert request.tools == ({"type": "function", "function": TOOL},)
    assert (request.choice, request.max_tokens, request.stream) == (Choice.REQUIRED, 9, True)
    counted = ("temperature", "context_management") if dialect == "messages" else ("temperature",)
    assert request.ignored == counted and "c1" in request.messages[2].marks
    assert request.asked["temperature"] == 0.2 and 9 in request.asked.values() and "metadata" not in request.asked
    assert request.stop == (() if dialect == "responses" else ("END",))
    keys = [message.key() for message in request.messages]
    assert keys == [m.key() for m in DIALECTS["chat"].parse_request({"model": "", **BODIES["chat"]}).messages]


@pytest.mark.parametrize("stops", [["x"] * 33, ["x" * 257]])
def test_stop_strings_are_bounded(stops: list[str]) -> None:
    for dialect, name in (("chat", "stop"), ("messages", "stop_sequences")):
        with pytest.raises(RequestError, match="at most 32 texts of at most 256 characters") as refused:
            DIALECTS[dialect].parse_request({"model": "policy", **BODIES[dialect], name: stops})
        assert refused.value.option == name


def long_conversation(dialect: str, count: int) -> dict[str, Any]:
    message = {"role": "user", "content": "x"}
    return {"model": "policy", "input" if dialect == "responses" else "messages": [message] * count}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_messages_of_a_request_are_bounded(dialect: str) -> None:
    parse = DIALECTS[dialect].parse_request
    assert len(parse(long_conversation(dialect, MAX_MESSAGES)).messages) == MAX_MESSAGES
    with pytest.raises(RequestError, match=f"holds {MAX_MESSAGES + 1} messages; at most {MAX_MESSAGES}"):
        parse(long_conversation(dialect, MAX_MESSAGES + 1))


def test_a_message_of_no_blocks_is_no_conversation() -> None:
    with pytest.raises(RequestError, match="messages must hold at least one message"):
        DIALECTS["messages"].parse_request({"messages": [{"role": "user", "content": []}]})


def test_items_of_one_turn_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    join = openai_responses._join
    monkeypatch.setattr(openai_responses, "_join", lambda parts: joined.append(len(parts)) or join(parts))
    items = [{"type": "message", "role": "assistant", "content": f"{at}"} for at in range(3000)]
    (message,) = DIALECTS["responses"].parse_request({"input": items}).messages
    assert message.text.split("\n") == [f"{at}" for at in range(3000)] and joined == [3000]


def test_a_tool_of_the_provider_is_left_out_and_noted() -> None:
    notes = DIALECTS["responses"].parse_request(BODIES["responses"]).notes
    assert notes == (
        "the tools of the namespace math are shown one by one",
        "the tool web_search is run by its provider, and was left out",
        "the tool apply_patch of type custom is not called with JSON, and was left out",
    )
    assert "web_search_20250305" in DIALECTS["messages"].parse_request(BODIES["messages"]).notes[0]


def test_tools_of_a_namespace_are_shown_by_their_names_and_called_by_both() -> None:
    tools = [
        {"type": "function", **TOOL},
        {"type": "namespace", "name": "far", "tools": [{"type": "function", **TOOL}]},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", **TOOL, "name": "spawn"}]},
    ]
    request = DIALECTS["responses"].parse_request({"input": "Hi.", "tools": tools})
    assert [tool["function"]["name"] for tool in request.tools] == ["add", "far__add", "spawn"]
    calls = tuple(ChatCall(name, {}, f"call_{name}") for name in ("add", "far__add", "spawn"))
    answer = ReplySet((TurnReply("ab12", "", calls=calls),), "policy", namespaces=request.namespaces)
    sent = DIALECTS["responses"].format_response(answer)["output"]
    assert [(item.get("namespace"), item["name"]) for item in sent] == [
        (None, "add"),
        ("far", "add"),
        ("agents", "spawn"),
    ]
    (echo,) = DIALECTS["responses"].parse_request({"input": sent, "tools": tools}).messages
    assert [call.name for call in echo.calls] == ["add", "far__add", "spawn"]


LONG_TOOLS = [
    {"type": "function", "function": {**TOOL, "name": f"f{at}", "description": "wörds " * 50}} for at in range(9)
]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", "\t: ")])
def test_tools_that_came_before_are_not_read_again_and_every_body_means_what_json_says(
    separators: tuple[str, str], ascii_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(value: Any) -> bytes:
        return json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode()

    known, read = KnownTools(), list[int]()
    whole = request_body._read_json
    monkeypatch.setattr(request_body, "_read_json", lambda body: read.append(len(body)) or whole(body))
    first = known.read(write({"tools": LONG_TOOLS, "messages": [USER]}))
    assert first["tools"] == LONG_TOOLS
    read.clear()
    for other in ({"messages": [USER, USER], "tools": LONG_TOOLS, "n": 2}, {"tools": LONG_TOOLS}):
        found = known.read(write(other))
        assert found == other and found["tools"] is first["tools"]
    assert len(read) == 2 and max(read) < 300, "of two bodies, what is new"
    changed = [*LONG_TOOLS[:-1], {"type": "function", "function": TOOL}]
    text = write(LONG_TOOLS)
    quoted = {"messages": [{"role": "user", "content": f'"tools": {text.decode()}'}], "tools": changed}
    for other in ({"metadata": {"tools": LONG_TOOLS}}, {"tools": changed}, {"tools": [LONG_TOOLS]}, quoted):
        assert known.read(write(other)) == other
        assert known.read(write({**other, "tools": LONG_TOOLS})) == {**other, "tools": LONG_TOOLS}
    twice = b'{"tools": %b, "tools": %b}'
    assert known.read(twice % (text, b"[]")) == {"tools": []} and known.read(twice % (b"[]", text)) == {
        "tools": LONG_TOOLS
    }
    one, true = (write([*LONG_TOOLS, {"strict": value}]) for value in (1, True))
    assert known.read(twice % (one, true))["tools"][-1]["strict"] is True
    assert known.read(b'{"tools": %b}' % one)["tools"][-1]["strict"] is not True, "though they are equal in Python"
    for broken in (b'{"tools": %b', b'{"tools": %b]}', b'{"tools": %b "x"}', b'{"a": "tools": %b}', b'["tools": %b]'):
        with pytest.raises(RequestError, match="the body is not JSON"):
            known.read(broken % text)


def test_a_deferred_tool_is_shown_where_a_search_has_found_it() -> None:
    tools = [{"name": "search", "input_schema": {}}, {"name": "add", "defer_loading": True, "input_schema": {"a": 1}}]
    found = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": "add"}]}
    body = {"messages": [USER, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": [found]}]}
    before = DIALECTS["messages"].parse_request({"messages": [USER], "tools": tools[:1]})
    after = DIALECTS["messages"].parse_request({**body, "tools": tools})
    assert after.tools == before.tools and after.root_key() == before.root_key()
    assert '"name": "add"' in after.messages[-1].text and '"a": 1' in after.messages[-1].text
    assert after.notes == ("deferred tools are shown once a search has found them",)


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("dialect", "change", "named"),
    [
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"logit_bias": {"1": 5}}, "logit_bias"),
        ("chat", {"logprobs": True}, "logprobs"),
        ("chat", {"n": 1000}, "n"),
        ("chat", {"tool_choice": "sometimes"}, "tool_choice"),
        ("chat", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ("messages", {"output_format": {"type": "json_schema"}}, "output_format"),
        ("messages", {"output_config": {"effort": "high", "format": {"type": "json_schema"}}}, "output_config.format"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("responses", {"input": [{"type": "computer_call"}]}, "input[0].type"),
        (
            "responses",
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]},
            "input[0]",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(dialect: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as refused:
        DIALECTS[dialect].parse_request({**BODIES[dialect], **change})
    assert refused.value.option.startswith(named)


ANTHROPIC_TOOL = {"name": "add", "input_schema": TOOL["parameters"]}
RESPONSES_TOOL = {"type": "function", **TOOL}
OFFERED: dict[str, Any] = {"chat": TOOLS, "messages": [ANTHROPIC_TOOL], "responses": [RESPONSES_TOOL]}


def choose(dialect: str, name: str) -> Any:
    """A `tool_choice` that names a tool; any of them without a name."""
    if dialect == "messages":
        return {"type": "tool", "name": name} if name else {"type": "any"}
    named = {"name": name} if dialect == "responses" else {"function": {"name": name}}
    return {"type": "function", **named} if name else "required"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_of_a_tool_that_is_not_offered_is_not_forced(dialect: str) -> None:
    def parse(**changes: Any) -> TurnRequest:
        return DIALECTS[dialect].parse_request({"model": "policy", **MINIMAL[dialect], **changes})

    for name in ("", "add"):
        assert parse(tools=OFFERED[dialect], tool_choice=choose(dialect, name)).forced_tool == name
        with pytest.raises(RequestError, match="offers no function") as refused:
            parse(tool_choice=choose(dialect, name))
        assert refused.value.option == "tool_choice"
    with pytest.raises(RequestError, match="'nope' is none of the functions of this request: add") as refused:
        parse(tools=OFFERED[dialect], tool_choice=choose(dialect, "nope"))
    assert refused.value.option == "tool_choice"


def test_a_deferred_tool_can_be_named_and_a_tool_without_a_name_cannot() -> None:
    tools = [ANTHROPIC_TOOL, {"name": "late", "defer_loading": True, "input_schema": {}}]
    body = {"messages": [USER], "tools": tools}
    named = DIALECTS["messages"].parse_request({**body, "tool_choice": {"type": "tool", "name": "late"}})
    assert named.forced_tool == "late"
    with pytest.raises(RequestError, match=r"tool_choice\.name"):
        DIALECTS["messages"].parse_request({**body, "tool_choice": {"type": "tool"}})


def with_ids(dialect: str, of_call: str, of_result: str) -> dict[str, Any]:
    """A conversation with a call and its result."""
    if dialect == "messages":
        use = {"type": "tool_use", "id": of_call, "name": "add", "input": {}}
        result = {"type": "tool_result", "tool_use_id": of_result, "content": "2"}
        return {"messages": [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}
    if dialect == "responses":
        call = {"type": "function_call", "call_id": of_call, "name": "add", "arguments": "{}"}
        return {"input": [USER, call, {"type": "function_call_output", "call_id": of_result, "output": "2"}]}
    calls = [{"id": of_call, "function": {"name": "add", "arguments": "{}"}}]
    result = {"role": "tool", "tool_call_id": of_result, "content": "2"}
    return {"messages": [USER, {"role": "assistant", "tool_calls": calls}, result]}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_names_and_ids_that_a_session_keeps_are_bounded(dialect: str) -> None:
    parse = DIALECTS[dialect].parse_request
    short, long = "c" * MAX_CALL_ID_CHARS, "c" * (MAX_CALL_ID_CHARS + 1)
    parse({"model": "m" * MAX_MODEL_CHARS, **with_ids(dialect, short, short)})
    for ids in ((long, short), (short, long)):
        with pytest.raises(RequestError, match=f"at most {MAX_CALL_ID_CHARS} characters"):
            parse({"model": "policy", **with_ids(dialect, *ids)})
    with pytest.raises(RequestError, match=f"model: .*{MAX_MODEL_CHARS + 1} characters; at most {MAX_MODEL_CHARS}"):
        parse({"model": "m" * (MAX_MODEL_CHARS + 1), **MINIMAL[dialect]})


def test_reasoning_that_no_row_could_hold_is_not_kept() -> None:
    async def main() -> None:
        async with agent(config=rollout(prompt_length=300, response_length=300)) as it:
            thought = {"role": "assistant", "reasoning_content": "Hm. " * 20_000, "content": "Well."}
            with pytest.raises(ContextExhausted):
                it.send({"model": "policy", "messages": [USER, thought, USER]})
            await it.chat(USER, {**thought, "reasoning_content": "Hm."}, USER)

    asyncio.run(main())


def test_a_body_that_is_too_large_is_said_in_the_words_of_the_messages_api() -> None:
    kind = DIALECTS["messages"].format_error(TooManyValues("much"))["error"]["type"]
    assert kind == "request_too_large"


MINIMAL = {"chat": {"messages": [USER]}, "messages": {"messages": [USER]}, "responses": {"input": "Hi."}}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("option", [*CONSTRAINING, "stop_token_ids", "continue_final_message", "prompt_logprobs"])
def test_what_takes_tokens_from_the_models_choice_is_refused_in_every_dialect(dialect: str, option: str) -> None:
    with pytest.raises(RequestError) as refused:
        DIALECTS[dialect].parse_request({**MINIMAL[dialect], option: [1]})
    assert refused.value.option == option


STRICT = {"type": "function", "name": "f", "strict": True, "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    ("dialect", "change", "counted"),
    [
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ("chat", {"tools": [{**STRICT, "function": {"name": "f", "strict": True}}]}, "tools[].strict"),
        ("chat", {"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ("chat", {"something_new": 3}, "something_new"),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, None),
        ("messages", {"tools": [{"name": "f", "strict": True}]}, "tools[].strict"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ("responses", {"tools": [{"type": "function", "name": "f", "strict": True}]}, "tools[].strict"),
        ("responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("responses", {"include": ["file_search_call.results"]}, "include.file_search_call.results"),
    ],
)
def test_every_other_option_without_effect_is_counted_with_its_value(
    dialect: str, change: dict[str, Any], counted: str | None
) -> None:
    request = DIALECTS[dialect].parse_request({**MINIMAL[dialect], **change})
    assert request.ignored == (counted or "tool_choice.disable_parallel_tool_use",)
    assert set(request.ignored) <= set(request.asked)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_options_that_hold_or_say_nothing_about_the_answer_are_not_counted(dialect: str) -> None:
    quiet = {"metadata": {"user_id": "x"}, "user": "x", "store": False, "prompt_cache_key": "x", "stream": False}
    quiet |= {"tool_choice": {"type": "auto"}} if dialect == "messages" else {"tool_choice": "auto"}
    quiet |= {"include": ["reasoning.encrypted_content"]} if dialect == "responses" else {}
    request = DIALECTS[dialect].parse_request({**MINIMAL[dialect], **quiet, "seed": None, "logprobs": False})
    assert request.ignored == ()


def test_logprobs_in_an_answer_are_refused_however_they_are_asked_for() -> None:
    with pytest.raises(RequestError, match="logprobs are recorded") as refused:
        DIALECTS["responses"].parse_request({"input": "Hi.", "include": ["message.output_text.logprobs"]})
    assert refused.value.option == "include"


def test_counted_options_and_their_values_are_bounded() -> None:
    counters = GatewayCounters()
    for at in range(200):
        body = {"messages": [USER], f"option{at}": "x" * 1000, "temperature": at}
        request = DIALECTS["chat"].parse_request(body)
        counters.add_options(request.ignored, request.asked)
    extra = counters.as_extra()
    assert len(extra["ignored"]) == MAX_OPTIONS + 1 and extra["ignored"][OTHERS] == 200 - (MAX_OPTIONS - 1)
    assert extra["asked"]["temperature"] == 0 and len(extra["asked"]["option0"]) < 1000
    assert len(extra["asked"]) == MAX_OPTIONS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None, "input": None},
        {"messages": 3, "input": 3},
        {"messages": [3], "input": [3]},
        {"messages": [{}], "input": [{}]},
        {"messages": [{"role": []}], "input": [{"role": {}}]},
        {"messages": [{"role": "assistant", "content": {"a": 1}}], "input": [{"type": ["x"]}]},
        {"messages": [USER], "input": "x", "tools": [{"type": "function"}]},
        {"messages": [USER], "input": "x", "max_tokens": -1, "max_output_tokens": 1.5},
        {"messages": [USER], "input": "x", "stop": [""], "stop_sequences": [1], "tools": {}},
    ],
)
def test_whatever_else_is_sent_is_an_error_in_words(dialect: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        DIALECTS[dialect].parse_request(body)


REPLY = TurnReply("ab12", "Well.", "Hm.", (ChatCall("add", {"é": [1]}, "call_ab120"),), Finish.CALLS, "", 7, 3, 1)
ANSWER = ReplySet((REPLY,), "policy", include_usage=True)

ECHO = {
    "chat": lambda whole: [whole["choices"][0]["message"]],
    "messages": lambda whole: [{"role": "assistant", "content": whole["content"]}],
    "responses": lambda whole: whole["output"],
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_that_is_sent_back_is_what_was_answered(dialect: str) -> None:
    from treadle.gateway.session_tree import Echo, compare

    name = "input" if dialect == "responses" else "messages"
    given = ECHO[dialect](DIALECTS[dialect].format_response(ANSWER))
    echo = DIALECTS[dialect].parse_request({name: given}).messages[0]
    assert compare(echo, REPLY) is Echo.EXACT


TERMINAL = {"chat": "[DONE]", "messages": "message_stop", "responses": "response.completed"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_ends_with_its_terminal_event(dialect: str) -> None:
    events = list(write_whole(DIALECTS[dialect].open_events(), ANSWER))
    last = events[-1]
    assert TERMINAL[dialect] in (last[0], last[1])
    assert all(data for _, data in events), "an empty event breaks clients"


def test_context_that_is_exhausted_is_said_in_the_words_that_programs_know() -> None:
    error = ContextExhausted(300, 200)
    chat = DIALECTS["chat"].format_error(error)["error"]
    assert chat["code"] == "context_length_exceeded" and "maximum context length is 200 tokens" in chat["message"]
    words = DIALECTS["messages"].format_error(error)["error"]
    assert words == {"type": "invalid_request_error", "message": "prompt is too long: 300 tokens > 200 maximum"}
    ((name, failed),) = DIALECTS["responses"].format_error_events(error)
    assert name == "response.failed" and failed["response"]["error"]["code"] == "context_length_exceeded"
    assert DIALECTS["messages"].format_error(Overloaded("x"))["error"]["type"] == "overloaded_error"


def said(role: Any, text: str) -> ChatMessage:
    return ChatMessage(role, text)


def test_what_templates_refuse_is_folded_and_noted() -> None:
    given = [
        said("system", "a"),
        said("system", "b"),
        said("user", "c"),
        said("system", "d"),
        said("user", "e"),
        said("assistant", "f"),
        said("system", "g"),
    ]
    folded, notes = fold(given, {}, at_start=True)
    assert [(message["role"], message["content"]) for message in folded] == [
        ("system", "a\n\nb"),
        ("user", "c\n\nd\n\ne"),
        ("assistant", "f"),
        ("user", "g"),
    ]
    assert len(notes) == 3
    later, _ = fold([said("system", "a"), said("user", "b")], {}, at_start=False)
    assert [message["role"] for message in later] == ["user"]


def test_the_result_of_a_tool_gets_its_name_and_the_id_that_the_model_wrote() -> None:
    calls = {"call_1": ChatCall("add", {}, "call_1", native_id="a1b2c3d4e")}
    (message,), _ = fold([ChatMessage("tool", "2", call_id="call_1")], calls, at_start=False)
    assert message == {"role": "tool", "name": "add", "tool_call_id": "a1b2c3d4e", "content": "2"}
