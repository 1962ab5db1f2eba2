"""A tokenizer's directory, loaded without transformers and with it, and everything the two must agree about."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

import treadle
from treadle.data.encoder import HOSTILE
from treadle.model.light_tokenizer import LightTokenizer, load_light_tokenizer

GOLDEN = Path(__file__).parent / "golden"
BUNDLED = Path(treadle.__file__).parent / "models" / "tiny-calculator"
TEXTS = (*HOSTILE, "", "<new> a<new>b <NEW>", "Hello <|im_start|>  world's 12345 e\u0301 क्षि", "a<|endoftext|> b")
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "a < b & 'c' — ü", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}
QUESTION = {"role": "user", "content": "Add 1 and 2."}
ASKED = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
ANSWERED = [*ASKED, {"role": "tool", "content": '{"sum": 3}\n', "name": "add", "tool_call_id": "call00001"}]
CONVERSATIONS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([QUESTION], None),
    ([QUESTION, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"}, QUESTION], None),
    ([QUESTION], [ADD]),
    (ANSWERED, [ADD]),
    ([*ANSWERED, {"role": "assistant", "content": "It is 3."}, {"role": "user", "content": HOSTILE[5]}], [ADD, ADD]),
)


def golden_core() -> Tokenizer:
    return Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))


def save(directory: Path, core: Tokenizer, config: Mapping[str, Any] | None = None, /, **files: Any) -> Path:
    """Write a tokenizer's directory; other files go by their names without the `.json`."""
    core.save(str(directory / "tokenizer.json"))
    for name, content in {"tokenizer_config": config, **files}.items():
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@dataclass(frozen=True)
class Twins:
    """The same directory, loaded without transformers and with it."""

    light: LightTokenizer
    heavy: Any

    @classmethod
    def load(cls, directory: Path) -> "Twins":
        light = load_light_tokenizer(directory)
        assert light is not None, "left to transformers"
        return cls(light, AutoTokenizer.from_pretrained(str(directory), local_files_only=True))

    def assert_same(self) -> None:
        light, heavy = self.light, self.heavy
        assert light.added_tokens_decoder == heavy.added_tokens_decoder
        assert light.special_tokens_map == heavy.special_tokens_map
        assert (light.eos_token_id, light.chat_template) == (heavy.eos_token_id, heavy.chat_template)
        for text in TEXTS:
            for special in (False, True):
                ids = light.encode(text, add_special_tokens=special)
                assert ids == heavy.encode(text, add_special_tokens=special)
                assert light.decode(ids, skip_special_tokens=special) == heavy.decode(ids, skip_special_tokens=special)

    def assert_renders(self, **options: Any) -> None:
        """Compare every conversation; what one refuses, the other must refuse with the same words."""
        for messages, tools in CONVERSATIONS:
            for ask in (False, True):
                given = {"tools": tools, "add_generation_prompt": ask, "tokenize": False, **options}
                light, heavy = (render(tokenizer, messages, given) for tokenizer in (self.light, self.heavy))
                assert light == heavy
                assert self.light.encode(light, add_special_tokens=False) == self.heavy.encode(
                    heavy, add_special_tokens=False
                )


def render(tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(copy.deepcopy(messages), **options))
    except (TemplateError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def added(content: str, **flags: bool) -> dict[str, Any]:
    state: dict[str, Any] = AddedToken(content, **flags).__getstate__()
    return state
