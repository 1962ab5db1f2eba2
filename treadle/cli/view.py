"""`treadle view`: runs in the browser, from this machine alone."""

from treadle.cli.parser import Arguments, Commands, add_command, run_path
from treadle.errors import ConfigError, Mistake
from treadle.terminal import say, warn


def register(commands: Commands) -> None:
    examples = """
    Prints an address of this machine and opens it. The address holds a random token: who does not know it sees nothing.
    The viewer reads the journals of the runs and writes nothing, also while they go on; Ctrl-C ends it.

    What to look for where:
      run            curves of all runs over each other, failures, stop reasons, waits, the timeline, the config
      steps          every step; its groups; the samples of a task side by side
      trajectory     the conversation, each token with its logprob, where the time went, forks; 1 to 4 choose
      difference     two samples from their first different token on (d on a trajectory)
      findings       groups without signal, repeated or identical answers, rewards that may be gamed
      find           words, rewards, stop reasons, tools, versions (press / anywhere; ? lists all keys)

    On another machine: ssh -L 8765:127.0.0.1:8765 HOST, and there treadle view RUN --port 8765 --no-browser

    examples:
      treadle view runs/treadle/calculator
      treadle view runs/treadle/one runs/treadle/other
    """
    command = add_command(commands, "view", view, examples)
    command.add_argument("words", metavar="RUN", nargs="+", help="run directories, live or over")
    command.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (a free one)")
    command.add_argument(
        "--at", default="", metavar="'#/…'", help="open this place: y in the viewer copies the command"
    )
    command.add_argument("--no-browser", action="store_true", help="print the address and open nothing")


def view(arguments: Arguments) -> int:
    """Look at runs in the browser: curves, groups, trajectories token by token, differences, findings."""
    import webbrowser

    from treadle.inspect.curves import name_runs
    from treadle.inspect.run_records import RunRecords
    from treadle.view.server import ViewerServer

    if not 0 <= arguments.port <= 65535:
        raise ConfigError([Mistake("--port", "must be between 0 and 65535", arguments.port)])
    run_dirs = list(dict.fromkeys(run_path(word) for word in arguments.words))
    for run_dir in run_dirs:
        RunRecords(run_dir)
    server = ViewerServer(name_runs(run_dirs), arguments.port)
    address = server.url + (f"#{arguments.at.removeprefix('#')}" if arguments.at else "")
    say(address)
    warn("only this machine can open it; Ctrl-C ends it")
    if not arguments.no_browser:
        webbrowser.open(address)
    try:
        server.serve_forever()
    finally:
        server.server_close()
    return 0
