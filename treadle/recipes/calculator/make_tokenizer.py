"""Makes the tokenizer of the bundled model: `python -m treadle.recipes.calculator.make_tokenizer DIRECTORY`.

Byte-level, so that any text can be encoded; digits stay single tokens, so that numbers are read digit by digit; and a
few hundred merges learned from calculator conversations, so that a whole tool call is a handful of tokens.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from treadle.recipes.calculator.tasks import draw_sum
from treadle.recipes.calculator.tools import calculate

VOCABULARY = 384
END_OF_TURN = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user\\n' -}}{%- endif -%}
{{- '<tool_response>' + message['content'] + '</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML. Tools are not written out: the model knows its one tool by heart, and short prompts keep a laptop fast."""


def tool_call(expression: str) -> str:
    """A call as the model writes it."""
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def conversations(count: int) -> Iterator[str]:
    """Conversations that solve their sum, as text in the template's form."""
    rng = Random("calculator/tokenizer")
    for _ in range(count):
        task = draw_sum(rng)
        inner = task.text.removeprefix("(").partition(")")[0]
        text = f"user\n{task.prompt}assistant\n{tool_call(inner)}user\n{calculate(inner)}assistant\n"
        yield f"{text}#### {task.value}"


def make_tokenizer() -> Tokenizer:
    """The tokenizer, always the same one."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    parts = (part for text in conversations(512) for part in _untagged(text))
    tokenizer.train_from_iterator(parts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def _untagged(text: str) -> list[str]:
    for tag in TAGS:
        text = text.replace(tag, "\0")
    return [part for part in text.split("\0") if part]


def save(directory: Path) -> None:
    """Write the tokenizer as Hugging Face libraries read it."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
