"""What keys of `model` change: in the ids of a prompt, and in whether a model is loaded at all."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effects.cases import Case, config_cases, configured
from tests.effects.models import tiny_model
from tests.rollouts import save_model
from treadle.data.renderer import Renderer
from treadle.errors import TreadleError
from treadle.model import parity
from treadle.model.load import load_causal_model, load_model_config

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ mood }}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MESSAGES = ({"role": "user", "content": "What does <|im_end|> mean?"},)
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CODE = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own"
"""


def rendered(directory: Path, **keys: Any) -> Any:
    """The ids of a prompt with a tool; or why there are none."""
    other = save_model(directory / "other").path
    Path(other, "chat_template.jinja").write_text(PLAIN + HEADER)
    if keys.get("model.tokenizer_path"):
        keys["model.tokenizer_path"] = other
    path = save_model(directory / "model").path
    try:
        renderer = Renderer.create(configured("rollout: {}\n", {"model.path": path, **keys}).model)
        return renderer.prompt(MESSAGES, (TOOL,))
    except TreadleError as error:
        return str(error)


def loaded(directory: Path, **keys: Any) -> Any:
    """A model whose directory has code of its own; or why it is not loaded."""
    shutil.copytree(tiny_model(), directory / "model")
    settings = json.loads((directory / "model" / "config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (directory / "model" / "config.json").write_text(json.dumps(settings))
    (directory / "model" / "own.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(directory / "modules"))
        try:
            model = configured("rollout: {}\n", {"model.path": str(directory / "model"), **keys}).model
            return type(load_model_config(model)).__name__
        except TreadleError as error:
            return str(error)


def with_parity(directory: Path, **keys: Any) -> list[str]:
    """The parity findings that loading a model leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "CACHE", directory / "parity")
        model = configured("rollout: {}\n", {"model.path": str(tiny_model()), **keys}).model
        load_causal_model(model, dtype=torch.float32, device=torch.device("cpu"), longest=64)
    return sorted(path.name for path in directory.rglob("*.json"))


IGNORANT = {"model.custom_chat_template": PLAIN + HEADER}
EFFECTS: dict[str, Case] = {
    **config_cases(
        "model",
        rendered,
        *(("allow_special_tokens", False, True), ("tokenizer_path", None, "other")),
        ("custom_chat_template", None, PLAIN + HEADER),
        ("apply_chat_template_kwargs", {}, {"mood": "!"}, IGNORANT),
        ("describe_tools", True, False, IGNORANT),
    ),
    **config_cases("model", loaded, ("trust_remote_code", False, True)),
    **config_cases("model", with_parity, ("parity_check", False, True)),
}
