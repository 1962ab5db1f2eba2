"""Which directories the light tokenizer takes: what transformers' classes make of them, and what is left to it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from tests.twins import Twins, added, golden_core, save
from treadle.config.rollout import ModelConfig
from treadle.errors import ConfigError
from treadle.model import tokenizer_config
from treadle.model.light_tokenizer import load_light_tokenizer
from treadle.model.tokenizer import load_tokenizer
from treadle.model.tokenizer_config import PLAIN, REBUILT, REGISTERED, name_class

QWEN2_WORDS = REBUILT["Qwen2Tokenizer"].pre_tokenizer["pretokenizers"][0]["pattern"]["Regex"]
QWEN3_5_WORDS = REBUILT["Qwen3_5Tokenizer"].pre_tokenizer["pretokenizers"][0]["pattern"]["Regex"]


def qwen_core(words: str = QWEN2_WORDS) -> Tokenizer:
    """The pipeline of Qwen's files around the golden vocabulary."""
    whole = json.loads(golden_core().to_str())
    whole["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    core = Tokenizer.from_str(json.dumps(whole))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    core.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    core.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return core


def gemma_core() -> Tokenizer:
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "\n", *map(chr, range(33, 127)), "▁a", "ab"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {word: at for at, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in words[:4]])
    return core


QWEN_CONFIG = {"bos_token": None, "unk_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def decoder_of(core: Tokenizer) -> dict[str, Any]:
    return {str(at): token.__getstate__() for at, token in core.get_added_tokens_decoder().items()}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("name", "model_type", "core"),
    [
        ("Qwen2Tokenizer", "qwen2", qwen_core()),
        ("Qwen2TokenizerFast", "qwen3", qwen_core()),
        ("PreTrainedTokenizerFast", "qwen2", qwen_core()),
        (None, "qwen3_moe", qwen_core()),
        ("Qwen2Tokenizer", "qwen3_5", qwen_core(QWEN3_5_WORDS)),
        ("GemmaTokenizer", "gemma3_text", gemma_core()),
        ("GemmaTokenizerFast", "gemma2", gemma_core()),
    ],
)
def test_a_class_that_builds_anew_is_matched(
    name: str | None, model_type: str, core: Tokenizer, listed: bool, tmp_path: Path
) -> None:
    config: dict[str, Any] = {} if name is None else {"tokenizer_class": name}
    config |= {"added_tokens_decoder": decoder_of(core)} if listed else {}
    config |= QWEN_CONFIG if "qwen" in model_type and listed else {}
    twins = Twins.load(save(tmp_path, core, config, config={"model_type": model_type}))
    twins.assert_same()
    assert type(twins.heavy).__name__ in REBUILT


def test_special_tokens_of_qwen2_lose_their_flags(tmp_path: Path) -> None:
    core = qwen_core()
    core.add_tokens([AddedToken("<|im_end|>", lstrip=True, special=True, normalized=False)])
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": decoder_of(core)}
    twins = Twins.load(save(tmp_path, core, config, config={"model_type": "qwen2"}))
    twins.assert_same()
    assert not twins.light.added_tokens_decoder[332].lstrip


def with_parts(**parts: Any) -> Tokenizer:
    core = qwen_core()
    for part, value in parts.items():
        setattr(core, part, value)
    return core


@pytest.mark.parametrize(
    ("core", "config"),
    [
        (golden_core(), {}),
        (qwen_core(QWEN3_5_WORDS), {}),
        (with_parts(normalizer=None), {}),
        (with_parts(decoder=decoders.Fuse()), {}),
        (with_parts(model=models.BPE({"a": 0, "b": 1}, [], ignore_merges=True)), {}),
        (with_parts(model=models.WordLevel({"a": 0}, "a")), {}),
        (qwen_core(), {"added_tokens_decoder": {"332": added("<|im_end|>", special=True)}}),
    ],
)
def test_a_class_that_would_build_something_else_is_left_to_transformers(
    core: Tokenizer, config: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, core, {"tokenizer_class": "Qwen2Tokenizer", **config}, config={"model_type": "qwen2"})
    assert load_light_tokenizer(tmp_path) is None


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", None])
@pytest.mark.parametrize("model_type", ["llama", "glm4", "gemma2", "mistral", "no_such_model", None])
def test_plain_classes_are_those_of_transformers(named: str | None, model_type: str | None, tmp_path: Path) -> None:
    config = {"tokenizer_class": named} if named else {}
    save(tmp_path, golden_core(), config, config={"model_type": model_type} if model_type else None)
    light = load_light_tokenizer(tmp_path)
    heavy = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    if light is not None:
        assert type(heavy).__name__ == PLAIN
        Twins(light, heavy).assert_same()
    assert (light is None) == (named is None and model_type in ("gemma2", "no_such_model"))


def test_the_tables_are_those_of_transformers() -> None:
    theirs = tokenization_auto.TOKENIZER_MAPPING_NAMES
    incorrect = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    mapped = {kind: PLAIN if theirs[kind] == "MistralCommonBackend" else theirs[kind] for kind in REGISTERED}
    assert mapped == dict(REGISTERED)
    assert {kind for kind in incorrect if theirs[kind] != PLAIN} == tokenizer_config.FORCED
    assert tokenization_auto.CONFIG_MAPPING_NAMES.keys() - theirs.keys() >= tokenizer_config.UNREGISTERED


@pytest.mark.parametrize(
    ("config", "model", "name"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "deepseek_v3"}, PLAIN),
        ({"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "llama"}, "LlamaTokenizer"),
        ({"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "gpt2"}, None),
        ({"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "qwen3"}, "LlamaTokenizer"),
        ({"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "qwen2"}, "Qwen2Tokenizer"),
        ({}, {"tokenizer_class": "GPT2Tokenizer"}, None),
        ({}, {"model_type": "gpt2"}, None),
    ],
)
def test_the_class_depends_on_both_files(config: dict[str, Any], model: dict[str, Any], name: str | None) -> None:
    assert name_class(config, model) == name


HEAVY: tuple[dict[str, Any], ...] = (
    {"auto_map": {"AutoTokenizer": ["a.B", None]}},
    {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]},
    {"fix_mistral_regex": True},
    {"init_inputs": ["x"]},
    {"split_special_tokens": True},
    {"backend": "sentencepiece"},
    {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True},
    {"tokenizer_class": "GPT2Tokenizer"},
    {"tokenizer_class": "NoSuchTokenizer"},
    {"eos_token": {"content": "<s>"}},
    {"extra_special_tokens": "<s>"},
    {"added_tokens_decoder": {"0": "<s>"}},
    {"chat_template": [{"text": "nameless"}]},
    {"chat_template": {"default": "a map"}},
)


@pytest.mark.parametrize("config", HEAVY)
def test_a_config_that_asks_for_more_is_left_to_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    assert load_light_tokenizer(save(tmp_path, golden_core(), config)) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", "{"),
        ("tokenizer_config", "[]"),
        ("config", "{"),
        ("special_tokens_map", "3"),
        ("tekken", "{}"),
        ("added_tokens", "{}"),
    ],
)
def test_files_that_ask_for_more_are_left_to_transformers(name: str, content: str, tmp_path: Path) -> None:
    save(tmp_path, golden_core(), {})
    assert load_light_tokenizer(tmp_path) is not None
    (tmp_path / f"{name}.json").write_text(content)
    assert load_light_tokenizer(tmp_path) is None


def test_the_core_decides_too(tmp_path: Path) -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    assert load_light_tokenizer(save(tmp_path, core, {"clean_up_tokenization_spaces": True})) is None
    assert load_light_tokenizer(save(tmp_path, core, {"clean_up_tokenization_spaces": False})) is not None
    core.enable_padding(pad_token="[UNK]")
    assert load_light_tokenizer(save(tmp_path, core, {})) is None
    assert load_light_tokenizer(save(tmp_path, core, {"pad_token": None})) is not None


def test_remote_code_that_is_trusted_is_left_to_transformers(tmp_path: Path) -> None:
    save(tmp_path, golden_core(), {}, config={"auto_map": {"AutoConfig": "a.B"}})
    assert load_light_tokenizer(tmp_path, trust_remote_code=True) is None
    assert load_light_tokenizer(tmp_path) is not None


@pytest.mark.parametrize("key", ["model_name", "configuration_files"])
def test_a_model_config_that_points_elsewhere_is_left_to_transformers(key: str, tmp_path: Path) -> None:
    save(tmp_path, golden_core(), {}, config={key: ["config.4.0.0.json"]})
    assert load_light_tokenizer(tmp_path) is None


def test_a_directory_that_is_left_to_transformers_still_loads(tmp_path: Path) -> None:
    save(tmp_path, golden_core(), {"tokenizer_class": "GPT2Tokenizer"})
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert type(loaded).__name__ == "GPT2Tokenizer"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "no tokenizer could be loaded"),
        ("tokenizer_config.json", '{"eos_token": 3}', "Special token eos_token has to be"),
    ],
)
def test_a_broken_file_is_a_config_error(name: str, content: str, words: str, tmp_path: Path) -> None:
    save(tmp_path, golden_core(), {})
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert caught.value.mistakes[0].key == "model.path"
