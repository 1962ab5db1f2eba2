"""Chat templates, rendered as transformers renders them.

Owns the Jinja environment that chat templates are written for: a sandbox that changes nothing it is given, blocks
that leave no blank lines behind, `break` and `continue`, a `tojson` that writes plain JSON, and the few names that
templates expect to find. Knows nothing about tokenizers.
Invariant: the same template and the same variables give the text that `apply_chat_template` of transformers gives.
"""

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CACHED_TEMPLATES = 64


@lru_cache(CACHED_TEMPLATES)
def compile_template(text: str) -> Template:
    """A template that can be rendered any number of times, from any thread."""
    return _environment().from_string(text)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said. The mark itself writes nothing; names set inside stay inside."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads it as it stands

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _format_now
    return environment


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML minds; a model should read the JSON as it is."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(format: str) -> str:
    return datetime.now().strftime(format)
