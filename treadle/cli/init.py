"""`treadle init`: a small project that trains as it stands: config, tasks, a reward with its test, a Makefile.

Owns which files a project has. What they hold are the templates in `treadle/recipes/init`, and for `--from` what
`treadle.migrate` makes of a script; scripts are read, never run.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.parser import Arguments, Commands, add_command
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say, warn

if TYPE_CHECKING:
    from treadle.migrate.report import Migration

TEMPLATES = Path(__file__).parents[1] / "recipes" / "init"
SUFFIX = ".tmpl"
TASKS = ("gsm8k", "tools", "environment")
Files = dict[str, str]
"""Contents by name."""


def register(commands: Commands) -> None:
    examples = """
    tasks:
      gsm8k         questions with a number as the answer; gsm8k.yaml beside it is GSM8K itself, on one GPU
      tools         an agent that calls a function of yours over several turns
      environment   an agent that answers an environment of yours, turn after turn

    What is written runs as it stands, with a bundled model, on two CPU cores in about a minute:

      treadle init my-project --task tools
      cd my-project
      treadle train train.yaml

    From a script for another framework, which is read and never run: train.yaml is its config, laptop.yaml the same
    with the bundled model on a few small sums, and migration.txt says what became of every argument.

      treadle init my-project --from trl train_grpo.py
      treadle init my-project --from verl run_qwen.sh
      cd my-project
      treadle train laptop.yaml

    Then change tasks.jsonl, reward.py and model.path into yours. `make check` runs the tests and `treadle check`.
    """
    command = add_command(commands, "init", init, examples)
    command.add_argument("directory", metavar="DIR", type=Path, help="where the project goes; new, or empty")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--task", choices=TASKS, default="gsm8k", help="what the project is about (gsm8k)")
    kind.add_argument(
        "--from",
        dest="origin",
        nargs=2,
        metavar=("FRAMEWORK", "SCRIPT"),
        help="translate a script: trl FILE.py, or verl FILE.sh or FILE.yaml",
    )


def init(arguments: Arguments) -> int:
    """Write a small project: YAML with comments, a reward with its test, tasks, and a Makefile."""
    directory: Path = arguments.directory
    _refuse_used(directory)
    if arguments.origin is None:
        files, first = task_files(arguments.task), "train.yaml"
    else:
        files = migrated_files(*arguments.origin)
        first = "laptop.yaml" if "laptop.yaml" in files else "train.yaml"
    write_files(directory, files)
    say(f"{directory}: {', '.join(sorted(files))}")
    say(f"try next:  cd {directory} && treadle train {first}")
    return 0


def task_files(task: str) -> Files:
    """The files of a project about a task."""
    return {**read_templates("common"), **read_templates(task)}


def migrated_files(framework: str, script: str) -> Files:
    """The files of a project that a script of another framework becomes."""
    if framework not in ("trl", "verl"):
        raise ConfigError([Mistake("--from", "the frameworks are trl and verl", framework, fix="--from trl SCRIPT")])
    templates, path = read_templates("common"), Path(script)
    files = {name: templates[name] for name in (".gitignore", "reward.py", "test_reward.py")}
    columns: tuple[str, ...] = ()
    if framework == "trl":
        from treadle.migrate.trl import migrate_trl

        translated = migrate_trl(path)
        migration, columns = translated.migration, translated.columns
        files |= translated.files
    else:
        from treadle.migrate.migration import migrate

        migration = migrate(path)
    files |= {"train.yaml": migration.yaml, "migration.txt": f"{migration.report()}\n"}
    files["Makefile"] = templates["Makefile"].replace("treadle train train.yaml", "treadle train laptop.yaml")
    _add_laptop(files, columns)
    _tell_lost(migration)
    return files


def _add_laptop(files: Files, columns: tuple[str, ...]) -> None:
    """The same config with the bundled model and a few sums, where that can be; else what stands in its way."""
    from treadle.migrate.laptop import laptop_config

    examples = read_templates("tools")
    try:
        files["laptop.yaml"] = laptop_config(files["train.yaml"], own_rewards="call_as_trl" in files["reward.py"])
        if "tools:calculate" in files["laptop.yaml"]:
            files.setdefault("tools.py", examples["tools.py"])
    except ConfigError as error:
        warn(f"no laptop.yaml: the config cannot run with the bundled model\n{error}\n")
    for name in ("tasks.jsonl", "val.jsonl"):
        rows = [json.loads(line) for line in examples[name].splitlines()]
        files[name] = "".join(f"{json.dumps(_with_columns(row, columns))}\n" for row in rows)


def _with_columns(row: dict[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    """A row with every column that the script's reward functions read: the answer, where they expect something else."""
    answer = row["answer"]
    return {"prompt": row["prompt"], **(dict.fromkeys(columns, answer) if columns else {"answer": answer})}


def _tell_lost(migration: "Migration") -> None:
    lost = [entry for entry in migration.entries if entry.kind == "none"]
    if lost:
        warn(f"{len(lost)} of {len(migration.entries)} settings have no counterpart:")
        for entry in lost:
            warn(f"  {entry.old} = {entry.before}: {entry.reason}")
    for note in migration.notes:
        warn(f"note: {note}")


def read_templates(folder: str) -> Files:
    """Templates by the names that their files get."""
    files: Files = {}
    for path in sorted((TEMPLATES / folder).iterdir()):
        name = path.name.removesuffix(SUFFIX)
        files[".gitignore" if name == "gitignore" else name] = path.read_text(encoding="utf-8")
    return files


def write_files(directory: Path, files: Files) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def _refuse_used(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        fix = "give the name of a new directory"
        raise ConfigError([Mistake(str(directory), "exists and is not empty; nothing is overwritten", fix=fix)])
