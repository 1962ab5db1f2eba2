"""Pages of the documentation site that are made from other files: config keys, the Python API, examples and notebooks.

A hook of mkdocs (`mkdocs.yml`): each page is made when the site is built, so that it cannot be out of date.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import treadle
from treadle.config.explain import json_schema

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(path.stem for path in (EXAMPLES / "notebooks").glob("*.ipynb"))

Schema = Mapping[str, Any]

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
NESTED = ("anyOf", "allOf", "oneOf")

API: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "The interface": {"treadle": tuple(treadle.__all__)},
    "Results of a run": {
        "treadle.api.research": ("PolicySample",),
        "treadle.inspect.run_records": ("RunRecords", "FoundTrajectory", "RecordedTrajectory", "RolloutPurpose"),
    },
    "Agent loops": {
        "treadle.rollout": ("AgentLoopBase", "Session", "SingleTurnAgentLoop", "ToolAgentLoop", "EnvironmentAgentLoop")
    },
    "Tools": {
        "treadle.rollout.tools": ("tool", "Injected", "FunctionTool", "MCPTools", "Toolbox", "SessionTools"),
    },
    "Environments": {
        "treadle.rollout": ("Environment", "Opening", "Action", "Step", "ShortEnvironment", "Reply"),
    },
    "Rollout without a trainer": {
        "treadle.rollout": ("AgentLoopManager", "RolloutKind", "RolloutParts", "AgentLoopWorker", "Dropped"),
    },
    "Records": {
        "treadle.types": (
            *("Message", "NOTHING", "Task", "StopReason", "SamplingParams", "OnTokens", "Request", "Completion"),
            *(
                "RecordedCompletion",
                "ToolCall",
                "ToolStatus",
                "ToolResult",
                "Turn",
                "Row",
                "Status",
                "Outcome",
                "Score",
            ),
            *("Timing", "Provenance", "Trajectory", "Group", "Batch"),
        )
    },
    "Boxes for code": {"treadle.sandbox.protocol": ("Sandbox", "ExecResult", "BoxSettings")},
    "Config": {
        "treadle.config": (
            *("load", "loads", "to_yaml", "diff", "explain", "make_plan", "Plan", "Section", "key", "Origin", "Source"),
            *("Machine", "ConfigWarning", "LegacyKeyWarning"),
        )
    },
    "Errors": {
        "treadle.errors": (
            *(
                "TreadleError",
                "Mistake",
                "ConfigError",
                "MisuseError",
                "RowFull",
                "SandboxFailure",
                "Boundary",
                "Failure",
            ),
            *("PromptFailure", "EngineFailure", "RequestRefused", "ToolFailure", "EnvironmentFailure", "LoopFailure"),
            *("RewardFailure", "RunError", "NotFiniteError", "BudgetSpent", "EnginesLost", "DeadlineError", "blame"),
            "nearest",
        )
    },
}
"""What the page of the Python API shows: heading -> module to import from -> its names."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "reference/config.md", content="\n".join(config_page())))
    files.append(File.generated(config, "reference/api.md", content="\n".join(api_page())))
    files.append(File.generated(config, "examples/index.md", content=examples_page()))
    for name in NOTEBOOKS:
        files.append(File.generated(config, f"examples/{name}.md", content="\n\n".join(notebook_page(name))))
    return files


def examples_page() -> str:
    """The table of examples. Their folders are not part of the site, and are named; the notebooks are."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    pages = ", ".join(f"[{name}]({name}.md)" for name in NOTEBOOKS)
    text = text.replace("[notebooks](notebooks)", f"`examples/notebooks`: {pages}")
    return re.sub(r"\[\w+\]\((\w+)\)", r"`examples/\1`", text)


def notebook_page(name: str) -> Iterator[str]:
    """The cells of a notebook, without what they print."""
    yield f"*The notebook `examples/notebooks/{name}.ipynb`.*"
    for cell in json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        yield f"```python\n{text}\n```" if cell["cell_type"] == "code" else text.replace("](../../docs/", "](../")


def config_page() -> Iterator[str]:
    """Every key of every section, from the JSON schema of configs."""
    schema = json_schema()
    yield "# Config keys\n"
    yield "Every key, by section. `treadle config explain CONFIG KEY` says what a key is in a config, and why."
    for name, section in schema["properties"].items():
        yield f"\n## `{name}`\n\n{section.get('description', '')}\n"
        yield "| key | type | default | what it is |\n|---|---|---|---|"
        yield from key_rows(section, schema["definitions"], name)


def key_rows(section: Schema, definitions: Schema, path: str) -> Iterator[str]:
    """A row for each key below `path`; keys of several classes that a section may have are listed once."""
    seen: set[str] = set()
    for held, where in held_sections(section, path):
        for name, key in definitions[held].get("properties", {}).items():
            if (full := f"{where}.{name}") in seen:
                continue
            seen.add(full)
            default = f"`{json.dumps(key['default'], ensure_ascii=False)}`" if "default" in key else ""
            yield f"| `{full}` | {describe_type(key)} | {default} | {_cell(key.get('description', ''))} |"
            yield from key_rows(key, definitions, full)


def held_sections(key: Schema, path: str) -> Iterator[tuple[str, str]]:
    """The section classes that a key may hold, itself or by name in a map, with the path of their keys."""
    if "$ref" in key:
        yield key["$ref"].rpartition("/")[2], path
    for part in (part for kind in NESTED for part in key.get(kind, ())):
        yield from held_sections(part, path)
    if isinstance(key.get("additionalProperties"), dict):
        yield from held_sections(key["additionalProperties"], f"{path}.NAME")


def describe_type(key: Schema) -> str:
    """The type of a key in words, with its bounds."""
    if "enum" in key:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in key["enum"])
    if "$ref" in key:
        return "section"
    parts = [describe_type(part) for kind in NESTED for part in key.get(kind, ()) if not is_interpolation(part)]
    if parts:
        return " or ".join(dict.fromkeys(parts))
    bounds = ", ".join(f"{sign} {key[name]}" for name, sign in BOUNDS.items() if name in key)
    kind = key.get("type", "any")
    if kind == "array" and isinstance(key.get("items"), dict):
        kind = f"list of {describe_type(key['items'])}"
    elif kind == "object":
        kind = "map"
    return f"{kind} {bounds}".strip()


def is_interpolation(part: Schema) -> bool:
    """Whether this is the `${other.key}` that every key may be."""
    return str(part.get("pattern", "")).startswith(r"\$\{")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def api_page() -> Iterator[str]:
    """The names that code of users imports, from their docstrings."""
    yield "# Python API\n"
    yield "What your code may import, and from where. Sections of configs are in [Config keys](config.md).\n"
    for heading, modules in API.items():
        yield f"\n## {heading}\n"
        for module, names in modules.items():
            yield from (f"\n::: {module}.{name}\n    options: {{heading_level: 3}}\n" for name in names)
