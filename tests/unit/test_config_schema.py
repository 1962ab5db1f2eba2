"""The JSON Schema: accepts what loads, and marks in an editor what would not."""

import json

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.configs import ROLLOUT, TRAINING
from treadle.config import SFTRunConfig, load, to_yaml
from treadle.config.explain import json_schema
from treadle.config.load import RECIPES
from treadle.config.section import Section, fields_of
from treadle.config.tree import key_paths, subclasses

SCHEMA = json_schema()
VALIDATOR = Draft7Validator(SCHEMA)
DECLARED = {".".join(path) for path in key_paths(SFTRunConfig)}
"""At the same moment as the schema: other tests declare section classes of their own."""


def problems(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def test_it_is_a_valid_schema_and_plain_json():
    Draft7Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/recipe.yaml")), ids=lambda path: path.parent.name)
def test_shipped_recipes_fit(path):
    assert problems(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        ROLLOUT,
        TRAINING,
        to_yaml(load("calculator")),
        to_yaml(load("calculator", ["actor._target_=treadle.config.FSDPActorConfig"])),
        "trainer:\n",
        "rollout: {n: '${data.seed}', max_model_len: null, multi_turn: {tools: 'a.b:c'}}",
        "reward: {functions: {f: {path: math}, g: {path: 'a.b:c', weight: 2}}}",
        "actor: {optim: {betas: [0.9, 0.95]}}",
        "rollout: {engine_kwargs: {vllm: {anything: [1, {goes: null}]}}}",
    ],
)
def test_what_loads_fits(text):
    assert problems(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {temperatur: 1}",
        "rolout: {n: 1}",
        "rollout: {n: 1.5}",
        "rollout: {n: many}",
        "rollout: {n: 0}",
        "rollout: {top_p: 2}",
        "rollout: {name: vlm}",
        "rollout: {limits: 5}",
        "rollout: {multi_turn: {tools: [calculate]}}",
        "rollout: {_target_: os.system}",
        "rollout: {_target_: treadle.config.ActorConfig}",
        "_target_: treadle.config.TrainConfig",
        "actor: {optim: {betas: [0.9]}}",
        "actor: {optim: {betas: [0.9, 1.5]}}",
        "reward: {functions: {f: {pth: math}}}",
        "algorithm: {adv_estimator: grop}",
        "logging: {logger: [consol]}",
        "- a",
    ],
)
def test_what_does_not_load_does_not_fit(text):
    assert problems(text)


def test_every_key_is_offered_with_description_and_default():
    def visit(schema, path):
        for name, part in schema["properties"].items():
            assert part["description"], f"{path}{name}"
            inner = part.get("allOf", [{}])[0].get("$ref", "").removeprefix("#/definitions/")
            if inner:
                yield from visit(SCHEMA["definitions"][inner], f"{path}{name}.")
            elif name != "_target_":
                yield f"{path}{name}"

    offered = set(visit(SCHEMA, ""))
    assert {key for key in DECLARED if "*" not in key} <= offered


def test_every_section_offers_its_variants():
    for cls in subclasses(Section):
        if cls.__module__.startswith("treadle.config.") and cls.__name__ in SCHEMA["definitions"]:
            offered = SCHEMA["definitions"][cls.__name__]["properties"]
            assert set(fields_of(cls)) <= set(offered)
            assert offered["_target_"]["default"].endswith(cls.__name__)
