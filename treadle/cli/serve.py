"""`treadle serve`: a model behind OpenAI's and Anthropic's APIs, or behind Tinker's, on this machine."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.check import note_checkpoints
from treadle.cli.environment import read_api_keys, read_notes_key
from treadle.cli.parser import Arguments, Commands, add_command, add_words, load_words, run_path
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say

if TYPE_CHECKING:
    from treadle.config import Config
    from treadle.journal import Journal

DEFAULT_CONTEXT = 8192
"""Tokens of context for a model that is served without a config, where it takes so many."""

DEFAULT_PORT = 8000
"""Where neither `--port` nor a config says one."""


def register(commands: Commands) -> None:
    examples = """
    examples:
      treadle serve runs/treadle/calculator                    the newest checkpoint of a run
      treadle serve runs/treadle/calculator --checkpoint best  its best one, or --checkpoint 20: that of step 20
      treadle serve HuggingFaceTB/SmolLM2-135M-Instruct        a model
      treadle serve my.yaml rollout.name=vllm                  a config: its engine, sampling and tool-call format
      treadle serve my.yaml --gateway                          and record what agents do: treadle show reads it
      treadle serve treadle/tiny-calculator --tinker           train it with the tinker package: adapters as models

    Clients use the printed key; the model's name is policy. With --gateway a client that takes
    http://127.0.0.1:PORT/s/NAME/v1 as its address has a session by that name. DELETE of /s/NAME ends it, and
    POST to /s/NAME/v1/notes of {"reward": 1.0} gives it a reward, with the second key that is printed.
    """
    command = add_command(commands, "serve", serve, examples)
    add_words(command, "RUN | MODEL | CONFIG | KEY=VALUE", what="a run, a model, files or recipes")
    command.add_argument(
        "--gateway", action="store_true", help="record every session in logging.run_dir; train nothing"
    )
    command.add_argument(
        "--tinker", action="store_true", help="serve the Tinker API instead: training and sampling, by LoRA adapters"
    )
    command.add_argument("--name", help="with --tinker: the name that clients ask for; the model's path by default")
    command.add_argument("--checkpoints", type=Path, help="with --tinker: where they are (runs/tinker)")
    command.add_argument("--max-models", type=int, help="with --tinker: adapters that train at once (8)")
    command.add_argument("--max-sessions", type=int, help="with --tinker: clients at once (32)")
    command.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="of a run: latest (the default), best (by validation success, else by reward), a step, or its name",
    )
    command.add_argument(
        "--port",
        type=int,
        help="port on rollout.gateway.host, 127.0.0.1; 0 for a free one (rollout.gateway.port of a config, else 8000)",
    )
    command.add_argument(
        "--key", help="the key that clients use; a new one by default. With --tinker it begins with tml-"
    )
    command.add_argument(
        "--notes-key",
        help="with --gateway, the key for rewards and notes; a new one by default. Other users, and agents, can read a "
        "command line: better --notes-key-file, or TREADLE_NOTES_KEY in the environment",
    )
    command.add_argument(
        "--notes-key-file", help="the same, of a file that its owner alone can read (chmod 600); - for standard input"
    )


def serve(arguments: Arguments) -> int:
    """Serve a run's model, a model or a config over OpenAI's and Anthropic's APIs, or Tinker's, on this machine.

    Ctrl-C ends it. Tools work, and the sampling is the config's. A client that asks for a stream gets text while it is
    sampled: by the token with the engine native, 32 tokens at a time with vllm; whole at the end with scripted and
    openai. Tool calls come when they are whole.
    """
    from secrets import token_hex

    if arguments.tinker:
        return _serve_tinker(arguments)
    for name in ("name", "checkpoints", "max_models", "max_sessions"):
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError([Mistake(option, "belongs to the Tinker API", fix="add --tinker, or leave it out")])
    for option in _notes_options(arguments) if not arguments.gateway else ():
        problem = "is for rewards of sessions that are recorded"
        raise ConfigError([Mistake(option, problem, fix="add --gateway, or leave it out")])
    given = read_notes_key(arguments.notes_key, arguments.notes_key_file) if arguments.gateway else None
    key, notes_key = arguments.key or token_hex(16), given or token_hex(16)
    if key == notes_key:
        problem = "is the key of the clients, too: an agent could give itself a reward"
        raise ConfigError([Mistake("--notes-key", problem, fix="leave it out, or give another one")])
    config, name = _configure(arguments)
    import asyncio  # not before it is needed: help and mistakes do without

    from treadle.gateway.model_server import ServerKeys, serve_model, until_signal

    recording: AbstractContextManager[Journal | None] = nullcontext()
    if arguments.gateway:
        recording = _open_journal(config)
    with recording as journal:
        keys = read_api_keys(config)
        say_ready = _announce(config, key, name, notes_key if arguments.gateway else None)
        api_key = keys.get(config.rollout.openai.api_key_env)
        asyncio.run(until_signal(serve_model(config, ServerKeys(key, notes_key), journal, say_ready, api_key)))
        say("ended")
    return 0


KEY_PREFIX = "tml-"
"""What the tinker package wants every key to begin with."""


def _serve_tinker(arguments: Arguments) -> int:
    from secrets import token_hex

    key = arguments.key or KEY_PREFIX + token_hex(16)
    mistakes = []
    if not key.startswith(KEY_PREFIX):
        mistakes.append(Mistake("--key", f"the tinker package takes keys that begin with {KEY_PREFIX} only", key))
    if arguments.gateway:
        mistakes.append(Mistake("--gateway", "the Tinker API records no sessions", fix="leave out one of the two"))
    for option in _notes_options(arguments):
        mistakes.append(Mistake(option, "the Tinker API takes no rewards for sessions", fix="leave it out"))
    for name, value in (("--max-models", arguments.max_models), ("--max-sessions", arguments.max_sessions)):
        if value is not None and value < 1:
            mistakes.append(Mistake(name, "must be 1 or more", value))
    if mistakes:
        raise ConfigError(mistakes)
    config, shown = _configure(arguments)
    import asyncio  # not before it is needed: help and mistakes do without

    from treadle.gateway.model_server import until_signal
    from treadle.tinker.server import TinkerSettings, serve_tinker
    from treadle.tinker.service import ServiceLimits

    limits = ServiceLimits(arguments.max_models or 8, arguments.max_sessions or 32)
    checkpoints = arguments.checkpoints or Path("runs/tinker")
    settings = TinkerSettings(key, checkpoints, arguments.name, limits)

    def ready(url: str, name: str) -> None:
        say(f"serving {shown} over the Tinker API, as the base model {name}")
        say(f"  TINKER_BASE_URL={url} TINKER_API_KEY={key}")
        say(_describe_lengths(config))
        say(f"checkpoints are in {checkpoints}")
        sys.stdout.flush()

    asyncio.run(until_signal(serve_tinker(config, settings, ready)))
    say("ended")
    return 0


def _notes_options(arguments: Arguments) -> list[str]:
    """Options for the key for rewards that were given."""
    given = {"--notes-key": arguments.notes_key, "--notes-key-file": arguments.notes_key_file}
    return [option for option, value in given.items() if value]


def _announce(config: "Config", key: str, name: str, notes_key: str | None) -> Callable[[str], None]:
    def ready(url: str) -> None:
        say(f"serving {name} with the engine {config.rollout.name}, as the model policy")
        say(f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}")
        say(f"  ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}")
        say(_describe_lengths(config))
        if notes_key is not None:
            say(f"sessions are recorded in {config.logging.directory('rollout')}; {url}/s/NAME/v1 is a session by name")
            say("")
            say("for the grader alone, and in no agent's reach: it gives any session any reward")
            say(f"  TREADLE_NOTES_URL={url}/s/NAME/v1/notes TREADLE_NOTES_KEY={notes_key}")
        sys.stdout.flush()

    return ready


def _describe_lengths(config: "Config") -> str:
    rollout = config.rollout
    lengths = f"context {rollout.sequence_length():,} tokens, answers up to {rollout.response_length:,}"
    return f"{lengths} (rollout.prompt_length, rollout.response_length)"


def _configure(arguments: Arguments) -> tuple["Config", str]:
    """The config to serve, and what it serves in words: as given, a model, or a checkpoint of a run.

    The port is that of the option, else of the config, else the default.
    """
    from treadle.config.load import recipe_names

    words, checkpoint = list(arguments.words), arguments.checkpoint
    if arguments.port is not None:
        words.append(f"rollout.gateway.port={arguments.port}")
    first, path = words[0], run_path(words[0])
    if not path.is_file() and (path / "config.yaml").is_file() and (path / "run.json").is_file():
        config, name = _load_run(path, checkpoint or "latest", words[1:])
    elif checkpoint is not None:
        fix = "leave it out, or give the directory of a run"
        raise ConfigError([Mistake("--checkpoint", f"chooses a checkpoint of a run, and {first} is none", fix=fix)])
    elif path.is_file() or first in recipe_names() or first.endswith((".yaml", ".yml")) or "=" in first:
        config = load_words(words)
        name = config.model.path
    else:
        config, name = _load_model(first, words[1:]), first
    note_checkpoints(config)
    return _with_port(config), name


def _with_port(config: "Config") -> "Config":
    """The config with the default port of this command, where nothing says one."""
    from treadle.config import Source

    origin = config.rollout.gateway.origin("port")
    if origin.source is not Source.DEFAULT:
        return config
    return config.replaced("rollout.gateway.port", DEFAULT_PORT, origin)


def _load_run(run_dir: Path, checkpoint: str, rest: Sequence[str]) -> tuple["Config", str]:
    from treadle.inspect.export import find_checkpoint, find_model, require_training_run
    from treadle.inspect.run_records import RunRecords

    require_training_run(RunRecords(run_dir))
    found = find_checkpoint(run_dir, checkpoint)
    model = find_model(run_dir, found)
    own = [f"model.path={model}", "model.adapter=null", "rollout.nnodes=0"]
    own.append(f"rollout.gateway.port={DEFAULT_PORT}")  # the port of the training run's gateway is not this server's
    own.append("logging.run_dir=null")  # what a server records is none of the training run's
    return load_words([str(run_dir / "config.yaml"), *own, *rest]), f"{found.name} of {run_dir}"


def _load_model(model: str, rest: Sequence[str]) -> "Config":
    from treadle.config import loads

    half = _context_of(model) // 2
    lengths = f"prompt_length: {half}, response_length: {half}"
    return loads(f"model: {{path: {json.dumps(model)}}}\nrollout: {{{lengths}}}\n", "treadle serve", tuple(rest))


def _context_of(model: str) -> int:
    """Tokens that a model takes, as far as its directory says."""
    from treadle.model.tokenizer import find_model_path

    found = find_model_path(model)
    try:
        longest = json.loads((found / "config.json").read_text()).get("max_position_embeddings") if found else None
    except (OSError, ValueError):
        longest = None
    return min(DEFAULT_CONTEXT, longest) if isinstance(longest, int) and longest > 1 else DEFAULT_CONTEXT


def _open_journal(config: "Config") -> "AbstractContextManager[Journal]":
    from treadle.config import to_yaml
    from treadle.config.show import hide_in_words
    from treadle.journal import Journal

    resolved = to_yaml(config, origins=True, secrets=False)
    directory = Path(config.logging.directory("rollout"))
    words, max_mb = hide_in_words(sys.argv), config.logging.journal_max_mb
    return Journal.open(directory, max_mb=max_mb, config_yaml=resolved, command=words)
