"""A classifier behind a server that answers `POST /classify`, as vLLM does for sequence classification models.

Owns the request and the reading of its answer. The server batches. Refuses probabilities: a score is the head's logit.
Invariant: what comes back is a number, or a ScoreFailure that names the address.
"""

import json
from typing import TYPE_CHECKING, Any

from treadle.config.reward import ClassifierConfig
from treadle.config.rollout import OpenAIConfig
from treadle.errors import EngineFailure
from treadle.reward.failure import Fault, ScoreFailure
from treadle.reward.verdict import read_number

if TYPE_CHECKING:
    from treadle.engine.endpoint import Endpoint

_ADVICE = {
    401: "set the environment variable {api_key_env} to a key of this server",
    403: "the key in {api_key_env} may not do this",
    404: "endpoint.base_url is the address before /classify, without /v1; the server must serve a classifier",
    400: "endpoint.extra_body replaces fields of the request; null leaves one out",
    422: "endpoint.extra_body replaces fields of the request; null leaves one out",
}


class ClassifierEndpoint:
    """One server and the connections to it. Built by `create`."""

    def __init__(self, classifier: ClassifierConfig, server: "Endpoint", retries: int) -> None:
        self._classifier, self._server, self._retries = classifier, server, retries

    @classmethod
    def create(cls, classifier: ClassifierConfig, api_key: str | None, retries: int) -> "ClassifierEndpoint":
        """A server that nobody has asked anything yet. `api_key` is the value, whoever read it from where."""
        from treadle.engine.endpoint import Endpoint  # httpx is slow to import

        endpoint = classifier.endpoint
        advice = {status: text.format(api_key_env=endpoint.api_key_env) for status, text in _ADVICE.items()}
        assert endpoint.base_url is not None, "checked with the config"
        server = Endpoint(endpoint.base_url, api_key=api_key, advice=advice, connections=classifier.max_concurrency)
        return cls(classifier, server, retries)

    async def score(self, ids: tuple[int, ...]) -> float:
        """The logit of one text."""
        classifier = self._classifier
        body = write_body(ids, classifier.endpoint)
        try:
            reply = await self._server.call(
                "POST", "classify", body, timeout_s=classifier.timeout_s, retries=self._retries
            )
        except EngineFailure as failure:
            raise ScoreFailure(Fault.ENGINE, f"has a server that did not answer: {failure}") from failure
        return read_logit(reply, self._server.address)

    async def close(self) -> None:
        await self._server.close()


def write_body(ids: tuple[int, ...], endpoint: OpenAIConfig) -> str:
    """The request as JSON. `extra_body` adds and replaces fields; null leaves one out."""
    body = {"model": endpoint.model, "input": ids, "use_activation": False, **endpoint.extra_body}
    return json.dumps({field: value for field, value in body.items() if value is not None})


def read_logit(reply: Any, address: str) -> float:
    """The one number in an answer."""
    try:
        numbers = reply["data"][0]["probs"]
        (number,) = numbers
    except (KeyError, IndexError, TypeError) as error:
        shown = json.dumps(reply)[:200]
        raise ScoreFailure(Fault.NO_RESULT, f"has a server, {address}, that answered {shown}") from error
    except ValueError as error:
        problem = f"has a server, {address}, whose model gives {len(numbers)} labels; a score is one number"
        raise ScoreFailure(Fault.NO_RESULT, problem) from error
    return read_number(number)
