"""What Ray says about an actor that is gone, in a sentence for people.

Owns the reading of Ray's errors. Invariant: the text names the cause, and never a bare class name.
"""

from ray.exceptions import RayActorError, RayError, RayTaskError

from treadle.errors import TreadleError


def explain(error: BaseException) -> str:
    """The cause in one line; for code that broke, the line that broke."""
    if isinstance(error, RayTaskError) or "creation task" in str(error):
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        return lines[-1].strip() if lines else type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, RayActorError):
        text = text.partition("The actor is dead because ")[2] or text
        text = text.partition(" Some common causes")[0]
        text = text.partition("Worker exit detail: ")[2] or text
    return text or type(error).__name__


def own_error(error: RayError) -> TreadleError | None:
    """The error that our code raised in an actor on purpose, if it was one."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, TreadleError) else None
