"""Does the chat template suit the rollout? Tools must reach the model, its calls must be read, results must go back.

Owns what is refused at the start, with the key to change, and what is only said. The comparison itself is the
renderer's proof. Knows nothing about engines.
Invariant: a rollout with tools starts only if the template shows them, or they are written into the prompt in the
format that its parser reads.
"""

from collections.abc import Iterator

from treadle.config.rollout import MultiTurnConfig
from treadle.data.proof import IGNORES_TOOLS, Proof, Verdict
from treadle.data.tool_text import FORMAT
from treadle.errors import ConfigError, Mistake
from treadle.rollout.parsers import PARSERS, parser

_FORMAT_KEY = "rollout.multi_turn.format"
_TEMPLATE_KEY = "model.custom_chat_template"


def check_template(proof: Proof, multi_turn: MultiTurnConfig) -> list[str]:
    """What there is to say about a template; a ConfigError where it cannot do what the rollout needs."""
    has_tools = bool(multi_turn.tools or multi_turn.mcp_servers)
    notes = list(_check_tools(proof, multi_turn)) if has_tools else []
    if proof.differences:
        notes.append(f"turn by turn, the chat template gives other ids than all at once:\n{proof}")
    return notes


def _check_tools(proof: Proof, multi_turn: MultiTurnConfig) -> Iterator[str]:
    if not proof.shows_tools:
        if multi_turn.format != FORMAT:
            problem = f"{IGNORES_TOOLS}, which {multi_turn.format!r} does not read"
            fix = f"set it to {FORMAT}, or give a template that shows tools as {_TEMPLATE_KEY}"
            raise ConfigError([Mistake(_FORMAT_KEY, problem, multi_turn.format, multi_turn.origin("format"), fix)])
        yield IGNORES_TOOLS
    _check_results(proof)
    reads = [name for name in (multi_turn.format, *PARSERS) if _reads(name, proof.call)]
    if proof.call and multi_turn.format not in reads:
        others = f"; {', '.join(reads)} would" if reads else ""
        yield f"{_FORMAT_KEY}={multi_turn.format} does not read calls as the chat template writes them{others}"


def _check_results(proof: Proof) -> None:
    """Results of tools can go back to the model after at least one kind of turn, and change nothing before them."""
    calls, plain = proof["assistant calls → tool"], proof["assistant → tool"]
    able = (Verdict.AGREES, Verdict.KEEPS)
    if calls.verdict in able or (calls.verdict is Verdict.REFUSED and plain.verdict in able):
        return
    problem = f"the chat template of {proof.model} cannot take results of tools: {calls.detail}"
    fix = "give a template that can, leave out rollout.multi_turn.tools, or list the token that ends calls in "
    raise ConfigError([Mistake(_TEMPLATE_KEY, problem, fix=f"{fix}generation_config.json")])


def _reads(name: str, text: str) -> bool:
    return any(call.name == "zq_probe" and call.problem is None for call in parser(name).parse(text).calls)
