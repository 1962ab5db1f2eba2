"""Every key is read by some code: a key that nothing reads is a promise not kept.

A read is `<owner>.<key>`, where the owner is a variable or attribute named like the section (`rollout.n`,
`self._limits.stall_report_s`), a variable that was assigned from one (`turns = rollout.multi_turn`) or annotated with
the section's class, or `self` inside that class. A section in a map of sections is held in a variable named like one
of them: `loop` for `loops`, `server` for `mcp_servers`, `function` for `functions`.
Checks (`config/rules.py`, `config/training_rules.py`) and old spellings (`config/legacy.py`, `migrate/`) look at keys
but do not use them: they do not count.

Keys that are declared ahead of the code that will read them stand in PENDING, by class, with the folder that will.
"""

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache

from tests.package_source import FILES, PACKAGE, nodes
from treadle.config import Config, Section, TrainConfig
from treadle.config.section import types_of
from treadle.config.tree import is_section, section_in_map, subclasses

PENDING: dict[str, dict[str, str]] = {}
"""Class, then folder, then the keys that folder will read."""

NOT_COUNTED = ("config/rules.py", "config/training_rules.py", "config/legacy.py", "migrate/")


def own_keys(cls: type[Section]) -> list[str]:
    """The keys a class declares itself."""
    return [name for name in types_of(cls) if name in vars(cls)]


@cache
def owners() -> dict[type[Section], set[str]]:
    """The names a section of each class is held under."""
    found: dict[type[Section], set[str]] = defaultdict(set)
    found[Config] = found[TrainConfig] = {"config", "cfg"}

    def visit(cls: type[Section]) -> None:
        for variant in subclasses(cls):
            for name, hint in types_of(variant).items():
                inner = hint if is_section(hint) else section_in_map(hint)
                if inner is None:
                    continue
                one = name.removesuffix("s").rpartition("_")[2]
                for below in subclasses(inner):
                    found[below] |= {name} if is_section(hint) else {one, name.removesuffix("s")}
                visit(inner)

    visit(Config)
    return found


@cache
def reads() -> dict[tuple[str, str], str]:
    """Where each (owner, key) is read first; in a section's own class the owner is the class."""
    found: dict[tuple[str, str], str] = {}
    for path in FILES:
        place = path.relative_to(PACKAGE).as_posix()
        if not place.startswith(NOT_COUNTED):
            for line, owner, key in reads_in(nodes(path)):
                found.setdefault((owner, key), f"{place}:{line}")
    return found


def reads_in(module: Collection[ast.AST]) -> Iterator[tuple[int, str, str]]:
    aliases = aliases_in(module)
    for node in module:
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if is_read(inner) and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                    yield inner.lineno, node.name, inner.attr
        elif is_read(node) and (owner := last_name(node.value)):
            yield from ((node.lineno, name, node.attr) for name in {owner, *aliases[owner]})


def aliases_in(module: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Other names for sections in a file: by assignment, either arm of a condition included, or by annotation."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in module:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else last_name(node.target)
            found[name] |= {last_name(part) for part in ast.walk(node.annotation)}
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            pairs = zip(target.elts, node.value.elts, strict=False) if is_pair(node) else [(target, node.value)]
            for name, value in pairs:
                arms = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                found[last_name(name)] |= {last_name(arm) for arm in arms}
    return found


def is_pair(node: ast.Assign) -> bool:
    """Whether several names are assigned at once: `turns, limits = rollout.multi_turn, rollout.limits`."""
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def last_name(node: ast.AST) -> str:
    """`limits` of `limits`, `self._limits` and `rollout.limits`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_")


def is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def read_at(cls: type[Section], key: str) -> str | None:
    names = [*owners()[cls], *(below.__name__ for below in subclasses(cls))]
    return next((reads()[name, key] for name in names if (name, key) in reads()), None)


CLASSES = [cls for cls in owners() if cls.__module__.startswith("treadle.config.")]


def test_every_key_is_read_or_says_who_will_read_it():
    offenders = []
    for cls in CLASSES:
        pending = " ".join(PENDING.get(cls.__name__, {}).values()).split()
        unread = [key for key in own_keys(cls) if read_at(cls, key) is None]
        ways = " or ".join(f"`{name}.KEY`" for name in sorted(owners()[cls]))
        if forgotten := [key for key in unread if key not in pending]:
            offenders.append(
                f"nothing reads {', '.join(forgotten)} of {cls.__name__}. Read it as {ways}, remove it from the class, "
                f"or add it to PENDING[{cls.__name__!r}] in this file with the folder that will read it."
            )
        if kept := {key: read_at(cls, key) for key in pending if key not in unread}:
            offenders.append(f"remove {', '.join(kept)} from PENDING[{cls.__name__!r}] in this file: read at {kept}")
    assert CLASSES and not offenders, "\n".join(offenders)


def test_pending_names_classes_and_keys_that_exist():
    keys = {cls.__name__: own_keys(cls) for cls in CLASSES}
    for name, folders in PENDING.items():
        for folder, words in folders.items():
            assert folder.endswith("/"), f"{name}: name the folder that will read these keys"
            assert words.split(), f"{name} has nothing pending for {folder}: remove it"
            strange = set(words.split()) - set(keys[name])
            assert not strange, f"{name} has no such key: {strange}"


def test_a_read_is_seen_whatever_holds_the_section():
    source = """
class LimitsConfig:
    def least(self):
        return self.close_timeout_s
def run(self, rollout, server):
    a = rollout.limits.session_timeout_s + self._limits.request_timeout_s
    turns, rest = rollout.multi_turn, 3
    source = rollout.val_kwargs if validation else rollout
    return server.command, self.config.rollout, turns.format, source.top_p
def other(mine: AgentConfig | None):
    return mine.num_workers
limits.stall_report_s = 5
other.launch_timeout_s
"""
    found = {(owner, key) for _, owner, key in reads_in(tuple(ast.walk(ast.parse(source))))}
    assert ("limits", "session_timeout_s") in found
    assert ("limits", "request_timeout_s") in found
    assert ("LimitsConfig", "close_timeout_s") in found
    assert ("server", "command") in found
    assert ("multi_turn", "format") in found
    assert ("val_kwargs", "top_p") in found
    assert ("rollout", "top_p") in found
    assert ("AgentConfig", "num_workers") in found
    assert ("config", "rollout") in found
    assert ("limits", "stall_report_s") not in found, "writing is not reading"
    assert ("limits", "launch_timeout_s") not in found
