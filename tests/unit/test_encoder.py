"""The encoder's shortcuts change nothing, on tokenizers that make them hard; and a model's directory is found."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import transformers.models.auto.tokenization_auto  # noqa: F401  two seconds, which belong to no test
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.rendering import encode_full
from treadle.config.rollout import ModelConfig
from treadle.data.encoder import HOSTILE, Encoder
from treadle.data.renderer import Renderer
from treadle.data.rendering_parity import BoundaryVerdict
from treadle.errors import ConfigError
from treadle.model import tokenizer as loading
from treadle.model.tokenizer import load_tokenizer, resolve_model_path

GOLDEN = Path(__file__).parents[1] / "golden"
CHATML = (GOLDEN / "templates" / "hermes.jinja").read_text()


def make_tokenizer(*added: AddedToken) -> PreTrainedTokenizerFast:
    core = Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    core.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHATML)


def make_metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Marks the very start of a text, and only that, as SentencePiece models do."""
    words = ["▁", "\n", *map(chr, range(33, 127))]
    core = Tokenizer(models.BPE({word: at for at, word in enumerate(["<unk>", *words])}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHATML)


def special(token: str, **options: bool) -> AddedToken:
    return AddedToken(token, special=True, normalized=False, **options)


def test_text_is_cut_at_the_special_tokens_of_the_template() -> None:
    encoder = Encoder.create(make_tokenizer(), ["<|im_start|>user\nhi<|im_end|>\n"])
    assert list(encoder.cuts) == ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    "rival",
    [
        special("<|im_end|>\n"),
        special("user<|im_"),
        special("<|<|im_end|>"),
        AddedToken("Hello<", special=False, normalized=False),
    ],
)
def test_a_token_that_another_can_claim_is_not_cut_at(rival: AddedToken) -> None:
    encoder = Encoder.create(make_tokenizer(rival), ["<|im_start|>user\nhi<|im_end|>\n"])
    assert "<|im_end|>" not in encoder.cuts


@pytest.mark.parametrize(
    "rival", [special("<|im_end|>\n"), special("zq", single_word=True), special("<mask>", lstrip=True)]
)
def test_observations_are_exact_whatever_tokens_there_are(rival: AddedToken) -> None:
    tokenizer = make_tokenizer(rival)
    renderer = Renderer.create(ModelConfig(path="none"), tokenizer)
    trusting = Renderer.create(ModelConfig(path="none", allow_special_tokens=True), tokenizer)
    for text in (*HOSTILE, "zq <mask> a <mask>zq<|im_end|>\n"):
        conversation = [{"role": "user", "content": text}]
        full = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert list(trusting.prompt(conversation)) == full
        assert list(renderer.prompt(conversation)) == encode_full(tokenizer, conversation)


def test_text_after_a_special_token_is_not_the_start_of_a_text() -> None:
    tokenizer = make_metaspace_tokenizer()
    renderer = Renderer.create(ModelConfig(path="none"), tokenizer)
    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    full = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    observed = renderer.observation(conversation[2:])
    assert tuple(full[-len(observed) :]) == observed
    assert tokenizer.convert_ids_to_tokens(observed[0]) == "\n"
    assert {check.verdict for check in renderer.parity.checks} == {BoundaryVerdict.AGREES}


def test_a_normalizer_sees_the_same_text_in_pieces() -> None:
    core = Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHATML)
    encoder = Encoder.create(tokenizer, ["<|im_start|>user\nhi<|im_end|>\n"])
    for text in HOSTILE:
        whole = f"<|im_start|>{text}<|im_end|>Ａ{text}"
        assert encoder.encode(whole) == tokenizer.encode(whole, add_special_tokens=False)


class Whimsical:
    """A tokenizer whose ids for a word depend on how long the whole text is."""

    is_fast = False
    chat_template = None
    eos_token_id = None
    backend_tokenizer = None
    added_tokens_decoder = MappingProxyType({0: special("<s>"), 1: special("</s>")})

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        parts = re.findall("<s>|</s>|[^<]+|<", text)
        return [("<s>", "</s>").index(part) if part in ("<s>", "</s>") else 2 + len(text) for part in parts]

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        raise NotImplementedError


def test_text_is_not_cut_where_that_would_change_the_ids() -> None:
    encoder = Encoder.create(Whimsical(), ["<s>hi</s>"])
    assert not encoder.cuts
    assert encoder.encode("<s>hi</s>") == [0, 11, 1]


def save_tokenizer(directory: Path) -> Path:
    make_tokenizer().save_pretrained(directory)
    return directory


def test_a_tokenizer_is_loaded_from_its_directory(tmp_path: Path) -> None:
    loaded = load_tokenizer(ModelConfig(path=str(save_tokenizer(tmp_path))))
    assert loaded.encode("<|im_end|>", add_special_tokens=False) == [332]
    elsewhere = load_tokenizer(ModelConfig(path="/no/such/model", tokenizer_path=str(tmp_path)))
    assert elsewhere.eos_token_id == 332


def test_a_renderer_loads_the_tokenizer_itself(tmp_path: Path) -> None:
    renderer = Renderer.create(ModelConfig(path=str(save_tokenizer(tmp_path))))
    assert renderer.stop_token_ids == (332,)


@pytest.mark.parametrize(
    ("path", "problem", "fix"),
    [
        ("/no/such/model", "no model directory '/no/such/model'", "give a directory"),
        (
            "some-org/some-model",
            "no such repository in the local Hugging Face cache",
            "hf download some-org/some-model",
        ),
        ("treadle/nothing", "no bundled model 'treadle/nothing'", "bundled models"),
        ("../a--b/..c", "no model directory", "give a"),
        (__file__, "is a file, not a model directory", "give a directory"),
    ],
)
def test_a_missing_model_fails_at_once(path: str, problem: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelConfig(path=path))
    (mistake,) = caught.value.mistakes
    assert mistake.key == "model.path" and mistake.value == path and "ModelConfig.path" in str(mistake.origin)
    assert problem in mistake.problem and fix in (mistake.fix or "")


def test_a_missing_tokenizer_path_names_its_own_key() -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path"):
        load_tokenizer(ModelConfig(path="/no/such/model", tokenizer_path="/no/such/tokenizer"))


def test_a_directory_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer could be loaded") as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert caught.value.mistakes[0].key == "model.path"


def test_a_bundled_model_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-calculator").mkdir()
    monkeypatch.setattr(loading, "BUNDLED", tmp_path)
    assert resolve_model_path("treadle/tiny-calculator") == tmp_path / "tiny-calculator"
    with pytest.raises(ConfigError, match="did you mean 'treadle/tiny-calculator'"):
        resolve_model_path("treadle/tiny-calculater")


def test_data_imports_without_the_heavy_packages() -> None:
    code = "import sys, treadle.data.renderer, treadle.data.tasks\n"
    code += "print([name for name in ('torch', 'transformers', 'ray', 'pyarrow', 'jinja2') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
