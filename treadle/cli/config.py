"""`treadle config`: show, explain, check, compare and migrate configs. Starts nothing and imports nothing heavy."""

import json
from pathlib import Path

from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say, warn


def register(commands: Commands) -> None:
    parser = commands.add_parser("config", help="show, explain, check, compare and migrate configs")
    group = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = add_command(group, "show", show, "example: treadle config show calculator rollout.n=4 --origins")
    add_words(command)
    command.add_argument("--origins", action="store_true", help="say beside each value where it came from")

    command = add_command(group, "explain", explain, "example: treadle config explain calculator rollout.n rollout.n=4")
    command.add_argument("config", metavar="CONFIG", help="YAML file or recipe")
    command.add_argument("key", metavar="KEY", help="a key, such as rollout.n, or a section, such as rollout.limits")
    command.add_argument("words", nargs="*", default=[], metavar="KEY=VALUE", help="values that win over the file")

    command = add_command(group, "check", check, "example: treadle config check my.yaml trainer.mode=fully_async")
    add_words(command)

    command = add_command(group, "diff", diff, "example: treadle config diff calculator my.yaml")
    command.add_argument("left", metavar="A", help="YAML file or recipe")
    command.add_argument("right", metavar="B", help="YAML file or recipe")

    add_command(group, "schema", schema, "example: treadle config schema > treadle.schema.json")

    command = add_command(group, "migrate", migrate, "example: treadle config migrate run_qwen.sh > my.yaml")
    command.add_argument("path", metavar="PATH", type=Path, help="verl YAML file, or a script that launches verl")
    command.add_argument("--json", action="store_true", help="write the report as JSON")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the script's environment, such as DEVICE=gpu; wins over what the script assigns",
    )


def show(arguments: Arguments) -> None:
    """Print the resolved config as YAML that loads again."""
    from treadle.config import to_yaml

    say(to_yaml(load_words(arguments.words), origins=arguments.origins), end="")


def explain(arguments: Arguments) -> None:
    """Print a key's value, type, description, origin and what it overrode, or list the keys of a section."""
    from treadle.config import explain as explain_key

    say(explain_key(load_words([arguments.config, *arguments.words]), arguments.key))


def check(arguments: Arguments) -> None:
    """Say that a config is fine, or list every mistake in it (status 2)."""
    from treadle.config import SFTRunConfig, TrainConfig

    config = load_words(arguments.words)
    kind = "a training run" if isinstance(config, TrainConfig) else "a rollout that stands alone"
    kind = "supervised fine-tuning" if isinstance(config, SFTRunConfig) else kind
    say(f"fine: {kind}")


def diff(arguments: Arguments) -> int:
    """Compare two resolved configs, key by key (status 1 where they differ)."""
    from treadle.config import diff as compare

    differences = compare(load_words([arguments.left]), load_words([arguments.right]))
    for item in differences:
        say(item)
    warn("1 key differs" if len(differences) == 1 else f"{len(differences)} keys differ")
    return 1 if differences else 0


def schema(arguments: Arguments) -> None:
    """Print JSON Schema for completion and checking in an editor's YAML plugin."""
    from treadle.config.explain import json_schema

    say(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def migrate(arguments: Arguments) -> int:
    """Turn a verl config into ours.

    The YAML goes to standard output, a report of every key to standard error. Status 0 when every key was mapped or
    is the same, 3 when some have no counterpart.
    """
    from treadle.migrate.migration import migrate

    migration = migrate(arguments.path, dict(map(_variable, arguments.set)))
    say(migration.yaml, end="")
    warn(migration.to_json() if arguments.json else migration.report())
    return migration.exit_status


def _variable(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name.isidentifier() or name.isdigit()) or not equals:
        fix = "as in --set DEVICE=gpu, or --set 1=8 for the first argument of the script"
        raise ConfigError([Mistake("--set", f"{word!r} is not NAME=VALUE", word, fix=fix)])
    return name, value
