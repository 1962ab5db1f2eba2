"""Chat templates as models ship them: every role boundary renders right, or is refused by name.

The files in `rendering/trl/` are the record. `python tests/golden/test_real_templates.py` writes them anew; read the
diff. The tokenizer is the one of `test_rendering`, with the special tokens that each template spells.
"""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from transformers import PreTrainedTokenizerFast

from treadle.config.rollout import ModelConfig, MultiTurnConfig
from treadle.data.renderer import Renderer
from treadle.data.rendering_parity import BoundaryVerdict
from treadle.errors import ConfigError
from treadle.rollout.parsers import PARSERS, parser
from treadle.rollout.startup_checks import check_template

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "templates" / "trl").glob("*.jinja"))

ENDS = {
    **{name: ["<｜end▁of▁sentence｜>"] for name in ["deepseekv3", "deepseek_r1_distill"]},
    **{name: ["<eos>"] for name in ["gemma", "gemma3"]},
    **{name: ["<eos>", "<turn|>", "<|tool_response>"] for name in ["gemma4_v2", "gemma4_v5"]},
    **{name: ["<|eot_id|>"] for name in ["llama3", "llama3_1", "llama3_2"]},
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "phi3_5": ["<|endoftext|>", "<|end|>"],
}
"""What ends a turn, where that is not `<|im_end|>`: the eos token, then what generation_config.json adds."""

FORMATS = {
    **dict.fromkeys(["qwen2_5", "qwen3", "qwen3_instruct_2507"], "hermes"),
    **dict.fromkeys(["qwen3_5_think", "nemotron_3_nano"], "qwen3_coder"),
    **dict.fromkeys(["llama3_1", "llama3_2"], "llama3_json"),
    "glm4moe": "glm",
    "gptoss": "gpt-oss",
    **dict.fromkeys(["gemma4_v2", "gemma4_v5", "lfm2", "lfm2_2_5"], None),
}
"""The tool-call format that a template writes; None where no parser reads it. All others ignore tools."""

SPELLED = re.compile(r"<\|[\w-]+\|?>|<[\w-]+\|>|<｜[^<>｜\s]+｜>|<(?:start|end)_of_\w+>")
EXTRA = {"glm4moe": ["<|system|>", "<|user|>", "<|assistant|>"], "phi3_5": ["<|system|>", "<|user|>", "<|assistant|>"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
    },
}
QUESTION = {"role": "user", "content": "Add 1 and 2."}


@cache
def renderer_of(name: str) -> Renderer:
    template = (HERE / "templates" / "trl" / f"{name}.jinja").read_text(encoding="utf-8")
    ends = ENDS.get(name, ["<|im_end|>"])
    spelled = sorted({*SPELLED.findall(template), *EXTRA.get(name, ()), *ends})
    begin = "<bos>" if name.startswith("gemma") else "<s>"
    file = str(HERE / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=file, eos_token=ends[0], bos_token=begin, additional_special_tokens=spelled
    )
    directory = Path(mkdtemp(prefix=name))
    stops = tokenizer.convert_tokens_to_ids(ends)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return Renderer.create(ModelConfig(path=str(directory), custom_chat_template=template), tokenizer)


def record(name: str) -> str:
    renderer = renderer_of(name)
    readers = [known for known in PARSERS if reads(known, renderer.parity.call)]
    parts = {
        "prompt with tools": renderer._encoder.decode(renderer.prompt([QUESTION], [TOOL])),
        "a call": renderer.parity.call,
        "read by": ", ".join(readers) or "no format",
    }
    parity = str(renderer.parity).replace(renderer.parity.model, name)
    text = "\n".join([*(f"{part}\n  {words!r}" for part, words in parts.items()), parity, ""])
    return re.sub(r"\d{4}-\d\d-\d\d|\d\d [A-Z][a-z]{2} 20\d\d", "TODAY", text)


def reads(format_name: str, text: str) -> bool:
    return any(call.name == "zq_probe" and not call.problem for call in parser(format_name).parse(text).calls)


@pytest.mark.parametrize("name", NAMES)
def test_rendering_is_as_recorded(name: str) -> None:
    assert record(name) == (HERE / "rendering" / "trl" / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_boundary_renders_right_or_is_refused_by_name(name: str) -> None:
    for check in renderer_of(name).parity.checks:
        if name == "gemma4_v5" and "tool" in check.boundary and "calls" not in check.boundary:
            continue  # results that follow no call: its turns go on after calls only
        assert check.verdict is not BoundaryVerdict.DIFFERS, check
        assert check.verdict is not BoundaryVerdict.REFUSED or "the chat template" in check.detail


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_shown_or_written_and_results_come_back(name: str) -> None:
    renderer = renderer_of(name)
    shown = renderer._encoder.decode(renderer.prompt([QUESTION], [TOOL]))
    assert "add" in shown and "Adds numbers." in shown
    assert renderer.parity.shows_tools is (name in FORMATS)
    result = {"role": "tool", "content": "the sum is 3", "name": "add", "tool_call_id": "call00001"}
    assert "the sum is 3" in renderer._encoder.decode(renderer.observation([result], [TOOL]))


@pytest.mark.parametrize("name", NAMES)
def test_the_format_that_goes_with_a_template_is_known(name: str) -> None:
    parity = renderer_of(name).parity
    expected = FORMATS.get(name, "hermes")
    tools = ("json:dumps",)
    if expected is not None:
        assert reads(expected, parity.call)
        notes = check_template(parity, MultiTurnConfig(tools=tools, format=expected))
        assert not any("does not read calls" in note for note in notes)
        assert any("ignores tools" in note for note in notes) is (name not in FORMATS)
    if name in FORMATS:
        notes = check_template(parity, MultiTurnConfig(tools=tools, format="kimi"))
        assert not parity.call or any("kimi does not read calls" in note for note in notes)
    else:
        with pytest.raises(ConfigError, match="ignores tools") as caught:
            check_template(parity, MultiTurnConfig(tools=tools, format="kimi"))
        assert caught.value.mistakes[0].key == "rollout.multi_turn.format"


def test_a_turn_of_gpt_oss_ends_once() -> None:
    renderer = renderer_of("gptoss")
    assert not renderer._encoder.decode(renderer.observation([QUESTION])).startswith("<|end|>")
    assert "writes '<|end|>' there" in renderer.parity["assistant → user"].detail


def test_deepseek_gets_arguments_as_text() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "3"}
    shown = renderer_of("deepseekv3")._encoder.decode(renderer_of("deepseekv3").prompt([QUESTION, turn, result]))
    assert '<｜tool▁sep｜>add\n```json\n{"a": 1}\n```' in shown


if __name__ == "__main__":
    for each in NAMES:
        (HERE / "rendering" / "trl" / f"{each}.txt").write_text(record(each), encoding="utf-8")
