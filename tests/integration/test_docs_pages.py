"""Short guides as they stand: their files are written, their Python runs, and their commands end with status 0.

A block below `<!-- file: NAME -->` is a file, one below `<!-- fragment -->` is no config of its own. What a command is
shown to print is what it prints, but for numbers and for the parts that `…` leaves out. `SMALLER` replaces what the
machine of the tests lacks, or what would take minutes.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import treadle
from tests.reward_models import save_classifier
from treadle.cli.main import main

ROOT = Path(treadle.__file__).parents[1]
PAGES = (
    *("index.md", "write.md", "evaluate.md", "asynchronous.md", "rollout.md", "sandbox.md"),
    *("training.md", "sft.md", "lora.md"),
)
BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^    ((?:treadle|python -m treadle\S*) .*)$", re.MULTILINE)

TWO_STEPS = (
    "trainer.total_training_steps=2 data.train_batch_size=2 actor.ppo_mini_batch_size=2 rollout.n=2"
    " data.val_max_samples=2"
)

SMALLER: Mapping[str, tuple[tuple[str, str], ...]] = {
    "index.md": (
        ("    treadle train calculator\n", f"    treadle train calculator {TWO_STEPS}\n"),
        ("user       14*9=\nassistant  #### 103\n", "…\n"),
    ),
    "sandbox.md": (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "treadle/tiny-calculator"),
        ("/opt/venv", sys.prefix),
        (
            "  multi_turn: {tools: [python]}\n",
            "  prompt_length: 640\n  response_length: 256\n  multi_turn: {tools: [python]}\n",
        ),
    ),
    "sft.md": (
        ("train_files: [tasks.jsonl], train_batch_size: 32", "train_files: [tasks.jsonl], train_batch_size: 2"),
        ("ppo_mini_batch_size: 32", "ppo_mini_batch_size: 2"),
        ("rollout: {n: 8", "rollout: {n: 2"),
        ("total_training_steps: 40", "total_training_steps: 1"),
        ("total_training_steps: 200", "total_training_steps: 1"),
        ("steps=20", "steps=2"),
    ),
    "lora.md": (
        (
            '"trainer.val_before_train": False',
            '"trainer.val_before_train": False, "data.train_batch_size": 2, "actor.ppo_mini_batch_size": 2',
        ),
    ),
}

SHORTER: Mapping[str, tuple[tuple[str, str], ...]] = {
    "training.md": (("treadle train ", TWO_STEPS),),
    "sft.md": (
        ("treadle train calculator ", TWO_STEPS),
        ("treadle rollout calculator rollout.n=8 ", "rollout.n=4 data.train_max_samples=8"),
        ("treadle rollout calculator model.path=", "data.val_max_samples=2"),
        ("treadle sft calculator ", "data.train_batch_size=2 trainer.total_training_steps=2"),
        (
            "treadle sft calculator_sft ",
            "data.train_batch_size=4 trainer.total_training_steps=2 data.source_kwargs.demonstrations.count=40"
            " data.val_max_samples=4",
        ),
    ),
    "lora.md": (
        ("treadle train calculator ", TWO_STEPS),
        ("treadle rollout calculator ", "data.val_max_samples=2"),
    ),
}
"""How commands of minutes begin, and the words that make them short."""

LEFT_OUT: Mapping[str, str] = {"lora.md": "treadle train my.yaml "}
"""How commands begin that name a model which is not on the machine of the tests."""

ROWS = "".join(f'{{"prompt": "{at}+1=", "response": "{at + 1}", "answer": "{at + 1}"}}\n' for at in range(64))
NEEDED: Mapping[str, tuple[str, ...]] = {"sft.md": ("chats.jsonl", "held_out.jsonl", "tasks.jsonl")}
"""Files of rows that a page takes for granted."""

NEEDS_BUBBLEWRAP = ("egress.yaml", "program.yaml")
"""Configs that other providers of boxes refuse."""


@dataclass(frozen=True, slots=True)
class PageBlock:
    """A block of a page: the comment above it, its language and its text; a command that is indented is one, too."""

    note: str
    language: str
    text: str

    @property
    def file(self) -> str:
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else ""

    def commands(self) -> Iterator[tuple[str, str]]:
        """Each command with what it is shown to print."""
        parts = re.split(r"^\$ ", self.text.replace("\\\n", " "), flags=re.MULTILINE)
        assert not parts[0], f"a console block that does not begin with a command: {self.text}"
        yield from ((command, shown) for command, _, shown in (part.partition("\n") for part in parts[1:]))


def read_page(page: str) -> list[PageBlock]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for words, others in SMALLER.get(page, ()):
        assert words in text, f"{page} has no {words!r} any more"
        text = text.replace(words, others)
    fenced = [(found.start(), PageBlock(found[1] or "", found[2], found[3])) for found in BLOCK.finditer(text)]
    indented = [
        (found.start(), PageBlock("", "console", f"$ {shorten(page, found[1])}\n"))
        for found in INDENTED.finditer(text)
        if not found[1].startswith(LEFT_OUT.get(page, "no command"))
    ]
    return [block for _, block in sorted([*fenced, *indented], key=lambda pair: pair[0])]


def shorten(page: str, command: str) -> str:
    """The command as the tests run it."""
    words = [more for begins, more in SHORTER.get(page, ()) if f"{command} ".startswith(begins)]
    return " ".join((re.split(r"\s{2,}", command)[0], *words)) if words else command


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory with the examples beside it; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_top_to_bottom(page: str, here: Path) -> None:
    blocks = read_page(page)
    if page == "rollout.md":
        save_classifier(here / "models/helpful")
    for name in NEEDED.get(page, ()):
        (here / name).write_text(ROWS, encoding="utf-8")
    for block in blocks:
        if block.file:
            (here / block.file).write_text(block.text, encoding="utf-8")
    module, ran = ModuleType("page"), 0
    for block in blocks:
        if block.file or block.note == "fragment" or block.language in ("json", "text"):
            continue
        if block.language == "python":
            exec(compile(block.text, page, "exec"), module.__dict__)
            ran += 1
            continue
        assert block.language == "console", f"a block of {page} in {block.language} that nothing runs"
        for command, shown in block.commands():
            printed = run_command(command)
            assert not shown or fits(shown, printed), f"{command}\n{printed}"
            ran += 1
    assert ran >= 3


def test_the_loop_and_the_commands_of_the_readme_run(here: Path) -> None:
    """Its Python call is run by test_docs_interface.py; what trains, serves or opens a browser by others."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (loop,) = [found[3] for found in BLOCK.finditer(text) if "class Persistent" in found[3]]
    Path("my_loops.py").write_text(loop, encoding="utf-8")
    (words,) = re.findall(r"`(rollout\.agent\.default_agent_loop=my_loops:Persistent)`", text)
    few = "data.train_max_samples=2 rollout.n=1 logging.run_dir=runs/persistent"
    run_command(f"treadle rollout calculator {words} {few}")
    assert {sample.num_turns for sample in treadle.Run("runs/persistent").trajectories()} - {1}, "it asked again"
    cheap = re.compile(r"treadle (?:recipes|check|plan|simulate|config (?:explain|check|show)) ")
    commands = [command.partition(" > ")[0] for command in INDENTED.findall(text) if cheap.match(command)]
    assert len(commands) >= 6
    for command in commands:
        run_command(command, status=2 if command.startswith("treadle config check") else 0)


def run_command(command: str, status: int = 0) -> str:
    """What it prints. A command of ours runs in this process, a program of the page in one of its own."""
    program, *words = shlex.split(command, comments=True)
    if program != "treadle":
        assert program == "python", command
        settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, env=settings)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout
    if words[-1] in NEEDS_BUBBLEWRAP and shutil.which("bwrap") is None:
        return ""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == status, f"{command}\n{out.getvalue()}"
    return out.getvalue()


def fits(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed: numbers and bars may differ, and `…` stands for whole lines."""
    lines = ["(?:.*\n)*?" if line == "…" else f"{re.escape(_shape(line))}\n" for line in shown.rstrip().splitlines()]
    return re.match("".join(lines), "".join(f"{_shape(line)}\n" for line in printed.splitlines())) is not None


def _shape(line: str) -> str:
    line = re.sub(r"\b\d{8}-\d{6}-[0-9a-f]{6}\b", "0", line)  # the name of a run
    return re.sub(r"[▁-█]+", "▁", re.sub(r"-?\d[\d.,]*", "0", line)).rstrip()
