"""Rows of supervised fine-tuning, against the whole rendering of chat templates as models ship them."""

import pytest

from tests.golden.test_real_templates import NAMES, QUESTION, TOOL, renderer_of
from treadle.data.task_files import ChatExample
from treadle.errors import PromptFailure
from treadle.trainer.sft_data import lay_out

CALL = {"id": "abcDEF123", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Done, 3."},
)
CALLS = (
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "abcDEF123", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
)

OPENS_REASONING = {"deepseek_r1_distill", "deepseekv3", "nemotron_3_nano"}
"""Headers ask for reasoning, and the template writes turns of the past without it."""
KEEPS_REASONING = {"qwen3", "qwen3_5_think"}
"""Templates that take an empty reasoning out of earlier turns; a session keeps what was sampled."""
ENDS_OTHERWISE = {"gptoss", "glm4moe"}
"""Templates that end a turn of the past with another token than the last one."""


def learned(row) -> list[tuple[int, ...]]:
    """The tokens of each turn that has a loss."""
    turns: list[list[int]] = [[]]
    for token, counts in zip(row.ids, row.mask, strict=True):
        if counts:
            turns[-1].append(token)
        elif turns[-1]:
            turns.append([])
    return [tuple(turn) for turn in turns if turn]


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_the_whole_rendering_up_to_its_last_turn(name):
    renderer = renderer_of(name)
    row = lay_out(ChatExample("it", CHAT), renderer, ())
    whole = tuple(renderer._encoder.encode(renderer._template.render(CHAT, (), ask=False)))
    ids = (*row.prompt_ids, *row.ids)
    if name in OPENS_REASONING | KEEPS_REASONING | ENDS_OTHERWISE:
        assert whole[: len(row.prompt_ids) - 4] == row.prompt_ids[:-4]
    else:
        assert whole[: len(ids)] == ids


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_that_are_learned_are_the_turns_and_their_ends(name):
    renderer = renderer_of(name)
    row = lay_out(ChatExample("it", CHAT), renderer, ())
    turns = learned(row)
    texts = [renderer._encoder.decode(turn[:-1]) for turn in turns]
    assert [text.endswith(said) for text, said in zip(texts, ("Good day.", "Done, 3."), strict=True)] == [True, True]
    assert all(turn[-1] in renderer.stop_token_ids for turn in turns)
    if name in OPENS_REASONING:
        assert texts[0] == "\n</think>\n\nGood day.", "the reasoning that the header opened is closed"


@pytest.mark.parametrize("name", sorted({*NAMES} - OPENS_REASONING - {"lfm2"}))
def test_calls_are_learned_as_the_template_writes_them(name):
    renderer = renderer_of(name)
    row = lay_out(ChatExample("it", CALLS), renderer, (TOOL,))
    call, answer = (renderer._encoder.decode(turn) for turn in learned(row))
    assert "add" in call and "3" not in call
    assert "It is 3." in answer


@pytest.mark.parametrize("name", sorted({*OPENS_REASONING, "lfm2"}))
def test_calls_that_a_template_cannot_show_are_refused(name):
    with pytest.raises(PromptFailure, match="the chat template"):
        lay_out(ChatExample("it", CALLS), renderer_of(name), (TOOL,))


def test_a_header_that_ends_a_turn_is_learned_as_its_end():
    """GLM ends a turn with the header of the next message."""
    renderer = renderer_of("glm4moe")
    spelled = renderer._encoder.decode
    turns = [spelled([turn[-1]]) for turn in learned(lay_out(ChatExample("it", CALLS), renderer, (TOOL,)))]
    assert turns[0] == "<|observation|>"
    assert spelled([learned(lay_out(ChatExample("it", CHAT), renderer, ()))[0][-1]]) == "<|user|>"


def test_text_that_spells_the_end_of_a_turn_is_refused():
    said = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a <|im_end|> b"})
    with pytest.raises(PromptFailure, match=r"spells out '<\|im_end\|>'"):
        lay_out(ChatExample("it", said), renderer_of("qwen2_5"), ())


def test_a_turn_of_weight_0_is_read_and_not_learned():
    renderer = renderer_of("qwen2_5")
    muted = (CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:])
    row, plain = (lay_out(ChatExample("it", said), renderer, ()) for said in (muted, CHAT))
    assert row.ids == plain.ids and learned(row) == learned(plain)[1:]
