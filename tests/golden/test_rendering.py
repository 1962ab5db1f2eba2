"""What each family of chat templates makes of the same conversation: text, ids, and the renderer's parity.

The files in `rendering/` are the record. `python tests/golden/test_rendering.py` writes them anew; read the diff.
The tokenizer is a byte-level BPE with a handful of merges and the special tokens of all families.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from transformers import PreTrainedTokenizerFast

from treadle.config.rollout import ModelConfig
from treadle.data.renderer import Renderer
from treadle.types import Message

HERE = Path(__file__).parent

SPECIAL: Mapping[str, Mapping[str, str]] = {
    "hermes": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "qwen3": {"eos_token": "<|im_end|>"},
    "glm": {"eos_token": "<|endoftext|>"},
    "harmony": {"eos_token": "<|return|>"},
}
LISTED_STOPS = {"glm": ["<|endoftext|>", "<|user|>", "<|observation|>"], "harmony": ["<|return|>", "<|call|>"]}
"""Stop tokens that a family keeps in generation_config.json."""

QUESTION: Message = {"role": "user", "content": "Add 1 and 2."}
RESULT: Message = {"role": "tool", "content": '{"sum": 3}\n', "name": "add", "tool_call_id": "call00001"}
FOLLOW_UP: Message = {"role": "user", "content": " And 4? "}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def make_renderer(family: str, directory: Path) -> Renderer:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizer.json"), **SPECIAL[family])
    if family in LISTED_STOPS:
        stops = [tokenizer.convert_tokens_to_ids(token) for token in LISTED_STOPS[family]]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    template = (HERE / "templates" / f"{family}.jinja").read_text()
    return Renderer.create(ModelConfig(path=str(directory), custom_chat_template=template), tokenizer)


def record(family: str, directory: Path) -> str:
    renderer = make_renderer(family, directory)
    parts = {
        "prompt": renderer.prompt([QUESTION]),
        "prompt with tools": renderer.prompt([QUESTION], [ADD]),
        "observation: user": renderer.observation([FOLLOW_UP]),
    }
    if family != "gemma":
        parts["observation: tool"] = renderer.observation([RESULT], [ADD])
        parts["observation: tool, tool"] = renderer.observation([RESULT, RESULT], [ADD])
    parity = str(renderer.parity).replace(str(directory), family)
    lines = [f"{name}\n  {renderer._encoder.decode(ids)!r}\n  {list(ids)}" for name, ids in parts.items()]
    return "\n".join([f"stop tokens {list(renderer.stop_token_ids)}", *lines, parity, ""])


@pytest.mark.parametrize("family", SPECIAL)
def test_rendering_is_as_recorded(family: str, tmp_path: Path) -> None:
    recorded = (HERE / "rendering" / f"{family}.txt").read_text(encoding="utf-8")
    assert record(family, tmp_path) == recorded


if __name__ == "__main__":
    (HERE / "rendering").mkdir(exist_ok=True)
    for name in SPECIAL:
        with TemporaryDirectory() as scratch:
            (HERE / "rendering" / f"{name}.txt").write_text(record(name, Path(scratch)), encoding="utf-8")
