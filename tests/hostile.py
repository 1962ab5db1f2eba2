"""Hostile model outputs: made from a seed, and put through everything that reads or prints what a model wrote.

Texts are mixtures of tags of all tool-call formats, special tokens, JSON in pieces, escapes of terminals, markup, odd
characters, numbers, and floods of any of these.
"""

import io
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from random import Random
from types import FrameType

from tests.hostile_readers import check_code_tests, check_dialects, check_stream, make_pages_check
from treadle.config.rollout import ModelConfig
from treadle.data.renderer import Renderer
from treadle.errors import ToolFailure
from treadle.inspect.detectors import look_at_group
from treadle.inspect.run_records import RecordedTrajectory, RolloutPurpose
from treadle.inspect.transcript import describe_trajectory
from treadle.journal.records import Headline
from treadle.model.tokenizer import load_tokenizer
from treadle.observe.rich_output import render_summary
from treadle.observe.summary import summarize
from treadle.reward.builtin import by_source, exact_match, format, math, number_match, reasoning_gym
from treadle.reward.builtin.exact_match import read_tag
from treadle.reward.result import ScoreFailure
from treadle.rollout.parsers import MAX_CALLS, PARSERS, parser
from treadle.terminal import cell, make_console, printable, say
from treadle.types import Outcome, Provenance, Row, Score, StopReason, Task, Timing, Trajectory, Turn

CPU_LIMIT_S = 10.0
"""What `reward.cpu_time_s` is for in a run: a text that takes longer is ended there, and counted here."""

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
        "9" * 5000,
        " 1,234.5",
        "-7",
        "<answer>",
        "</answer>",
        "9" * 40,
        ".",
        "\n",
        "\t",
    ),
    *(
        "\\boxed{",
        "$",
        "\\frac{",
        "}{",
        "\\sqrt{",
        "^{",
        "^",
        "!",
        "(",
        ")",
        "\\binom{",
        "\\left(",
        "=",
        "+",
        "/",
        "*",
        "x",
    ),
    *("e^{", "\\pi^{", "\\exp(", "\\sin(", "(x+y+z)^{12}", "(a+b)^{99}", "\\sum_{n=1}^{\\infty}", "\\int_0^1"),
    *("1/2^32500+", "1/3^20000+1/5^13000+1/7^11000+1/11^9000+", "/9^999", "2^{"),
    *("a", "the ", "漢字", "🙂", "\u200b", "\ufeff", "\U000f0000", "\ufffd", " ", "  ", "é"),
)


def generate(rng: Random) -> str:
    """One output: most are short, a few are floods of one or two pieces."""
    if rng.random() < 0.02:
        flood = "".join(rng.choices(PIECES, k=rng.randint(1, 2)))
        return _opening(rng) + flood * rng.randint(50, 2000)
    text = _opening(rng) + "".join(rng.choices(PIECES, k=rng.randint(1, 24)))
    if rng.random() < 0.3:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randint(1, 4))) + text[at:]
    return text


def _opening(rng: Random) -> str:
    """Often the start of a call, so that what follows is read as its arguments, or as its name."""
    if rng.random() < 0.5:
        return ""
    marker = parser(rng.choice(tuple(PARSERS))).marker
    return marker + rng.choice(('{"name": "f", "arguments": {"a": ', '{"name": " ", "arguments": {}}', "\n", "f{"))


@dataclass
class Report:
    """What came of it: how many texts, what broke, and what was slowest."""

    texts: int = 0
    characters: int = 0
    broken: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    """Texts that a CPU limit ended, by target."""
    slowest: dict[str, tuple[float, int]] = field(default_factory=dict)
    """CPU seconds, and the length of the text, by target."""
    seconds: Counter[str] = field(default_factory=Counter)

    def lines(self) -> Iterator[str]:
        yield f"{self.texts:,} texts, {self.characters:,} characters; {len(self.broken)} broken"
        yield from self.broken[:20]
        for name, (seconds, length) in self.slowest.items():
            mean = self.seconds[name] / max(self.texts, 1)
            slow = f"slowest {seconds * 1e3:8.2f} ms ({length:,} characters)"
            late = f", {self.ended[name]} ended after {CPU_LIMIT_S:g} s" if self.ended[name] else ""
            yield f"  {name:13} mean {mean * 1e6:8.1f} µs, {slow}{late}"

    def add(self, other: "Report") -> None:
        """Take in what another process found."""
        self.texts += other.texts
        self.characters += other.characters
        self.broken += other.broken
        self.ended.update(other.ended)
        self.seconds.update(other.seconds)
        for name, slowest in other.slowest.items():
            self.slowest[name] = max(self.slowest.get(name, (0.0, 0)), slowest)


def check_parsers(text: str) -> None:
    for name in PARSERS:
        parsed = parser(name).parse(text)
        assert len(parsed.calls) <= MAX_CALLS + 1, name
        assert all(call.problem or call.name.strip() for call in parsed.calls), name


def check_rewards(text: str) -> None:
    assert exact_match.score(text, "42", tag="answer") in (0.0, 1.0)
    assert number_match.score(text, "42") in (0.0, 1.0)
    with suppress(ScoreFailure):  # past its deadline
        assert format.score(text, r"(?s)<answer>.*</answer>") in (0.0, 1.0)
    read_tag(text, "answer")
    for source in ("openai/gsm8k", "lighteval/MATH", "math_dapo", "searchR1_nq"):
        assert by_source.score(text, "42", source) in (-1.0, 0.0, 1.0), source


def check_terminal(text: str) -> None:
    shown = printable(text)
    controls = [letter for letter in shown if not letter.isprintable() and letter not in "\n\t" and ord(letter) < 0xA0]
    assert not controls, controls
    stream = io.StringIO()
    make_console(stream).print(cell(text[:2000]))
    assert "\x1b" not in stream.getvalue()
    shown.encode()


def check_show(*texts: str) -> None:
    """What the console shows of a run: lines, and the table of a rollout with foreign names, causes and sources."""
    said, made = io.StringIO(), list[Trajectory]()
    for text in texts:
        say(text, file=said)
        score, uid = Score(1.0, {text[:40]: 1.0}), text[:200]
        made.append(Trajectory(uid, 0, (), Outcome.ended(StopReason.STOP), score, data_source=uid))
        made.append(Trajectory(uid, 1, (), Outcome.failed(ToolFailure(text)), None, data_source=uid))
    shown = io.StringIO()
    make_console(shown).print(render_summary(summarize(made)))
    for stream in (said, shown):
        stream.getvalue().encode()
        assert not [letter for letter in stream.getvalue() if letter != "\n" and letter != "\t" and ord(letter) < 0x20]


def record(text: str) -> RecordedTrajectory:
    """A rewarded trajectory as a journal has it, with the text wherever a model, a tool or a row may put one."""
    messages = (
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "tool_calls": [{"function": {"name": text[:80], "arguments": text}}]},
        {"role": "tool", "content": text, "name": text[:80], "tool_call_id": text[:80]},
        {"role": "assistant", "content": text},
    )
    ended, score, timing = Outcome.ended(StopReason.STOP), Score(1.0, {text[:40]: 1.0}), Timing()
    uid, counts = text[:200], (1, 2, 3, 4, 4)
    turns = tuple(Turn(at, at + 1, at + 1, StopReason.STOP) for at in range(2))
    row = Row((1, 2, 3), (4, 5), (1, 1), (0.0, 0.0), (0, 0), turns)
    trajectory = Trajectory(uid, 0, (row,), ended, score, messages=messages, data_source=uid)
    headline = Headline(
        *(1, 1, 0.0, uid, 0, 0, ended, score, timing, uid, *counts, True), provenance=Provenance(), is_intact=True
    )
    return RecordedTrajectory(RolloutPurpose.TRAINING, 1, headline, trajectory, text[:100])


def check_transcript(text: str) -> None:
    """What `treadle show` prints of a trajectory, and what findings say about it."""
    recorded, said = record(text), io.StringIO()
    say(describe_trajectory(recorded), file=said)
    for finding in look_at_group([recorded], [None]).findings:
        say(f"{finding.kind} {finding.detail} {finding.excerpt}", file=said)
    said.getvalue().encode()
    assert not [letter for letter in said.getvalue() if letter not in "\n\t" and ord(letter) < 0x20]


def make_show_check(at_once: int = 20) -> Callable[[str], None]:
    """Texts share a table, since a table costs more than its rows; where one breaks it, each is tried alone."""
    texts: list[str] = []

    def check(text: str) -> None:
        texts.append(text)
        if len(texts) < at_once:
            return
        together = [*texts]
        texts.clear()
        try:
            check_show(*together)
        except Exception:
            for alone in together:
                check_show(alone)
            raise

    return check


def make_math_check() -> Callable[[str], None]:
    math.prepare()

    def check(text: str) -> None:
        assert math.score(text, "42") in (0.0, 1.0)

    return check


def make_gym_check() -> Callable[[str], None]:
    """The scorers of all data sets of reasoning-gym in turn, each with an entry of its own."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    reasoning_gym.prepare()
    tasks: list[Task] = []
    for name in sorted(DATASETS):
        try:
            entry = create_dataset(name, size=1, seed=1)[0]
        except (ImportError, ValueError, OSError, AssertionError):  # it needs a package, or arguments
            continue
        messages = ({"role": "user", "content": entry["question"]},)
        tasks.append(Task(name, messages, entry["answer"], data_source=f"reasoning_gym:{name}", extra={"entry": entry}))
    turns = itertools.cycle(tasks)

    def check(text: str) -> None:
        task = next(turns)
        try:
            score = reasoning_gym.score(f"<answer>{text}</answer>", task)
        except Exception as error:
            raise AssertionError(f"{task.uid}: {type(error).__name__}: {error}") from error
        assert score == score, task.uid

    return check


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


def make_templates_check() -> Callable[[str], None]:
    """The same of prompts, with the tokenizers and templates of other families, one after the other."""
    from tests.unit.test_renderer import ENDS, renderer_of, tokenizer_of

    def count(family: str, text: str) -> int:
        ids = renderer_of(family).prompt([{"role": "user", "content": text}])
        return sum(at in control[family] for at in ids)

    control = {
        family: {at for at, token in tokenizer_of(family).added_tokens_decoder.items() if token.special}
        for family in ENDS
    }
    quiet = {family: count(family, "a") for family in ENDS}
    families = itertools.cycle(ENDS)

    def check(text: str) -> None:
        family = next(families)
        assert count(family, text) == quiet[family], family

    return check


def _render(renderer: Renderer, text: str) -> list[tuple[int, ...]]:
    result = {"role": "tool", "content": text, "name": "f"}
    return [renderer.observation([result]), renderer.prompt([{"role": "user", "content": text}])]


class _TooSlow(BaseException):
    """Nothing that a target catches."""


@contextmanager
def limited() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


TARGETS: dict[str, Callable[[], Callable[[str], None]]] = {
    "parsers": lambda: check_parsers,
    "renderer": make_renderer_check,
    "templates": make_templates_check,
    "rewards": lambda: check_rewards,
    "math": make_math_check,
    "reasoning_gym": make_gym_check,
    "terminal": lambda: check_terminal,
    "show": make_show_check,
    "transcript": lambda: check_transcript,
    "stream": lambda: check_stream,
    "dialects": lambda: check_dialects,
    "code_tests": lambda: check_code_tests,
    "pages": make_pages_check,
}
"""What makes each check, in the process that uses it."""


PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym", "templates": "pytest"}
"""What a target needs that treadle does not."""


def missing_targets(targets: Iterable[str]) -> dict[str, str]:
    """Targets that cannot be had here, with the reason."""
    missing: dict[str, str] = {}
    for name in targets:
        try:
            if name in PACKAGES:
                import_module(PACKAGES[name])
        except ImportError as error:
            missing[name] = f"{PACKAGES[name]} cannot be imported: {error}"
    return missing


def attack(count: int, seed: int, targets: tuple[str, ...] = tuple(TARGETS), until: float = float("inf")) -> Report:
    """Put so many texts through every target; fewer where `until`, by the clock, comes first."""
    checks = {name: TARGETS[name]() for name in targets}
    rng, report = Random(seed), Report()
    for _ in range(count):
        if time.time() > until:
            break
        text = generate(rng)
        report.texts += 1
        report.characters += len(text)
        for name, check in checks.items():
            began = time.process_time()
            try:
                with limited():
                    check(text)
            except _TooSlow:
                report.ended[name] += 1
            except Exception as error:  # noqa: BLE001  whatever a target raises is what is looked for
                report.broken.append(f"{name}: {type(error).__name__}: {error} by {text[:200]!r}")
            took = time.process_time() - began
            report.seconds[name] += took
            report.slowest[name] = max(report.slowest.get(name, (0.0, 0)), (took, len(text)))
    return report
