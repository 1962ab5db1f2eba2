"""Whatever an agent does with its conversations, each sampled token trains once, after the ids it was sampled after."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateways import DIALECTS, TOOLS, Agent, agent, assistant, results, trained
from tests.rollouts import CALL, GOLDEN, renderer, rollout, save_model, say
from treadle.config import ModelConfig
from treadle.data.renderer import Renderer
from treadle.errors import EngineFailure
from treadle.gateway.request import ChatMessage, ContextExhausted, Overloaded, RequestError, SessionOver, TurnRequest
from treadle.gateway.request_body import KnownTools
from treadle.rollout.session import Session
from treadle.types import Completion, StopReason

USER = {"role": "user", "content": "Add 1 and 2."}


def run(use, **fields: Any) -> Any:
    async def main() -> Any:
        async with agent(**fields) as it:
            return await use(it)

    return asyncio.run(main())


def text_of(ids) -> str:
    return renderer()._encoder.decode(ids)


def test_a_conversation_is_one_row_and_every_prompt_extends_what_was_sampled() -> None:
    async def use(it: Agent) -> None:
        history = [USER]
        for _ in range(4):
            answer = await it.chat(*history)
            history += [assistant(answer), *results(answer)]
        (row,) = await it.rows()
        assert trained([row]) == {pair: 1 for pair in it.engine.sampled}
        assert it.conversation.counters.echoes == {"exact": 3} and not it.conversation.counters.forks
        shown = text_of((*row.prompt_ids, *row.ids))
        assert all(message["content"] in shown for message in history[:-1] if message.get("content"))

    run(use)


class CountingKeys(list[bytes]):
    """Keys of messages that count how many of them are taken to look a point up."""

    num_taken = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_taken += len(found) if isinstance(index, slice) else 1
        return found


def test_to_find_a_place_takes_as_many_steps_as_there_are_messages() -> None:
    """Assistant messages that are no turns of ours, where a turn was sampled after as many messages once."""

    async def steps(count: int) -> int:
        async with agent(say("Well."), config=rollout(prompt_length=200_000, response_length=200_000)) as it:
            empty = {"role": "user", "content": ""}
            await it.chat(*[empty] * count, USER)
            others = [{"role": "assistant", "content": ""} if at % 2 else empty for at in range(count)]
            history = [*others, USER, {"role": "assistant", "content": "Well."}, USER]
            request = DIALECTS["chat"].parse_request({"model": "policy", "messages": history, "tools": TOOLS})
            tree, keys = it.conversation._tree, CountingKeys(request.keys())
            (root,) = tree._roots
            assert tree.locate(request.messages, keys, root).start == 0
            return keys.num_taken

    assert asyncio.run(steps(400)) == 401
    assert asyncio.run(steps(1600)) == 1601


def test_the_first_prompt_is_the_agents_and_not_the_tasks() -> None:
    async def use(it: Agent) -> None:
        await it.chat({"role": "system", "content": "Be brief."}, USER)
        (row,) = await it.rows()
        assert text_of(row.prompt_ids).startswith("<|im_start|>system\nBe brief.")

    run(use)


def _rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """As LangGraph sends it back: arguments written anew, content as blocks."""
    changed = assistant(message)
    for call in changed.get("tool_calls", ()):
        call["function"] = {
            "name": call["function"]["name"],
            "arguments": json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":")),
        }
    if changed.get("content"):
        changed["content"] = [{"type": "text", "text": changed["content"], "cache_control": {"type": "ephemeral"}}]
    return changed


def test_an_answer_that_is_written_otherwise_keeps_its_ids() -> None:
    async def use(it: Agent) -> None:
        answer = await it.chat(USER)
        assert answer["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": 2}'
        await it.chat(USER, _rewritten(answer), *results(answer))
        (row,) = await it.rows()
        assert it.conversation.counters.echoes == {"equivalent": 1}
        assert trained([row]) == {pair: 1 for pair in it.engine.sampled}

    run(use, script=say(CALL, "It is 3."))


def test_an_edited_answer_is_a_row_of_its_own_and_the_sampled_one_still_trains() -> None:
    async def use(it: Agent) -> None:
        answer = await it.chat(USER)
        edited = {"role": "assistant", "content": "I would rather not."}
        await it.chat(USER, edited, {"role": "user", "content": "Do."})
        first, second = await it.rows()
        assert it.conversation.counters.forks == it.conversation.counters.echoes == {"edited": 1}
        assert it.conversation.counters.forked_tokens == {"edited": len(second.prompt_ids)}
        assert trained([first, second]) == {pair: 1 for pair in it.engine.sampled}
        assert "I would rather not." in text_of(second.prompt_ids) and answer["content"] not in text_of(
            second.prompt_ids
        )

    run(use, script=say("One.", "Two."))


def test_a_conversation_that_goes_back_branches_with_verbatim_ids() -> None:
    async def use(it: Agent) -> None:
        one = await it.chat(USER)
        start = [USER, assistant(one)]
        two = await it.chat(*start, {"role": "user", "content": "This way."})
        await it.chat(*start, {"role": "user", "content": "This way."}, assistant(two), USER)
        await it.chat(*start, {"role": "user", "content": "That way."})
        first, second = await it.rows()
        assert it.conversation.counters.forks == {"rewound": 1}
        turn = first.turns[0]
        verbatim = (*first.prompt_ids, *first.ids[: turn.sampled_end])
        assert second.prompt_ids[: len(verbatim)] == verbatim
        assert it.conversation.counters.forked_tokens == {"rewound": len(verbatim)}
        assert trained([first, second]) == {pair: 1 for pair in it.engine.sampled}

    run(use)


def test_parallel_requests_are_siblings_with_noise_of_their_own() -> None:
    async def use(it: Agent) -> None:
        it.engine.held = asyncio.Event()
        body = {"model": "policy", "messages": [USER]}
        exchanges = [it.send(body) for _ in range(4)]
        it.engine.held.set()
        answers = [await it.receive(exchange) for exchange in exchanges]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 4
        rows = await it.rows()
        assert len(rows) == 4 and trained(rows) == {pair: 1 for pair in it.engine.sampled}

    run(use)


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_sub_agents_that_say_the_same_go_on_with_their_own_turns(dialect: str) -> None:
    async def use(it: Agent) -> None:
        history: list[dict[str, Any]] = [USER]
        for turn in range(3):
            for name in ("a", "b"):
                exchange = it.send({"model": "policy", "messages": history, "max_tokens": 50}, dialect, agent_id=name)
                await it.receive(exchange, dialect)
            said = {"role": "assistant", "content": f"turn {turn}"}
            history = [*history, said, {"role": "user", "content": "Go on."}]
        assert it.conversation.counters.forks == {"sibling": 1}
        rows = await it.rows()
        assert len(rows) == 2 and trained(rows) == Counter(it.engine.sampled)

    def script(request: Any, rng: Any) -> str:
        return f"turn {sum(message['role'] == 'assistant' for message in request.messages)}"

    run(use, script=script)


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_tools_that_are_sent_again_are_read_once(dialect: str) -> None:
    parse, known = DIALECTS[dialect].parse_request, KnownTools()
    given = {"input": "Hi."} if dialect == "responses" else {"messages": [USER]}

    def tools(count: int) -> list[dict[str, Any]]:
        sent = [{"name": f"add{at}", "description": "Add."} for at in range(count)]
        return [{"type": "function", "function": one} for one in sent] if dialect == "chat" else sent

    first, again = (parse({**given, "tools": tools(2)}, known).tools for _ in range(2))
    assert first is again and len(parse({**given, "tools": tools(3)}, known).tools) == 3
    assert parse({**given, "tools": tools(2)}).tools == first


def test_a_request_that_was_rendered_in_a_thread_is_placed_without_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(it: Agent) -> None:
        parse = DIALECTS["chat"].parse_request
        answer = await it.chat(USER)
        history = [USER, assistant(answer), {"role": "user", "content": "Go on."}]
        request = parse({"model": "policy", "messages": history, "tools": TOOLS})
        rendered = await it.conversation.render(request)
        with monkeypatch.context() as patched:
            patched.setattr(ChatMessage, "key", None)
            patched.setattr(TurnRequest, "repeat_key", None)
            patched.setattr(Session, "render_after", None)
            exchange = it.conversation.ask(request, rendered)
        await it.receive(exchange)
        (row,) = await it.rows()
        assert trained([row]) == Counter(it.engine.sampled) and len(row.turns) == 2

    run(use, script=say("One.", "Two."))


def test_n_choices_are_siblings_that_train() -> None:
    async def use(it: Agent) -> None:
        answer = await it.receive(it.send({"model": "policy", "messages": [USER], "n": 3}))
        assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
        rows = await it.rows()
        assert len(rows) == 3 and trained(rows) == {pair: 1 for pair in it.engine.sampled}
        assert it.conversation.counters.forked_tokens == {"sibling": 2 * len(rows[0].prompt_ids)}

    run(use, train="main")


@pytest.mark.parametrize("when", ["while it is sampled", "after it was sampled", "after it was sent"])
def test_a_request_whose_answer_was_lost_gets_the_same_answer(when: str) -> None:
    async def use(it: Agent) -> None:
        body = {"model": "policy", "messages": [USER]}
        it.engine.held = asyncio.Event()
        lost = it.send(body)
        if when != "while it is sampled":
            it.engine.held.set()
            await it.answer(lost)
        if when == "after it was sent":
            it.conversation.deliver(lost)
        it.conversation.lose(lost)
        it.engine.held.set()
        again = await it.receive(it.send(body))
        assert again["choices"][0]["message"]["content"] == lost.turns[0].reply.text
        assert len(it.engine.sampled) == 1 and it.conversation.counters.replayed == 1
        assert len(await it.rows()) == 1

    run(use)


def test_the_same_question_after_its_answer_was_read_is_a_new_sample_and_the_first_does_not_train() -> None:
    async def use(it: Agent) -> None:
        await it.chat(USER)
        answer = await it.chat(USER)
        await it.chat(USER, assistant(answer), *results(answer))
        (row,) = await it.rows()
        assert it.conversation.counters.replaced == 1 and len(row.turns) == 2
        assert it.session.extra["gateway"]["untrained"][0]["why"] == "replaced"
        assert trained([row]) == {pair: 1 for pair in it.engine.sampled[1:]}

    run(use, train="main")


def test_calls_for_another_model_do_not_train() -> None:
    async def use(it: Agent) -> None:
        await it.chat({"role": "user", "content": "Write a title."}, model="small-model")
        await it.chat(USER)
        (row,) = await it.rows()
        assert it.conversation.counters.auxiliary == 1
        assert trained([row]) == {it.engine.sampled[1]: 1}

    run(use, train="main")


def test_where_all_turns_train_none_is_counted_that_does_not() -> None:
    async def use(it: Agent) -> None:
        await it.chat(USER)
        await it.chat(USER, model="small")
        await it.chat(USER)
        rows = await it.rows()
        assert trained(rows) == {pair: 1 for pair in it.engine.sampled}
        counted = it.session.extra["gateway"]
        assert not {"untrained", "auxiliary", "replaced", "undelivered"} & set(counted)

    run(use, train="all")


def test_an_agent_that_names_one_model_of_its_own_trains_that() -> None:
    async def use(it: Agent) -> None:
        await it.chat(USER, model="gpt-x")
        assert len(await it.rows()) == 1

    run(use, train="main")


def test_siblings_that_say_the_same_are_told_apart_by_our_ids() -> None:
    async def use(it: Agent) -> None:
        both = await it.receive(it.send({"model": "policy", "messages": [USER], "tools": TOOLS, "n": 2}))
        one, two = (choice["message"] for choice in both["choices"])
        assert one["tool_calls"][0]["id"] != two["tool_calls"][0]["id"]
        await it.chat(USER, assistant(one), *results(one))
        await it.chat(USER, assistant(two), *results(two))
        rows = await it.rows()
        assert [len(row.turns) for row in rows] == [2, 2] and not it.conversation.counters.forks["rewound"]

    run(use, script=say(CALL, "It is 3."))


def test_reasoning_that_is_dropped_forks_where_the_template_would_show_it() -> None:
    async def use(it: Agent) -> None:
        answer = await it.chat(USER)
        assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "It is 3.")
        dropped = {"role": "assistant", "content": answer["content"]}
        await it.chat(USER, dropped, USER)
        _, second = await it.rows()
        assert it.conversation.counters.forks == it.conversation.counters.echoes == {"reduced": 1}
        assert "Hm." not in text_of(second.prompt_ids)

    run(use, script=say("<think>\nHm.\n</think>\n\nIt is 3.", "Bye."))


def test_reasoning_that_is_dropped_keeps_its_ids_where_the_template_drops_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(renderer()), "drops_reasoning", lambda self, has_calls, user_follows: user_follows)

    async def use(it: Agent) -> None:
        answer = await it.chat(USER)
        await it.chat(USER, {"role": "assistant", "content": answer["content"]}, USER)
        (row,) = await it.rows()
        assert it.conversation.counters.echoes == {"reduced": 1} and "Hm." in text_of(row.ids)

    run(use, script=say("<think>\nHm.\n</think>\n\nIt is 3.", "Bye."))


def test_a_template_is_asked_whether_it_drops_reasoning(tmp_path: Path) -> None:
    def made(name: str) -> Renderer:
        text = (GOLDEN / "templates" / f"{name}.jinja").read_text()
        return Renderer.create(ModelConfig(path=save_model(tmp_path).path, custom_chat_template=text))

    qwen, hermes = made("qwen3"), made("hermes")
    assert qwen.drops_reasoning(has_calls=False, user_follows=True)
    assert qwen.drops_reasoning(has_calls=True, user_follows=True)
    assert not qwen.drops_reasoning(has_calls=True, user_follows=False), "in the middle of its calls it is shown"
    assert not hermes.drops_reasoning(has_calls=False, user_follows=True), "text inside <think> is text to it"


def test_context_that_is_full_leaves_the_session_open_for_a_shorter_one() -> None:
    async def use(it: Agent) -> None:
        answer = await it.chat(USER)
        long = {"role": "user", "content": "word " * 300}
        with pytest.raises(ContextExhausted) as full:
            await it.chat(USER, assistant(answer), long)
        assert full.value.num_tokens > 1000 and 100 < full.value.max_tokens < 200
        assert not it.conversation.over.is_set()
        await it.chat({"role": "user", "content": "Summary: you added."})
        rows = await it.rows()
        assert trained(rows) == {pair: 1 for pair in it.engine.sampled}

    run(use, config=rollout(prompt_length=100, response_length=100), script=say("One."))


def test_a_turn_limit_ends_the_session() -> None:
    async def use(it: Agent) -> None:
        answer = await it.chat(USER)
        with pytest.raises(SessionOver):
            await it.chat(USER, assistant(answer), USER)
        assert it.conversation.over.is_set() and it.session.ended is StopReason.TURN_LIMIT

    run(use, config=rollout(response_length=500, max_assistant_turns=1))


def test_an_engine_that_fails_is_asked_again_in_the_same_row() -> None:
    async def use(it: Agent) -> None:
        real, it.engine.inner = it.engine.inner, Broken()
        body = {"model": "policy", "messages": [USER]}
        with pytest.raises(Overloaded):
            await it.receive(it.send(body))
        assert isinstance(it.conversation.open_failure(), EngineFailure)
        it.engine.inner = real
        await it.receive(it.send(body))
        assert it.conversation.open_failure() is None and not it.conversation.over.is_set()
        assert len(await it.rows()) == 1

    class Broken:
        async def generate(self, request):
            raise EngineFailure("gone")

    run(use)


@pytest.mark.parametrize("changed", [{"stream": True}, {"temperature": 0.5}, {"stop": ["x"]}, {"tool_choice": "none"}])
def test_a_failure_is_made_good_by_any_answer_to_the_same_messages(changed: dict[str, Any]) -> None:
    async def use(it: Agent) -> None:
        real, it.engine.inner = it.engine.inner, Failing()
        body = {"model": "policy", "messages": [USER]}
        with pytest.raises(Overloaded):
            await it.receive(it.send({**body, **changed}))
        it.engine.inner = real
        await it.receive(it.send(body))
        assert it.conversation.open_failure() is None

    run(use)


class Failing:
    """An engine that is gone after some tokens, if it has any to say."""

    def __init__(self, said: str = "") -> None:
        self.ids = renderer().encode(said) if said else ()

    async def generate(self, request):
        if self.ids and not request.num_begun:
            return Completion(self.ids, (0.0,) * len(self.ids), (0,) * len(self.ids), StopReason.ABORT)
        raise EngineFailure("gone")


@pytest.mark.parametrize("other", [{"tool_choice": "required"}, {"stop": ["x"]}])
def test_a_turn_that_broke_off_goes_on_only_as_it_was_asked_for(other: dict[str, Any]) -> None:
    async def use(it: Agent) -> None:
        real, it.engine.inner = it.engine.inner, Failing("Half")
        with pytest.raises(Overloaded):
            await it.chat(USER, **other)
        it.engine.inner = real
        await it.chat(USER)
        (row,) = await it.rows()
        assert "Half" not in text_of(row.ids) and "<tool_call>" not in text_of((*row.prompt_ids, *row.ids)[-60:])
        (left,) = it.session.extra["gateway"]["untrained"]
        assert left == {"why": "unfinished", "tokens": len(renderer().encode("Half")), "text": "Half"}

    run(use, script=say("Whole."))


def test_a_turn_that_broke_off_goes_on_where_the_same_is_asked() -> None:
    async def use(it: Agent) -> None:
        real, it.engine.inner = it.engine.inner, Failing("Half")
        with pytest.raises(Overloaded):
            await it.chat(USER)
        it.engine.inner = real
        assert (await it.chat(USER))["content"] == "Half and whole."
        (row,) = await it.rows()
        assert text_of(row.ids).startswith("Half and whole.") and "untrained" not in it.session.extra["gateway"]

    run(use, script=say(" and whole."))


def test_a_turn_that_is_under_way_when_the_session_ends_is_counted() -> None:
    async def use(it: Agent) -> None:
        answer = await it.chat(USER)
        it.engine.held = asyncio.Event()
        it.send({"model": "policy", "messages": [USER, assistant(answer), USER], "tools": TOOLS, "n": 2})
        await asyncio.sleep(0)
        assert len(await it.rows()) == 1 and it.session.extra["gateway"]["unfinished"] == 2
        assert [left["why"] for left in it.session.extra["gateway"]["untrained"]] == ["unfinished", "unfinished"]

    run(use, train="main", script=say("One."))


def test_siblings_of_one_text_are_not_given_the_answers_of_each_other() -> None:
    async def use(it: Agent) -> None:
        both = await it.receive(it.send({"model": "policy", "messages": [USER], "tools": TOOLS, "n": 2}))
        bodies = [
            {"model": "policy", "messages": [USER, assistant(message), *results(message)], "tools": TOOLS}
            for message in (choice["message"] for choice in both["choices"])
        ]
        it.conversation.lose(it.send(bodies[0]))
        await it.receive(it.send(bodies[1]))
        assert it.conversation.counters.replayed == 0
        await it.receive(it.send(bodies[0]))
        assert it.conversation.counters.replayed == 1

    run(use, script=say(CALL, "It is 3."))


def test_an_engine_that_keeps_failing_fails_the_session() -> None:
    async def use(it: Agent) -> None:
        for _ in range(2):
            with pytest.raises(Overloaded):
                await it.receive(it.send({"model": "policy", "messages": [USER]}))
        assert it.conversation.over.is_set() and isinstance(it.conversation.failure, EngineFailure)

    run(use, retries=1, failure_rate=1.0)


async def failing_requests(it: Agent, *contents: str) -> None:
    """Requests that are on their way together meet an engine that is gone."""
    sent = [it.send({"model": "policy", "messages": [{"role": "user", "content": text}]}) for text in contents]
    for exchange in sent:
        with pytest.raises(Overloaded):
            await it.receive(exchange)


@pytest.mark.parametrize("contents", [("one", "two", "three"), ("same", "same", "same")])
def test_requests_that_meet_one_outage_together_leave_the_retries_of_each_untouched(contents: tuple[str, ...]) -> None:
    async def use(it: Agent) -> None:
        await failing_requests(it, *contents)
        assert it.conversation.failure is None and it.conversation.counters.engine_failures == 3
        await failing_requests(it, contents[0])
        assert it.conversation.failure is None
        await failing_requests(it, contents[0])
        assert isinstance(it.conversation.failure, EngineFailure), "the first request and two retries"

    run(use, retries=2, failure_rate=1.0)


@pytest.mark.parametrize("n", [1, 3])
def test_a_turn_that_an_engine_failed_is_none_of_the_turns_that_a_session_may_have(n: int) -> None:
    async def use(it: Agent) -> None:
        real, it.engine.inner = it.engine.inner, Failing()
        with pytest.raises(Overloaded):
            await it.chat(USER, n=n)
        it.engine.inner = real
        await it.receive(it.send({"model": "policy", "messages": [USER], "n": n}))
        with pytest.raises(SessionOver, match=f"max_assistant_turns = {n}"):
            await it.chat({"role": "user", "content": "One more."})

    run(use, config=rollout(response_length=500, max_assistant_turns=n), script=say("Well."))


def test_a_call_that_is_required_is_opened_with_given_tokens() -> None:
    async def use(it: Agent) -> None:
        forced = {"type": "function", "function": {"name": "add"}}
        answer = await it.chat(USER, tool_choice=forced)
        assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 5}'}
        (row,) = await it.rows()
        start = row.turns[0].start
        assert text_of(row.ids[:start]) == '<tool_call>\n{"name": "add", "arguments": ' and not any(row.mask[:start])

    run(use, script=say('{"a": 5}}\n</tool_call>'))


def test_a_stop_string_ends_a_turn_and_is_kept_among_its_ids() -> None:
    async def use(it: Agent) -> None:
        answer = await it.receive(it.send({"model": "policy", "messages": [USER], "stop": ["Observation:"]}))
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Think. ", "stop")
        (row,) = await it.rows()
        assert "Observation:" in text_of(row.ids) and "never" not in text_of(row.ids)

    run(use, script=say("Think. Observation: never said"))


def test_what_a_message_means_decides_and_not_how_it_is_written() -> None:
    async def use(it: Agent) -> None:
        system = {"role": "system", "content": "Be brief."}
        blocks = {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {}}]}
        answer = await it.chat(blocks, USER)
        await it.chat(
            system, {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}, assistant(answer), USER
        )
        assert len(await it.rows()) == 1 and it.conversation.counters.roots == 1

    run(use)


@pytest.mark.parametrize("minted", [True, False])
def test_results_of_equal_text_that_answer_other_calls_are_another_context(minted: bool) -> None:
    async def use(it: Agent) -> None:
        if minted:
            answer = assistant(await it.chat(USER))
        else:
            calls = [{"id": f"c{at}", "function": {"name": ("add", "sub")[at], "arguments": "{}"}} for at in range(2)]
            answer = {"role": "assistant", "content": "", "tool_calls": calls}
        first, second = ({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in answer["tool_calls"])
        unknown = {**first, "tool_call_id": "unknown"}
        for both in ((first, second), (second, first), (second, unknown), (unknown, second)):
            await it.chat(USER, answer, *both)
        points = {turn.point for turn in it.conversation._tree.turns}
        assert len(points) == 4 + minted and not it.conversation.counters.forks["sibling"]
        await it.chat(USER, answer, second, first)
        assert it.conversation.counters.forks["sibling"] == 1

    other = CALL.replace('"add"', '"sub"')
    run(use, script=lambda request, rng: f"{CALL}\n{other}" if len(request.messages) == 1 else "Well.")


def test_a_conversation_that_ends_with_an_assistant_message_is_refused() -> None:
    async def use(it: Agent) -> None:
        with pytest.raises(RequestError, match="does not go on"):
            await it.chat(USER, {"role": "assistant", "content": "Well,"})

    run(use)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["go on", "lose", "twice", "edit", "back", "parallel", "compact", "n", "other", "rewrite", "drop"]
        ),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from(["main", "all"]))
def test_any_mix_trains_each_sampled_token_once_in_its_own_context(steps, train: str) -> None:
    """Histories are what an agent holds; every step asks for one more turn of one of them, in its own way."""

    async def use(it: Agent) -> None:
        histories: list[list[dict[str, Any]]] = [[USER]]
        for kind, pick in steps:
            history = histories[pick % len(histories)]
            await take(it, histories, history, kind, pick)
        sampled = Counter(it.engine.sampled)
        found = trained(await it.rows())
        untrained = it.session.extra["gateway"].get("untrained", [])
        assert found <= sampled and found.total() + len(untrained) == sampled.total()
        assert train == "main" or not untrained

    run(use, train=train)


def changed(history: list[Any], kind: str, pick: int) -> list[Any]:
    """The history that a step asks with, where it is not the one that the agent holds."""
    if kind == "edit" and len(history) > 1:
        at = 1 + pick % (len(history) - 1)
        return [*history[:at], {**history[at], "content": f"edited {pick}"}, *history[at + 1 :]]
    if kind == "back":
        users = [at for at, message in enumerate(history) if message["role"] == "user"]
        return [*history[: users[pick % len(users)] + 1]]
    if kind == "compact":
        return [{"role": "user", "content": f"Summary {pick}: {len(history)} messages."}]
    if kind == "drop" and len(history) > 3:
        return [history[0], *history[3:]]
    if kind == "rewrite":
        return [
            _rewritten(item) if isinstance(item.get("content"), str) and "tool_calls" in item else item
            for item in history
        ]
    return history


async def take(it: Agent, histories: list[Any], history: list[Any], kind: str, pick: int) -> None:
    asked = changed(history, kind, pick)
    if asked is not history:
        histories.append(asked)
    body = {"model": "policy", "messages": asked, "tools": TOOLS}
    if kind == "other":
        await it.receive(it.send({**body, "model": "small", "max_tokens": 3}))
        return
    if kind == "lose":
        exchange = it.send(body)
        if pick % 2:
            await it.answer(exchange)
        it.conversation.lose(exchange)
    if kind == "twice":
        await it.receive(it.send(body))
    exchanges = [it.send({**body, "n": 2} if kind == "n" else body) for _ in range(2 if kind == "parallel" else 1)]
    answers = [choice["message"] for exchange in exchanges for choice in (await it.receive(exchange))["choices"]]
    histories += [[*asked, assistant(answer), *results(answer)] for answer in answers[1:]]
    asked += [assistant(answers[0]), *results(answers[0])]
