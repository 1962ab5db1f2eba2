"""Writing a policy as a Hugging Face directory that others load: weights, config and tokenizer."""

import shutil
from pathlib import Path

from treadle.checkpoint.directory import appearing
from treadle.config.model import ModelConfig
from treadle.errors import MisuseError
from treadle.model.tokenizer import resolve_model_path
from treadle.policy.protocol import Policy

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""Every name under which a tokenizer may keep a part of itself."""


def export(policy: Policy, directory: Path, model: ModelConfig) -> None:
    """Write the policy and its tokenizer into `directory`, which appears when it is whole."""
    if directory.exists():
        raise MisuseError(f"{directory} exists: export to a directory of its own")
    with appearing(directory) as draft:
        policy.export(draft)
        copy_tokenizer(model, draft)


def copy_tokenizer(model: ModelConfig, directory: Path) -> None:
    """Put the files of the model's tokenizer into `directory`."""
    name = "path" if model.tokenizer_path is None else "tokenizer_path"
    given = model.path if model.tokenizer_path is None else model.tokenizer_path
    source = resolve_model_path(given, f"model.{name}", model.origin(name))
    for part in (source / file for file in TOKENIZER_FILES):
        if part.is_dir():
            shutil.copytree(part, directory / part.name)
        elif part.is_file():
            shutil.copyfile(part, directory / part.name)
    if model.custom_chat_template is not None:
        (directory / "chat_template.jinja").write_text(model.custom_chat_template, encoding="utf-8")
