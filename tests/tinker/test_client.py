"""The published `tinker` client against `treadle serve --tinker`: `make test-tinker` installs it."""

from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.tinker.environment import needs_client, run_program, serving
from treadle.api.research import PolicySample
from treadle.types import StopReason

pytestmark = needs_client
MODEL = "treadle/tiny-calculator"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("tinker")
    with serving(MODEL, "--checkpoints", str(home / "checkpoints"), cwd=home) as variables:
        found = run_program("client_program.py", variables, home)
    return found | {"home": str(home)}


def policy_logprobs(ids: list[int], start: int, **model: Any) -> list[float]:
    with treadle.Policy({"path": MODEL, **model}, max_length=256) as policy:
        (found,) = policy.logprobs([PolicySample("", tuple(ids[:start]), tuple(ids[start:]), (), StopReason.STOP)])
    return [float(value) for value in found]


def test_a_forward_has_the_logprobs_of_the_policy(report: Any) -> None:
    assert report["models"] == [MODEL] and report["info"] == [MODEL, 8]
    assert report["forward"] == pytest.approx(policy_logprobs(report["ids"], 1), abs=1e-5)


def test_training_lowers_the_loss_also_one_that_the_client_computes(report: Any) -> None:
    assert report["losses"][-1] < report["losses"][0] / 2
    values = [metrics["loss:sum"] for metrics in report["custom"]]
    assert values[-1] < values[0] and report["custom"][0]["mine"] == 1.0
    assert report["step"]["grad_norm"] > 0


def test_samples_have_the_logprobs_that_the_same_weights_give_them(report: Any) -> None:
    for (tokens, logprobs, stop, _), scored in zip(report["samples"], report["scored"], strict=True):
        assert scored[0] is None and scored[3:] == pytest.approx(logprobs, abs=1e-4)
        assert stop == ("stop" if tokens[-1] == 2 else "length")
    assert len({name for *_, name in report["samples"]}) == 4
    prompt, top = report["prompt"]
    assert prompt[0] is None and top[0] is None and len(top[1]) == 2
    assert report["many"] == 200 and report["copy"] == pytest.approx(report["original"])
    tokens, logprobs, *_ = report["samples"][0]
    assert report["rl"]["importance_sampling"] == pytest.approx(-len(tokens), rel=1e-3)
    assert report["rl"]["ppo"] == pytest.approx(-len(tokens), rel=1e-3)
    assert report["rl"]["cispo"] == pytest.approx(-sum(logprobs), rel=1e-3)


def test_checkpoints_resume_and_open_as_adapters(report: Any) -> None:
    assert report["named"] == pytest.approx(report["original"])
    assert report["resumed"] == pytest.approx(report["went_on"], abs=1e-6)
    assert report["listed"] == [["weights/state", "training", True], ["sampler_weights/named", "sampler", False]]
    assert report["weights_info"] == 8 and report["left"] == 1
    place = report["paths"][1].removeprefix("tinker://")
    adapter = str(Path(report["home"]) / "checkpoints" / place)
    assert report["named"][1:] == pytest.approx(policy_logprobs(report["ids"], 1, adapter=adapter), abs=1e-5)


def test_refusals_arrive_in_the_clients_own_errors(report: Any) -> None:
    errors = report["errors"]
    for name, reason in (("loss", "not published"), ("step", "no gradients"), ("model", "is not served here")):
        kind, text, category = errors[name]
        assert (kind, category) == ("RequestFailedError", "user") and reason in text, errors[name]
    assert errors["long"][0] == "RequestFailedError" and "do not fit" in errors["long"][1]
    assert errors["state"][0] == "RequestFailedError" and "was never saved here" in errors["state"][1]
    assert errors["path"][0] == "NotFoundError" and errors["external"][0] == "BadRequestError"
    assert errors["key"][0] == "AuthenticationError" and "not the server's key" in errors["key"][1]
