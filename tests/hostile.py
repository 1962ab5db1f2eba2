"""Hostile model outputs: made from a seed, and put through everything that reads or prints what a model wrote.

Texts are mixtures of tags of all tool-call formats, special tokens, JSON in pieces, escapes of terminals, markup, odd
characters, numbers, and floods of any of these.
"""

import io
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from treadle.config.model import ModelConfig
from treadle.data.renderer import Renderer
from treadle.model.tokenizer import load_tokenizer
from treadle.reward.builtin import exact_match, format, number_match
from treadle.reward.builtin.tag import read_tag
from treadle.rollout.parsers import MAX_CALLS, PARSERS, parser
from treadle.terminal import cell, make_console, printable

PIECES = (
    *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<function=", "</function>", "<parameter=", "</parameter>", '<invoke name="', "</invoke>", '">', "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", "<|message|>", "<|call|>", "to=f "),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|channel|>", "<|action_end|>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "function", "\n```json\n", "```", "[CALL_ID]"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<", ">", "|", "[", "]", "{", "}", '"', "\\"),
    *('{"name": "f", "arguments": {', '"a": ', "1", "NaN", "1e999", "\\ud800", "\\u003c|im_end|>", "null", ", ", ": "),
    *("\x1b]0;t\x07", "\x1b[2J", "\x1b]52;c;eA==\x07", "\x9b31m", "\r", "\b", "\x00", "\u202e", "\u2066", "\ud83d"),
    *(
        "[red]",
        "[/x]",
        "[bold",
        ":smile:",
        "####",
        " 1,234.5",
        "-7",
        "<answer>",
        "</answer>",
        "9" * 40,
        ".",
        "\n",
        "\t",
    ),
    *("a", "the ", "漢字", "🙂", "\u200b", "\ufeff", "\U000f0000", "\ufffd", " ", "  ", "é"),
)


def generate(rng: Random) -> str:
    """One output: most are short, a few are floods of one or two pieces."""
    if rng.random() < 0.02:
        flood = "".join(rng.choices(PIECES, k=rng.randint(1, 2)))
        return flood * rng.randint(50, 2000)
    text = "".join(rng.choices(PIECES, k=rng.randint(1, 24)))
    if rng.random() < 0.3:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randint(1, 4))) + text[at:]
    return text


@dataclass
class Report:
    """What came of it: how many texts, what broke, and what was slowest."""

    texts: int = 0
    characters: int = 0
    broken: list[str] = field(default_factory=list)
    slowest: dict[str, tuple[float, int]] = field(default_factory=dict)
    """CPU seconds, and the length of the text, by target."""
    seconds: Counter[str] = field(default_factory=Counter)

    def lines(self) -> Iterator[str]:
        yield f"{self.texts:,} texts, {self.characters:,} characters; {len(self.broken)} broken"
        yield from self.broken[:20]
        for name, (seconds, length) in self.slowest.items():
            mean = self.seconds[name] / max(self.texts, 1)
            slow = f"slowest {seconds * 1e3:8.2f} ms ({length:,} characters)"
            yield f"  {name:12} mean {mean * 1e6:8.1f} µs, {slow}"


def check_parsers(text: str) -> None:
    for name in PARSERS:
        parsed = parser(name).parse(text)
        assert len(parsed.calls) <= MAX_CALLS + 1, name
        assert all(call.problem or call.name.strip() for call in parsed.calls), name


def check_rewards(text: str) -> None:
    assert exact_match.score(text, "42", tag="answer") in (0.0, 1.0)
    assert number_match.score(text, "42") in (0.0, 1.0)
    assert format.score(text, r"(?s)<answer>.*</answer>") in (0.0, 1.0)
    read_tag(text, "answer")


def check_terminal(text: str) -> None:
    shown = printable(text)
    controls = [letter for letter in shown if not letter.isprintable() and letter not in "\n\t" and ord(letter) < 0xA0]
    assert not controls, controls
    stream = io.StringIO()
    make_console(stream).print(cell(text[:2000]))
    assert "\x1b" not in stream.getvalue()
    shown.encode()


def make_renderer_check(model: str = "treadle/tiny-calculator") -> Callable[[str], None]:
    """As many control tokens as a harmless text has, in a tool's answer and in a prompt."""
    config = ModelConfig(path=model)
    tokenizer = load_tokenizer(config)
    renderer = Renderer.create(config, tokenizer)
    control = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}

    def count(ids: tuple[int, ...]) -> int:
        return sum(at in control for at in ids)

    quiet = [count(ids) for ids in _render(renderer, "a")]

    def check(text: str) -> None:
        assert [count(ids) for ids in _render(renderer, text)] == quiet

    return check


def _render(renderer: Renderer, text: str) -> list[tuple[int, ...]]:
    result = {"role": "tool", "content": text, "name": "f"}
    return [renderer.observation([result]), renderer.prompt([{"role": "user", "content": text}])]


def attack(count: int, seed: int) -> Report:
    """Put so many texts through every target."""
    targets = {
        "parsers": check_parsers,
        "renderer": make_renderer_check(),
        "rewards": check_rewards,
        "terminal": check_terminal,
    }
    rng, report = Random(seed), Report()
    for _ in range(count):
        text = generate(rng)
        report.texts += 1
        report.characters += len(text)
        for name, check in targets.items():
            began = time.process_time()
            try:
                check(text)
            except Exception as error:  # noqa: BLE001  whatever a target raises is what is looked for
                report.broken.append(f"{name}: {type(error).__name__}: {error} by {text[:200]!r}")
            took = time.process_time() - began
            report.seconds[name] += took
            report.slowest[name] = max(report.slowest.get(name, (0.0, 0)), (took, len(text)))
    return report
