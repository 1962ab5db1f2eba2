"""The light tokenizer against transformers: same directory, same added tokens, ids, text and renderings."""

import copy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from tests.twins import BUNDLED, GOLDEN, QUESTION, TEXTS, Twins, added, golden_core, save
from treadle.config.rollout import ModelConfig
from treadle.data.renderer import Renderer
from treadle.model.light_tokenizer import load_light_tokenizer

FAMILIES: Mapping[str, Mapping[str, str]] = {
    "hermes": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "glm": {"eos_token": "<|endoftext|>"},
    "harmony": {"eos_token": "<|return|>"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_rendered_and_encoded_alike(family: str, tmp_path: Path) -> None:
    template = (GOLDEN / "templates" / f"{family}.jinja").read_text(encoding="utf-8")
    save(tmp_path, golden_core(), {"tokenizer_class": "PreTrainedTokenizerFast", **FAMILIES[family]})
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    twins = Twins.load(tmp_path)
    twins.assert_same()
    twins.assert_renders()
    twins.assert_renders(enable_thinking=False, bos_token="<|im_start|>")
    assert "Add 1 and 2." in twins.light.apply_chat_template([QUESTION], tokenize=False)


def test_the_bundled_tokenizer_is_the_same() -> None:
    twins = Twins.load(BUNDLED)
    twins.assert_same()
    twins.assert_renders()


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    size = golden_core().get_vocab_size()
    decoder = {
        str(size + 1): added("<NEW>", special=False),
        str(size): added("<new>", special=True, lstrip=True, rstrip=True),
        "332": added("<|im_end|>", special=True, lstrip=True),
    }
    config = {
        "added_tokens_decoder": decoder,
        "eos_token": "<NEW>",
        "pad_token": "<pad>",
        "image_token": "<image>",
        "additional_special_tokens": ["<new>", "<extra>", "<|im_start|>"],
    }
    twins = Twins.load(save(tmp_path, golden_core(), config))
    twins.assert_same()
    tokens = {at: token.content for at, token in twins.light.added_tokens_decoder.items() if at >= size}
    assert list(tokens.values()) == ["<new>", "<NEW>", "<pad>", "<image>", "<extra>"]
    assert twins.light.added_tokens_decoder[size + 1].special and twins.light.eos_token_id == size + 1


def test_a_bos_post_processor_counts_and_flags_about_it_do_not(tmp_path: Path) -> None:
    core = golden_core()
    at = core.token_to_id("<s>")
    core.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", at)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    twins = Twins.load(save(tmp_path, core, config))
    twins.assert_same()
    assert twins.light.encode("a", add_special_tokens=True)[0] == at
    assert twins.light.encode("a", add_special_tokens=False)[0] != at


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_a_normalizer_that_prefixes_a_space_counts(add_prefix_space: bool, tmp_path: Path) -> None:
    words = ["<unk>", "▁", "\n", *map(chr, range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: at for at, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": add_prefix_space, "legacy": True}
    save(tmp_path, core, {**config, "bos_token": "<s>", "eos_token": "</s>"}, config={"model_type": "mistral"})
    twins = Twins.load(tmp_path)
    twins.assert_same()
    assert twins.light.encode("a", add_special_tokens=False) == [vocabulary["▁"], vocabulary["a"]]


TOKENS = ["<|im_end|>", "<new>", "<NEW>", "<s>", "zq", "user"]
FLAGS = st.fixed_dictionaries({}, optional=dict.fromkeys(("lstrip", "rstrip", "normalized", "special"), st.booleans()))


def spelled(token: str, flags: Mapping[str, bool], mark: bool) -> dict[str, Any]:
    return {**added(token, **flags), **({"__type": "AddedToken"} if mark else {})}


NAMED = st.one_of(st.none(), st.sampled_from(TOKENS), st.builds(spelled, st.sampled_from(TOKENS), FLAGS, st.just(True)))
LISTED = st.lists(NAMED.filter(lambda token: token is not None), max_size=3)
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "image_token", "video_token")
DECODER = st.dictionaries(
    st.sampled_from(["330", "332", "400", "401", "410"]),
    st.builds(spelled, st.sampled_from(TOKENS), FLAGS, st.just(False)),
)
CONFIG = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, NAMED),
        "extra_special_tokens": LISTED | st.dictionaries(st.sampled_from(["a_token", "b"]), st.sampled_from(TOKENS)),
        "added_tokens_decoder": DECODER,
        "model_specific_special_tokens": st.dictionaries(st.sampled_from(["a_token", "c"]), st.sampled_from(TOKENS)),
    },
)
OLD_CONFIG = st.fixed_dictionaries(
    {"additional_special_tokens": LISTED}, optional={**dict.fromkeys(NAMES, NAMED), "added_tokens_decoder": DECODER}
)
MAPPED = st.one_of(st.sampled_from(TOKENS), st.builds(spelled, st.sampled_from(TOKENS), FLAGS, st.just(False)))
SPECIAL_MAP = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, MAPPED),
        "extra_special_tokens": st.lists(st.sampled_from(TOKENS), max_size=2),
        "additional_special_tokens": st.lists(st.sampled_from(TOKENS), max_size=2),
    },
)


@settings(max_examples=60, deadline=None)
@given(config=CONFIG | OLD_CONFIG, special_map=st.none() | SPECIAL_MAP)
def test_special_tokens_are_read_as_transformers_reads_them(config: Any, special_map: Any) -> None:
    with TemporaryDirectory() as directory:
        Twins.load(save(Path(directory), golden_core(), config, special_tokens_map=special_map)).assert_same()


@pytest.mark.parametrize(
    ("config", "special_map"),
    [
        ({"added_tokens_decoder": {"332": added("<|im_end|>", special=True)}}, {"eos_token": "<new>"}),
        ({"eos_token": "<s>"}, {"eos_token": added("<new>", lstrip=True)}),
        ({"extra_special_tokens": [], "additional_special_tokens": ["<new>"]}, {}),
        ({"additional_special_tokens": {"new_token": "<new>"}}, {"extra_special_tokens": ["<NEW>"]}),
        ({"additional_special_tokens": ["<NEW>"]}, {"additional_special_tokens": ["<new>"]}),
    ],
)
def test_the_older_file_counts_where_the_newer_is_silent(config: Any, special_map: Any, tmp_path: Path) -> None:
    Twins.load(save(tmp_path, golden_core(), config, special_tokens_map=special_map)).assert_same()


def test_files_without_any_config_will_do(tmp_path: Path) -> None:
    Twins.load(save(tmp_path, golden_core())).assert_same()


NAMED_TEMPLATES = [{"name": name, "template": f"{name}: {{{{ messages[0].content }}}}"} for name in ("default", "rag")]
TOOL_USE = {"name": "tool_use", "template": "{{ tools | tojson(indent=1) }}{{ bos_token }}{{ documents is none }}"}


@pytest.mark.parametrize("templates", [[*NAMED_TEMPLATES, TOOL_USE], NAMED_TEMPLATES, NAMED_TEMPLATES[1:]])
def test_named_templates_mean_what_they_mean_to_transformers(templates: list[Any], tmp_path: Path) -> None:
    twins = Twins.load(save(tmp_path, golden_core(), {"chat_template": templates, "bos_token": "<s>"}))
    assert twins.light.chat_template == twins.heavy.chat_template
    twins.assert_renders(chat_template="rag")
    twins.assert_renders(chat_template="its own: {{ messages | length }}")
    if templates == NAMED_TEMPLATES[1:]:
        with pytest.raises(ValueError, match="no chat template to use; the tokenizer's own are: rag"):
            twins.light.apply_chat_template([QUESTION], tokenize=False)
    else:
        twins.assert_renders()


def test_template_files_come_before_the_field(tmp_path: Path) -> None:
    save(tmp_path, golden_core(), {"chat_template": "field"})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert Twins.load(tmp_path).heavy.chat_template == load_light_tokenizer(tmp_path).chat_template  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("file")
    twins = Twins.load(tmp_path)
    twins.assert_same()
    assert twins.light.chat_template == {"default": "file", "tool_use": "with tools"}
    twins.assert_renders()


TEMPLATES = {
    "generation": "{% set x = 0 %}{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}\n  {{ m.role }}\n{% endfor %}",
    "blank lines": "  {% if true %}\n a\n  {% endif %}\n{% for m in messages %}\n\t{%- set y = m %}\n{% endfor %}b\n",
    "json": "{{ tools | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}",
    "ascii": "{{ '<&>é' | tojson(ensure_ascii=true) }}",
    "separators": "{{ messages | tojson(separators=(',', ':')) }}",
    "options": "{{ max_length is defined }}{{ return_dict is defined }}{{ padding is defined }}",
    "refusal": "{{ raise_exception('no: ' + messages[0].role) }}",
    "undefined": "{{ messages[0].nothing.at.all }}",
    "sandbox": "{{ messages.append(1) }}",
    "underscores": "{{ ''.__class__ }}",
    "syntax": "{% for %}",
    "date": "{{ strftime_now('%Y-%m') }}",
    "escaping": "{{ messages[0].content | e }}{{ '<b>' }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "defined": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ eos_token }}{{ sep_token }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_language_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    twins = Twins.load(save(tmp_path, golden_core(), {"eos_token": "<s>", "chat_template": TEMPLATES[name]}))
    twins.assert_renders()
    twins.assert_renders(documents=[{"title": "t"}], max_length=3, return_dict=True, add_generation_prompt="yes")


def test_options_that_only_transformers_has_are_refused() -> None:
    light = load_light_tokenizer(BUNDLED)
    assert light is not None
    with pytest.raises(ValueError, match="without continue_final_message"):
        light.apply_chat_template([QUESTION], tokenize=False, continue_final_message=True)
    with pytest.raises(ValueError, match="without tokenize"):
        light.apply_chat_template([QUESTION], tokenize=True)
    with pytest.raises(ValueError, match="spaces stay"):
        light.decode([1], clean_up_tokenization_spaces=True)


def test_a_light_tokenizer_is_not_copied(tmp_path: Path) -> None:
    light = load_light_tokenizer(BUNDLED)
    assert copy.deepcopy(light) is light


def test_a_truncating_file_truncates_nothing(tmp_path: Path) -> None:
    core = golden_core()
    core.enable_truncation(2)
    Twins.load(save(tmp_path, core, {})).assert_same()


def test_a_fresh_renderer_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    template = (GOLDEN / "templates" / "hermes.jinja").read_text()
    save(
        tmp_path, golden_core(), {"eos_token": "<|im_end|>", "chat_template": template}, config={"model_type": "llama"}
    )
    code = "import sys\nfrom treadle.config.rollout import ModelConfig\nfrom treadle.data.renderer import Renderer\n"
    code += (
        "for path in sys.argv[1:]: Renderer.create(ModelConfig(path=path)).prompt([{'role': 'user', 'content': 'x'}])\n"
    )
    code += "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    command = [sys.executable, "-c", code, str(tmp_path), "treadle/tiny-calculator"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


def test_both_tokenizers_make_the_same_renderer() -> None:
    heavy = AutoTokenizer.from_pretrained(str(BUNDLED), local_files_only=True)
    config = ModelConfig(path="treadle/tiny-calculator")
    first, second = Renderer.create(config), Renderer.create(config, heavy)
    assert (first.parity, first.stop_token_ids) == (second.parity, second.stop_token_ids)
    for text in TEXTS:
        messages = [{"role": "tool", "content": text}]
        assert first.observation(messages) == second.observation(messages)
        assert first.prompt([QUESTION, *messages]) == second.prompt([QUESTION, *messages])


def test_a_model_that_knows_its_tools_has_prompts_without_them() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    told = Renderer.create(ModelConfig(path="treadle/tiny-calculator"))
    knows = Renderer.create(ModelConfig(path="treadle/tiny-calculator", describe_tools=False))
    assert knows.prompt([QUESTION], [tool]) == told.prompt([QUESTION])
    assert len(told.prompt([QUESTION], [tool])) > len(told.prompt([QUESTION]))
