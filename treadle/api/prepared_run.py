"""Prepared run: the config of a call, the files that it names and that are still to be written, and its YAML.

Owns the folder `inputs/` of a run directory, `train.yaml` beside it, and mistakes in the words of the call.
Invariant: loading the YAML gives the config, with a run directory of its own name.
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.config import Config, SFTRunConfig, TrainConfig, to_yaml
from treadle.errors import ConfigError, Mistake
from treadle.journal.run_directory import DIRECTORY_MODE
from treadle.journal.schema import FILE_NAME

INPUTS = "inputs"
"""Folder of a run directory with the tasks and functions of a call."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A config, and the files it names that are still to be written."""

    config: Config
    call: str
    run_dir: Path
    inputs: Mapping[str, bytes]
    """Contents of files in `inputs/`, by name."""
    places: Mapping[str, str]
    """For messages: files and keys that were arguments, and what they were called there."""
    search_path: Path | None = None
    """The script's directory, where functions of the call are imported from there."""

    def command(self, *words: str) -> str:
        """The command that repeats the call, typed in the working directory."""
        path = self.search_path
        shown = path.relative_to(Path.cwd()) if path is not None and path.is_relative_to(Path.cwd()) else path
        prefix = "" if shown is None else f"PYTHONPATH={shlex.quote(str(shown))} "
        return prefix + shlex.join(["treadle", self.call, str(self.run_dir / f"{self.call}.yaml"), *words])

    def to_yaml(self) -> str:
        """What was not left at its default. Loading it gives this config, with the run directory of its own name."""
        shown = to_yaml(self.config, given=True, secrets=False)
        lines = [line for line in shown.splitlines() if not line.startswith("  run_dir:")]
        if isinstance(self.config, TrainConfig) and "trainer:" not in lines:
            lines.append("trainer: {}")
        if isinstance(self.config, SFTRunConfig) and "sft:" not in lines:
            lines.append("sft: {}")
        head = [f"# again:  {self.command()}", f"# go on:  {self.command(f'logging.run_dir={self.run_dir}')}"]
        return "\n".join([*head, *lines]) + "\n"

    def write(self) -> None:
        """Write the inputs, and the YAML where there is none yet, into the run directory."""
        folder = self.run_dir / INPUTS
        self.run_dir.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)  # parents have the mode of the umask
        if self.inputs:
            folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        for name, content in self.inputs.items():
            if not (folder / name).exists():  # its name says that it holds the same
                _write(folder / name, content)
        if not (self.run_dir / f"{self.call}.yaml").exists():
            self.write_yaml()

    def write_yaml(self) -> None:
        """Write the YAML, in place of that of an earlier start."""
        _write(self.run_dir / f"{self.call}.yaml", self.to_yaml().encode())

    @property
    def has_run(self) -> bool:
        """Whether the run directory holds a run already."""
        return (self.run_dir / FILE_NAME).exists()

    def explain(self, error: ConfigError) -> ConfigError:
        """The same mistakes in the words of a call: arguments for files it made, keywords for options."""
        return ConfigError([self._explain(mistake) for mistake in error.mistakes])

    def _explain(self, mistake: Mistake) -> Mistake:
        def in_words(text: str) -> str:
            for file, argument in self.places.items():
                for place in re.findall(rf"{re.escape(file)}:(\w+)", text):  # the line of a row, the name of a function
                    word = f"{argument}, row {place}" if place.isdecimal() else argument
                    text = text.replace(f"{file}:{place}", word)
                text = text.replace(file, argument)
            text = re.sub(r"\bset (\w+)\.([\w.]+): (\w+)", r'write \1={"\2": "\3"}', text)
            return text.replace("--fresh", "fresh=True").replace("--allow-changes", "allow_changes=True")

        fix = None if mistake.fix is None else in_words(mistake.fix)
        return replace(mistake, key=in_words(mistake.key), problem=in_words(mistake.problem), fix=fix)


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)
