"""docs/metrics.md names every metric that the code writes, and no other."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.package_source import FILES, nodes

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *(
        "actor",
        "advantage",
        "batch",
        "critic",
        "failed",
        "gateway",
        "prompts",
        "ref",
        "response_length",
        "reward",
        "rollout",
    ),
    *("rollout_corr", "seconds", "session", "staleness", "stop", "timing", "tools", "validation", "weights"),
)
METRIC = re.compile(rf"({'|'.join(FOLDERS)})/[\w@/<>]*[\w>]")
NOT_METRICS = {"validation/transcripts"}


def documented() -> set[str]:
    return set(re.findall(r"`([\w@/<>]+/[\w@/<>]+)`", (ROOT / "docs/metrics.md").read_text()))


@cache
def texts_of_code() -> frozenset[str]:
    """Every string constant of the package; what an f-string fills in is `<>`."""
    found = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(p.value) if isinstance(p, ast.Constant) else "<>" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def metrics_of_code() -> set[str]:
    return {text for text in texts_of_code() if METRIC.fullmatch(text)} - NOT_METRICS


def as_pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w*>", r"[\\w@/]+", name))


def test_every_metric_is_documented() -> None:
    names = {re.sub(r"<\w*>", "x", name) for name in documented()}
    missing = [name for name in metrics_of_code() if not any(as_pattern(name).match(known) for known in names)]
    assert not missing


def test_every_documented_metric_is_written() -> None:
    """In full, with a folder filled in, as a beginning and an end (`rollout_is`, `_mean`), or as a span (`train`)."""
    texts = texts_of_code()
    named = {text for text in metrics_of_code() if not text.endswith("/<>")}
    made = [as_pattern(text) for text in named | {text for text in texts if re.match(r"<>/\w", text)}]

    def is_written(name: str) -> bool:
        filled = re.sub(r"<\w*>", "x", name)
        ends = (name[at:] for at in range(len(name)) if name[:at] in texts)
        leaf = name.partition("/")[2].removesuffix("_s")
        return any(p.fullmatch(filled) for p in made) or any(end in texts for end in ends) or leaf in texts

    assert not [name for name in documented() if "<" not in name and not is_written(name)]


def test_every_metric_has_what_is_healthy_and_what_to_do() -> None:
    lines = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) > 60
    assert [line for line in rows if any(not cell.strip() for cell in line.split("|")[1:-1])] == []
