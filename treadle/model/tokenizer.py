"""Tokenizer loading, the model directory behind `model.path`, and whether two models share a vocabulary

Owns the meaning of `model.path` and `model.tokenizer_path`: a bundled name, a local directory, the run directory of a
training run (its best checkpoint, else its newest), or a repository that is already in the local Hugging Face cache.
Knows nothing about chat templates or weights.
Invariant: nothing here ever opens a connection, so a path that does not exist fails at once.
Vocabularies are compared by what their ids mean, token by token and with those that are special: classes and names of
tokenizers say nothing. Two that are called equal read the same ids as the same text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from treadle.config.rollout import ModelConfig
from treadle.errors import ConfigError, Mistake, nearest

BUNDLED = Path(__file__).parents[1] / "models"
"""Models that ship inside the package; `treadle/<name>` is the directory <name> in here."""


class ChatTokenizer(Protocol):
    """What treadle asks of a tokenizer: that of transformers, or the light one."""

    chat_template: str | dict[str, str] | None
    is_fast: bool
    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    @property
    def backend_tokenizer(self) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], *, tokenize: bool, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


def find_model_path(path: str) -> Path | None:
    """The directory behind a model's path, if there is one on this machine."""
    if not path:
        return None  # not the working directory
    owner, _, name = path.partition("/")
    if owner == "treadle" and name in bundled_models():
        return BUNDLED / name
    local = Path(path).expanduser()
    return (_find_checkpoint(local) or local) if local.is_dir() else _find_in_cache(path)


def _find_checkpoint(run_dir: Path) -> Path | None:
    link = _find_link(run_dir)
    return None if link is None else link.parent / link.readlink()


def _find_link(run_dir: Path) -> Path | None:
    """The link to the checkpoint that a run directory stands for: its best one, else its newest."""
    folder = run_dir / "checkpoints"
    if (run_dir / "config.json").exists() or not folder.is_dir():
        return None
    return next((folder / name for name in ("best", "latest") if (folder / name).is_dir()), None)


def describe_checkpoint(path: str) -> str | None:
    """Which checkpoint a path stands for, and why, where it is a run directory: `0002-step-20, its best checkpoint`."""
    link = _find_link(Path(path).expanduser()) if path else None
    if link is None:
        return None
    return f"{link.readlink().name}, its {'best' if link.name == 'best' else 'newest'} checkpoint"


def resolve_model_path(path: str, key: str = "model.path", origin: object = None) -> Path:
    """The directory behind a model's path; a ConfigError that says what was looked for, if there is none."""
    found = find_model_path(path)
    if found is None:
        missing = "" if not path or path.startswith("treadle/") else "model"
        raise ConfigError([Mistake(key, _missing(path), path, origin, _fix(path), missing)])
    return found


def bundled_models() -> tuple[str, ...]:
    """Names of the models that ship with the package, without the `treadle/`."""
    return tuple(sorted(entry.name for entry in BUNDLED.iterdir() if entry.is_dir())) if BUNDLED.is_dir() else ()


def load_tokenizer(model: ModelConfig) -> ChatTokenizer:
    """The tokenizer of a model, from `model.tokenizer_path` or else from `model.path`."""
    name = "path" if model.tokenizer_path is None else "tokenizer_path"
    given = model.path if model.tokenizer_path is None else model.tokenizer_path
    directory = resolve_model_path(given, f"model.{name}", model.origin(name))
    try:
        return _load(directory, model)
    except (OSError, ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "set model.tokenizer_path to a directory with tokenizer.json and tokenizer_config.json"
        problem = f"no tokenizer could be loaded from {directory}: {reason}"
        raise ConfigError([Mistake(f"model.{name}", problem, given, model.origin(name), fix)]) from error


def _load(directory: Path, model: ModelConfig) -> ChatTokenizer:
    from treadle.model.light_tokenizer import load_light_tokenizer  # its packages are useless without a directory

    light = load_light_tokenizer(directory, trust_remote_code=model.trust_remote_code)
    if light is not None:
        return light
    from transformers import AutoTokenizer  # torch comes with it: seconds, and hundreds of megabytes

    loaded = AutoTokenizer.from_pretrained(
        str(directory), trust_remote_code=model.trust_remote_code, local_files_only=True
    )
    return cast(ChatTokenizer, loaded)


def read_stop_ids(directory: Path) -> tuple[int, ...]:
    """The ids that end generation, as the model's generation_config.json lists them; empty without that file."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError([Mistake("model.path", f"{file} cannot be read: {error}", value=str(directory))]) from error
    return tuple(listed) if isinstance(listed, list) else () if listed is None else (listed,)


def read_vocabulary_size(model: ModelConfig) -> int | None:
    """How many token ids the model of a config embeds, as its config.json says; None where there is none."""
    directory = find_model_path(model.path)
    file = directory / "config.json" if directory else None
    if file is None or not file.is_file():
        return None
    try:
        written = {**json.loads(file.read_text(encoding="utf-8")), **model.override_config}
        size = written.get("vocab_size", (written.get("text_config") or {}).get("vocab_size"))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError([Mistake("model.path", f"{file} cannot be read: {error}", value=str(directory))]) from error
    return size if isinstance(size, int) else None


def _find_in_cache(path: str) -> Path | None:
    """A repository that an earlier download left in the local cache; looks at the disk only."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        files = (try_to_load_from_cache(path, name) for name in ("config.json", "tokenizer_config.json"))
        return next((Path(file).parent for file in files if isinstance(file, str)), None)
    except HFValidationError:
        return None


def _missing(path: str) -> str:
    if not path:
        return "is empty"
    if path.startswith("treadle/"):
        return f"no bundled model {path!r}"
    if Path(path).expanduser().is_file():
        return f"{path!r} is a file, not a model directory"
    return f"no model directory {path!r} here, and no such repository in the local Hugging Face cache"


def _fix(path: str) -> str:
    if path.startswith("treadle/"):
        names = [f"treadle/{name}" for name in bundled_models()]
        return nearest(path, names) or f"bundled models: {', '.join(names) or 'none'}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return f"download it first (hf download {path}), or give a local directory"
    return "give a directory that holds config.json and tokenizer.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a tokenizer mean."""

    ids: Mapping[str, int]
    special: Mapping[str, int]

    @classmethod
    def of(cls, model: ModelConfig) -> "Vocabulary":
        """The vocabulary of a model's tokenizer."""
        tokenizer = load_tokenizer(model)
        ids = tokenizer.backend_tokenizer.get_vocab() if tokenizer.is_fast else cast(Any, tokenizer).get_vocab()
        added = tokenizer.added_tokens_decoder
        return cls(ids, {token.content: at for at, token in added.items() if token.special})

    def difference(self, other: "Vocabulary") -> str | None:
        """Where the two differ, in words; None where they do not."""
        if self.ids != other.ids:
            named = sorted({*self.ids, *other.ids}, key=lambda token: (self.ids.get(token, -1), token))
            differing = [token for token in named if self.ids.get(token) != other.ids.get(token)]
            first = differing[0]
            return (
                f"{len(self.ids):,} tokens and {len(other.ids):,}, of which {len(differing):,} differ: {first!r} is "
                f"{self.ids.get(first, 'absent')} in one and {other.ids.get(first, 'absent')} in the other"
            )
        if self.special != other.special:
            unlike = sorted({*self.special.items()} ^ {*other.special.items()})
            return f"the special tokens differ: {unlike[0][0]!r} is special in one of them alone"
        return None


def require_same_vocabulary(model: ModelConfig, path: str, key: str, origin: object = None) -> None:
    """Refuse another model, at `path` by the config key `key`, whose tokenizer gives other ids than the policy's."""
    resolve_model_path(path, key, origin)
    other = ModelConfig(path=path, trust_remote_code=model.trust_remote_code)
    if (difference := Vocabulary.of(model).difference(Vocabulary.of(other))) is not None:
        problem = f"its tokenizer is not that of model.path, so its probabilities are of other tokens: {difference}"
        raise ConfigError([Mistake(key, problem, path, origin, "give a model with the same tokenizer")])
