"""The renderer against the template itself: for every family, incremental ids are the ids of a full rendering."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.rendering import encode_full
from treadle.config.rollout import ModelConfig
from treadle.data.chat_template import ChatTemplate
from treadle.data.renderer import Renderer, truncate
from treadle.data.rendering_parity import BoundaryVerdict
from treadle.errors import ConfigError, PromptFailure
from treadle.types import Message

GOLDEN = Path(__file__).parents[1] / "golden"
ENDS = {
    "hermes": ("<|im_end|>",),
    "llama3": ("<|eot_id|>",),
    "gemma": ("<end_of_turn>",),
    "mistral": ("</s>",),
    "qwen3": ("<|im_end|>",),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "harmony": ("<|end|>", "<|return|>", "<|call|>"),
}
WITH_TOOLS = [family for family in ENDS if family != "gemma"]
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
QUESTION: Message = {"role": "user", "content": "Add 1 and 2."}
ANSWER: Message = {"role": "assistant", "content": "Done."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(GOLDEN / "tokenizer.json"), **special)


def template_of(family: str) -> str:
    return (GOLDEN / "templates" / f"{family}.jinja").read_text()


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    begins = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>"}
    special = {"bos_token": begins[family]} if family in begins else {}
    tokenizer = make_tokenizer(eos_token=ENDS[family][0], **special)
    tokenizer.chat_template = template_of(family)
    return tokenizer


@cache
def renderer_of(family: str) -> Renderer:
    tokenizer = tokenizer_of(family)
    directory = Path(mkdtemp())
    stops = [tokenizer.convert_tokens_to_ids(token) for token in ENDS[family]]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return Renderer.create(ModelConfig(path=str(directory)), tokenizer)


def full_ids(family: str, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
    return encode_full(tokenizer_of(family), messages, tools)


def result(content: str, number: int = 1) -> Message:
    return {"role": "tool", "content": content, "name": "add", "tool_call_id": f"call0000{number}"}


def assert_ends_with(full: list[int], observation: tuple[int, ...], renderer: Renderer) -> None:
    assert tuple(full[len(full) - len(observation) :]) == observation
    assert full[len(full) - len(observation) - 1] in renderer.stop_token_ids


SPELLED = ["<|im_end|>", "<|im_start|>", "</s>", "[INST]", "<end_of_turn>", "<|eot_id|>", "<think>", "<tool_call>"]
CONTENTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*SPELLED, "\n", " ", '"', "\\", "{}"])), max_size=6)


@pytest.mark.parametrize("family", ENDS)
@settings(max_examples=40, deadline=None)
@given(parts=CONTENTS)
def test_a_prompt_has_the_ids_of_the_full_rendering(family: str, parts: list[str]) -> None:
    conversation = [{"role": "user", "content": "".join(parts)}]
    tools = [TOOL] if family in WITH_TOOLS else []
    assert list(renderer_of(family).prompt(conversation, tools)) == full_ids(family, conversation, tools)


@pytest.mark.parametrize("family", ENDS)
@settings(max_examples=40, deadline=None)
@given(parts=CONTENTS)
def test_a_user_message_after_a_turn_has_the_ids_of_the_full_rendering(family: str, parts: list[str]) -> None:
    new: list[Message] = [{"role": "user", "content": "".join(parts)}]
    full = full_ids(family, [QUESTION, ANSWER, *new])
    assert_ends_with(full, renderer_of(family).observation(new), renderer_of(family))


@pytest.mark.parametrize("family", WITH_TOOLS)
@settings(max_examples=40, deadline=None)
@given(parts=CONTENTS)
def test_a_tool_result_has_the_ids_of_the_full_rendering(family: str, parts: list[str]) -> None:
    new = [result("".join(parts))]
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    full = full_ids(family, [QUESTION, turn, *new], [TOOL])
    assert_ends_with(full, renderer_of(family).observation(new, [TOOL]), renderer_of(family))


@pytest.mark.parametrize("family", [family for family in WITH_TOOLS if family != "llama3"])
@settings(max_examples=20, deadline=None)
@given(first=CONTENTS, second=CONTENTS)
def test_parallel_tool_results_have_the_ids_of_the_full_rendering(
    family: str, first: list[str], second: list[str]
) -> None:
    new = [result("".join(first)), result("".join(second), 2)]
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "call00002"}]}
    full = full_ids(family, [QUESTION, turn, *new], [TOOL])
    assert_ends_with(full, renderer_of(family).observation(new, [TOOL]), renderer_of(family))


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_every_tool_boundary_does_without_the_template(family: str) -> None:
    assert renderer_of(family).is_fast([result("3")], [TOOL])
    assert renderer_of(family).is_fast([result("3"), result("4", 2)], [TOOL])


def test_a_known_shape_never_calls_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = renderer_of("hermes")
    expected = renderer.observation([result("3")])

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("the template was called")

    monkeypatch.setattr(ChatTemplate, "render_plain", refuse)
    assert renderer.observation([result("3")]) == expected
    with pytest.raises(AssertionError):
        renderer.observation([{"role": "user", "content": "hi", "mood": 1}])


def test_samples_of_one_task_are_rendered_once() -> None:
    renderer = Renderer.create(ModelConfig(path="none", custom_chat_template=template_of("hermes")), make_tokenizer())
    before = renderer._prompt.cache_info()
    for _ in range(8):
        renderer.prompt(({"role": "user", "content": "the same"},), (dict(TOOL),))
    after = renderer._prompt.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 7)


def test_tools_are_part_of_what_a_prompt_is_kept_by() -> None:
    renderer = renderer_of("hermes")
    assert renderer.prompt([QUESTION], [TOOL]) != renderer.prompt([QUESTION])


def test_a_template_that_changes_contents_is_asked_each_time() -> None:
    loud = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
    loud += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = Renderer.create(ModelConfig(path="none", custom_chat_template=loud), make_tokenizer())
    new = [{"role": "user", "content": "quiet"}]
    observed = renderer._encoder.decode(renderer.observation(new))
    assert observed == "\n<|im_start|>user\nQUIET<|im_end|>\n<|im_start|>assistant\n"
    assert not renderer.is_fast(new)
    assert not renderer.parity["assistant → user"].fast
    assert "by template (slow)" in str(renderer.parity)


def test_messages_with_parts_or_unknown_fields_are_left_to_the_template() -> None:
    renderer = renderer_of("hermes")
    assert not renderer.is_fast([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    plain = renderer.observation([{"role": "user", "content": "hi"}])
    assert renderer.observation([{"role": "user", "content": "hi", "mood": "good"}]) == plain


def test_a_template_that_would_move_its_tools_refuses_to_go_on() -> None:
    renderer = renderer_of("mistral")
    more: list[Message] = [{"role": "user", "content": "more"}]
    assert renderer.is_fast(more) and renderer.observation(more)
    with pytest.raises(PromptFailure, match="cannot go on after an assistant turn: full rendering would rewrite"):
        renderer.observation(more, [TOOL])


def test_an_empty_message_has_a_shape_of_its_own() -> None:
    polite = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '(nothing)' }}<|im_end|>\n{% endfor %}"
    renderer = Renderer.create(ModelConfig(path="none", custom_chat_template=polite), make_tokenizer())
    full, empty = ([{"role": "user", "content": text}] for text in ("some", ""))
    assert renderer._encoder.decode(renderer.observation(full)) == "\n<|im_start|>user\nsome<|im_end|>\n"
    assert renderer._encoder.decode(renderer.observation(empty)) == "\n<|im_start|>user\n(nothing)<|im_end|>\n"
    assert renderer.is_fast(full) and renderer.is_fast(empty)


def test_nothing_new_gives_just_the_next_header() -> None:
    renderer = renderer_of("hermes")
    assert renderer._encoder.decode(renderer.observation([])) == "\n<|im_start|>assistant\n"


def test_the_parity_says_that_reasoning_would_be_dropped() -> None:
    check = renderer_of("qwen3").parity["assistant reasons → user"]
    assert check.verdict is BoundaryVerdict.KEEPS
    assert "drop earlier reasoning" in check.detail
    assert "Let me see." in check.incremental and "Let me see." not in check.full
    assert renderer_of("qwen3").parity["assistant reasons → tool"].verdict is BoundaryVerdict.AGREES


def test_the_parity_says_that_earlier_text_would_be_rewritten() -> None:
    parity = renderer_of("mistral").parity
    assert parity["system … assistant → user"].verdict is BoundaryVerdict.DIFFERS
    assert "rewrite earlier text" in str(parity["assistant → user, with tools"])
    assert parity["assistant calls → tool, tool"].verdict is BoundaryVerdict.AGREES
    assert parity["assistant → user"] not in parity.differences


def test_the_parity_says_that_an_end_of_turn_token_is_foreign_to_the_template() -> None:
    tokenizer = make_tokenizer(eos_token="<|endoftext|>")
    renderer = Renderer.create(ModelConfig(path="none", custom_chat_template=template_of("glm")), tokenizer)
    assert "leaves its last token out" in renderer.parity["assistant → user"].detail


def test_the_parity_says_that_tools_are_not_shown() -> None:
    assert not renderer_of("gemma").parity.shows_tools
    assert renderer_of("hermes").parity.shows_tools


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def make_renderer(template: str) -> Renderer:
    return Renderer.create(ModelConfig(path="none", custom_chat_template=template), make_tokenizer())


def test_tools_that_a_template_ignores_are_written_into_the_prompt() -> None:
    renderer = make_renderer(CHATML + ASK)
    assert not renderer.parity.shows_tools and "written into the prompt, in hermes format" in str(renderer.parity)
    turn = {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, CALL]}
    system: Message = {"role": "system", "content": "Be brief."}
    text = renderer._encoder.decode(renderer.prompt([system, QUESTION, turn, result("3"), result("4")], [TOOL]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and json.dumps(TOOL) in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\nHm.\n{call}\n{call}<|im_end|>" in text
    response = "<tool_response>\n{}\n</tool_response>"
    assert f"<|im_start|>user\n{response.format(3)}\n{response.format(4)}<|im_end|>" in text
    assert "# Tools" not in renderer._encoder.decode(renderer.prompt([system, QUESTION]))
    assert {check.verdict for check in renderer.parity.checks} == {BoundaryVerdict.AGREES}


def test_a_template_with_no_system_role_has_its_tools_in_the_first_user_message() -> None:
    text = renderer_of("gemma")._encoder.decode(renderer_of("gemma").prompt([QUESTION], [TOOL]))
    assert text.startswith("<bos><start_of_turn>user\n# Tools") and "Add 1 and 2.<end_of_turn>" in text


def test_a_template_that_always_loops_over_tools_gets_an_empty_list() -> None:
    renderer = make_renderer("{% for t in tools %}{{ t.function | tojson }}{% endfor %}" + CHATML + ASK)
    assert renderer.parity.shows_tools
    assert renderer._encoder.decode(renderer.prompt([QUESTION])).startswith("<|im_start|>user")
    assert renderer.parity["assistant → user"].verdict is BoundaryVerdict.AGREES


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_role_that_a_template_leaves_out_is_refused_by_name(role: str) -> None:
    deaf = CHATML.replace("messages %}", f"messages if m.role != '{role}' %}}") + "{{ tools | tojson if tools }}" + ASK
    renderer = make_renderer(deaf)
    with pytest.raises(PromptFailure, match=f"leaves out messages of the role '{role}'"):
        renderer.prompt([QUESTION, {"role": role, "content": "hear this"}], [TOOL])


def test_calls_that_a_template_leaves_out_are_refused_by_name() -> None:
    renderer = make_renderer("{{ tools | tojson if tools }}" + CHATML + ASK)
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    with pytest.raises(PromptFailure, match="leaves out the tool calls"):
        renderer.prompt([QUESTION, turn, result("3")], [TOOL])
    assert renderer.observation([result("3")], [TOOL])


def test_a_template_that_wants_parts_gets_parts() -> None:
    parts = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p['text'] }}{% endfor %}")
    assert "Add 1 and 2." in make_renderer(parts)._encoder.decode(make_renderer(parts).prompt([QUESTION]))


def test_a_template_that_shows_no_text_at_all_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="leaves out the text of the message"):
        make_renderer("<|im_start|>{{ messages | length }}<|im_end|>")


def test_template_variables_reach_the_template() -> None:
    config = ModelConfig(path="none", apply_chat_template_kwargs={"enable_thinking": False})
    renderer = Renderer.create(config, tokenizer_of("qwen3"))
    assert renderer._encoder.decode(renderer.prompt([QUESTION])).endswith("<think>\n\n</think>\n\n")
    assert renderer._encoder.decode(renderer.observation([QUESTION])).endswith("<think>\n\n</think>\n\n")
    assert "empty reasoning" in renderer.parity["assistant → user"].detail


def test_a_refused_role_names_the_templates_own_words() -> None:
    with pytest.raises(PromptFailure, match="system, user: System role not supported"):
        renderer_of("gemma").prompt([{"role": "system", "content": "Be brief."}, QUESTION])
    with pytest.raises(PromptFailure, match="roles must alternate"):
        renderer_of("gemma").observation([result("3")])


def test_a_template_that_writes_the_tools_name_asks_for_it() -> None:
    with pytest.raises(PromptFailure, match="tool messages need a name"):
        renderer_of("harmony").observation([{"role": "tool", "content": "3"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([{"content": "hi"}], "message 0 has no role"),
        ([{"role": "user", "content": object()}], "plain JSON"),
        ([{"role": "user"}], "refuses a conversation of user"),
    ],
)
def test_messages_that_cannot_be_rendered_are_prompt_failures(messages: list[Any], words: str) -> None:
    with pytest.raises(PromptFailure, match=words):
        renderer_of("hermes").prompt(messages)


def test_arguments_of_a_call_may_be_json_text() -> None:
    text = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result("3")] for call in (CALL, text)
    ]
    assert renderer_of("hermes").prompt(turns[0]) == renderer_of("hermes").prompt(turns[1])


def test_half_a_surrogate_pair_is_replaced() -> None:
    broken, mended = ([{"role": "tool", "content": text}] for text in ("a\ud800b", "a\ufffdb"))
    assert renderer_of("hermes").observation(broken) == renderer_of("hermes").observation(mended)


def test_decode_leaves_out_the_end_of_turn_and_keeps_other_special_tokens() -> None:
    renderer, tokenizer = renderer_of("mistral"), tokenizer_of("mistral")
    ids = tokenizer.encode('[TOOL_CALLS] [{"name": "add" , "a": 1}]</s>', add_special_tokens=False)
    assert renderer.decode(ids) == '[TOOL_CALLS] [{"name": "add" , "a": 1}]'
    assert renderer.decode(ids[:-1]) == renderer.decode(ids)
    assert renderer.decode([]) == ""
    assert renderer.decode([220, 0xFF - 33]) != ""  # no valid UTF-8, no error


def test_encode_is_the_way_back_from_decode() -> None:
    renderer = renderer_of("hermes")
    assert renderer.decode(renderer.encode("<tool_call>{}</tool_call><|im_end|>")) == "<tool_call>{}</tool_call>"
    assert renderer.encode("<|im_end|>") == renderer.stop_token_ids


def test_stop_ids_come_from_template_tokenizer_and_generation_config(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(eos_token="<|endoftext|>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [330, 355]}')
    config = ModelConfig(path=str(tmp_path), custom_chat_template=template_of("hermes"))
    assert Renderer.create(config, tokenizer).stop_token_ids == (332, 330, 355)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 355}')
    assert Renderer.create(config, tokenizer).stop_token_ids == (332, 330, 355)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        Renderer.create(config, tokenizer)


def test_a_model_whose_turns_never_end_is_a_config_error() -> None:
    config = ModelConfig(path="none", custom_chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match="nothing ends a turn"):
        Renderer.create(config, make_tokenizer())


def test_a_template_for_single_turns_renders_prompts() -> None:
    single = (
        "{% if messages | length > 1 %}{{ raise_exception('One message only') }}{% endif %}Q: {{ messages[0].content }}"
    )
    tokenizer = make_tokenizer(eos_token="<|endoftext|>")
    renderer = Renderer.create(ModelConfig(path="none", custom_chat_template=single), tokenizer)
    assert renderer._encoder.decode(renderer.prompt([QUESTION])) == "Q: Add 1 and 2."
    assert {check.verdict for check in renderer.parity.checks} == {BoundaryVerdict.REFUSED}
    with pytest.raises(PromptFailure, match="One message only"):
        renderer.observation([QUESTION])


def test_a_tokenizer_without_a_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"model\.custom_chat_template") as caught:
        Renderer.create(ModelConfig(path="base-model"), make_tokenizer())
    assert "'base-model' has no chat template" in str(caught.value)


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no users') }}", "{{ messages[9].content.x }}"])
def test_a_template_that_cannot_render_anything_is_a_config_error(template: str) -> None:
    with pytest.raises(ConfigError, match="cannot render a single user message") as caught:
        Renderer.create(ModelConfig(path="none", custom_chat_template=template), make_tokenizer())
    assert caught.value.mistakes[0].key == "model.custom_chat_template"


def test_the_owner_of_a_tokenizer_may_go_on_using_it() -> None:
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    renderer = Renderer.create(ModelConfig(path="none", custom_chat_template=template_of("hermes")), tokenizer)
    before = renderer.observation([result("a longer result")])
    tokenizer("a b c d e f", truncation=True, max_length=2)
    assert renderer.observation([result("a longer result")]) == before


@pytest.mark.parametrize(("side", "kept"), [("left", (3, 4, 5)), ("right", (1, 2, 3)), ("middle", (1, 2, 5))])
def test_truncation_cuts_out_the_named_side(side: Any, kept: tuple[int, ...]) -> None:
    assert truncate([1, 2, 3, 4, 5], 3, side) == kept
    assert truncate([1, 2, 3], 3, side) == (1, 2, 3)
    assert truncate([1, 2, 3], 0, side) == ()
    assert len(truncate(range(9), 1, side)) == 1
