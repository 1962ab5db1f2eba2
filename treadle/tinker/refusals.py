"""Errors of the Tinker API, in the two shapes that its client reads.

    ApiError         a status and a reason: the request itself is refused (BadRequestError, NotFoundError, … there)
    RequestFailed    the request was accepted, and its future ends with this reason (RequestFailedError there)

The client tries 408, 409, 429 and 5xx again by itself: those are for what may go better later, and nothing else.
"""

from treadle.errors import TreadleError


class ApiError(TreadleError):
    """A refused request."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class RequestFailed(TreadleError):
    """A failed future. `by_user`: the request was wrong; otherwise the server was."""

    def __init__(self, reason: str, *, by_user: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_user = by_user

    @property
    def category(self) -> str:
        return "user" if self.by_user else "server"
