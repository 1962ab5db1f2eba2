"""Light tokenizer: the Rust core and a Jinja chat template, without transformers and so without torch.

`AutoTokenizer` takes seconds and hundreds of megabytes, nearly all of it for the import of torch. A rollout needs
ids, text and a chat template, in every process. So `load_light_tokenizer` does what `AutoTokenizer` does, for the
directories where that is known, and leaves all others to it, whole. The rule:

- tokenizer.json is there, and the class that transformers would pick (see `tokenizer_config`) either takes that file
  as it is, or builds exactly what the file holds already.
- Tokens that only tokenizer_config.json or special_tokens_map.json know are added, in transformers' order.
  `add_bos_token` and `add_eos_token` mean nothing beside a tokenizer.json: its own post-processor counts. Neither does
  `add_prefix_space`, except to a class that builds anew, and then it must be what the file holds.
- Left to transformers: remote code (`auto_map`), tekken.json, an added_tokens.json that is still in use, versioned
  files, special tokens that are to be split, spaces that are to be cleaned up, constructor arguments, and whatever
  does not look as expected, so that the words about a broken file are transformers' own.

Chat templates are rendered in the Jinja environment that they are written for: a sandbox that changes nothing it is
given, blocks that leave no blank lines behind, `break` and `continue`, a `tojson` that writes plain JSON, and the few
names that templates expect to find.

Knows nothing about messages beyond handing them to the template.
Invariants: a tokenizer that is loaded here gives the ids, the text and the renderings of the one `AutoTokenizer` loads;
the same template and variables give the text that `apply_chat_template` of transformers gives.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from treadle.model.tokenizer_config import (
    DECODER,
    PLAIN,
    REBUILT,
    SpecialTokens,
    TokenizerBuild,
    name_class,
    read_special_tokens,
)

CACHED_TEMPLATES = 64


@lru_cache(CACHED_TEMPLATES)
def compile_template(text: str) -> Template:
    """A template that can be rendered any number of times, from any thread."""
    return _environment().from_string(text)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said. The mark itself writes nothing; names set inside stay inside."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads it as it stands

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _format_now
    return environment


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML minds; a model should read the JSON as it is."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(format: str) -> str:
    return datetime.now().strftime(format)


HEAVY_KEYS = (
    "auto_map",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    "fast_tokenizer_files",
    "fix_mistral_regex",
    "init_inputs",
    "split_special_tokens",
)
"""Keys of tokenizer_config.json that only transformers can follow, unless they are empty or false."""

TOKEN_OPTIONS = ("max_length", "padding", "return_dict", "return_tensors", "tokenizer_kwargs", "truncation")
"""Options of `apply_chat_template` that change ids, hence nothing where it writes text."""
HEAVY_OPTIONS = ("continue_final_message", "return_assistant_tokens_mask")


class LightTokenizer:
    """A chat tokenizer without transformers. Nothing about it changes once it is loaded."""

    is_fast = True

    def __init__(
        self, core: Tokenizer, special_tokens: Mapping[str, str], chat_template: str | dict[str, str] | None
    ) -> None:
        self.backend_tokenizer = core
        self.special_tokens_map = special_tokens
        self.chat_template = chat_template
        eos_token = special_tokens.get("eos_token")
        self.eos_token_id = None if eos_token is None else core.token_to_id(eos_token)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as text. Other options are variables of the template, and come before special tokens."""
        heavy = [name for name in HEAVY_OPTIONS if variables.pop(name, False)]
        if tokenize or heavy:
            raise ValueError(f"chat templates are rendered as text here, without {', '.join(heavy) or 'tokenize'}")
        for name in TOKEN_OPTIONS:
            variables.pop(name, None)
        return compile_template(self._choose_template(chat_template, tools is not None)).render(
            messages=conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables},
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        if clean_up_tokenization_spaces:
            raise ValueError("spaces stay as they are here")
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LightTokenizer":
        """It is never changed, so a copy is the tokenizer itself."""
        return self

    def _choose_template(self, given: str | None, tools: bool) -> str:
        """A template that was given, by its text or by its name, or else the one for this kind of conversation."""
        if not isinstance(self.chat_template, dict):
            chosen = given if given is not None else self.chat_template
        elif given is not None:
            chosen = self.chat_template.get(given, given)
        else:
            kinds = ("tool_use", "default") if tools else ("default",)
            chosen = next((self.chat_template[kind] for kind in kinds if kind in self.chat_template), None)
        if chosen is None:
            names = ", ".join(self.chat_template) if isinstance(self.chat_template, dict) else "none"
            raise ValueError(f"no chat template to use; the tokenizer's own are: {names}")
        return chosen


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What the small files of a directory say about its tokenizer."""

    config: Mapping[str, Any]
    build: TokenizerBuild | None
    tokens: SpecialTokens
    template: str | dict[str, str] | None

    @classmethod
    def read(cls, directory: Path, *, trust_remote_code: bool) -> "_Recipe | None":
        """None where only transformers can follow them."""
        config, model = (_read_json(directory / name) for name in ("tokenizer_config.json", "config.json"))
        name = name_class(config, model)
        heavy_keys = ("configuration_files", "model_name", *(["auto_map"] if trust_remote_code else ()))
        if name not in (PLAIN, *REBUILT) or any(model.get(key) for key in heavy_keys):
            return None
        if _needs_transformers(directory, config):
            return None
        build = REBUILT.get(name)
        special_map = _read_json(directory / "special_tokens_map.json")
        tokens = read_special_tokens(config, special_map, {} if build is None else build.defaults)
        return cls(config, build, tokens, _read_template(directory, config))

    def suits(self, core: Tokenizer) -> bool:
        """Can this core be made into what transformers makes of it by adding tokens alone?"""
        cleans_up = bool(self.config.get("clean_up_tokenization_spaces")) and not isinstance(core.model, BPE)
        names_padding = core.padding is None or "pad_token" in self.config
        return not cleans_up and names_padding and (self.build is None or self.build.matches(core, self.tokens))

    def finish(self, core: Tokenizer) -> LightTokenizer:
        core.no_truncation()
        core.no_padding()
        self.tokens.add_to(core)
        if self.build is not None and self.build.repeats:
            self.tokens.repeat_on(core)
        return LightTokenizer(core, self.tokens.variables, self.template)


def load_light_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> LightTokenizer | None:
    """The tokenizer in a directory; None where only transformers knows how to load it.

    A ValueError means that tokenizer.json cannot be read by any loader.
    """
    file = directory / "tokenizer.json"
    try:
        recipe = _Recipe.read(directory, trust_remote_code=trust_remote_code) if file.is_file() else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    if recipe is None:
        return None
    core = _load_core(file)
    return recipe.finish(core) if recipe.suits(core) else None


def _load_core(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust core has no narrower type
        raise ValueError(f"{file.name} cannot be read: {error}") from error


def _needs_transformers(directory: Path, config: Mapping[str, Any]) -> bool:
    adds_by_file = DECODER not in config and (directory / "added_tokens.json").is_file()
    return (
        any(config.get(key) for key in HEAVY_KEYS)
        or config.get("backend") not in (None, "tokenizers")
        or adds_by_file
        or (directory / "tekken.json").is_file()
    )


def _read_json(file: Path) -> Mapping[str, Any]:
    """The object in a file; empty if there is no such file."""
    value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold an object")
    return value


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Template files come before the field of tokenizer_config.json, which holds one template or a list of them."""
    main = directory / "chat_template.jinja"
    files = {"default": main} if main.is_file() else {}
    files |= {file.stem: file for file in (directory / "additional_chat_templates").glob("*.jinja")}
    if files:
        texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        return texts["default"] if list(texts) == ["default"] else texts
    field = config.get("chat_template")
    if isinstance(field, list):
        return {entry["name"]: entry["template"] for entry in field}
    if field is not None and not isinstance(field, str):
        raise ValueError("chat_template must be a text or a list of named texts")
    return field
