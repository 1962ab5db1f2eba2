"""A model of a real shape with random weights, for measurements on machines that have no model hub.

    PYTHONPATH=. python bench/random_model.py /tmp/qwen-1.5b --shape qwen2.5-1.5b [--device cuda]

Tokenizer and chat template are those of the bundled calculator model; the vocabulary is padded to the shape's own.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import treadle

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES], default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    shape = dict(SHAPES[options.shape])
    bundled = Path(treadle.__file__).parent / "models/tiny-calculator"
    tokens = AutoConfig.from_pretrained(bundled)
    config = AutoConfig.for_model(
        **shape, max_position_embeddings=8192, bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(options.directory)
    for file in bundled.iterdir():
        if file.suffix != ".safetensors" and not (options.directory / file.name).exists():
            shutil.copy(file, options.directory)
    print(f"{options.directory}: {options.shape}, {sum(p.numel() for p in model.parameters()) / 1e6:,.0f} M parameters")


if __name__ == "__main__":
    main()
