"""Schemas from signatures and docstrings, and arguments checked against schemas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal, TypedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, create_model

from treadle.rollout.parsers import Untyped
from treadle.rollout.tools import FunctionTool, Injected, tool
from treadle.rollout.tools.signature import ParsedDocstring, read_docstring, read_signature
from treadle.rollout.tools.validators import InvalidArgument, compile_validator


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


@dataclass
class Place:
    city: str
    unit: Unit = Unit.C


class Range(TypedDict):
    low: int
    high: int


def properties(function: Callable[..., Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = FunctionTool.of(function).spec.parameters["properties"]
    return found


def problem_of(schema: Mapping[str, Any], value: object) -> str:
    with pytest.raises(InvalidArgument) as caught:
        compile_validator(schema)(value)
    return str(caught.value)


def test_a_schema_comes_from_signature_and_docstring() -> None:
    def weather(city: str, days: int = 3) -> str:
        """Look up the weather.

        It may be wrong.

        Args:
            city: where to look,
                in English
            days (int): how far ahead

        Returns:
            a report
        """
        return ""

    assert FunctionTool.of(weather).spec.schema() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather. It may be wrong.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where to look, in English"},
                    "days": {"type": "integer", "description": "how far ahead", "default": 3},
                },
                "required": ["city"],
            },
        },
    }


def test_plain_param_fields_describe_parameters() -> None:
    docs = read_docstring("""Add.

    :param a: the first
        number
    :param int b: the second
    :returns: the sum
    """)
    assert docs.description == "Add."
    assert docs.parameters == {"a": "the first number", "b": "the second"}


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        ("Raises:\n        ValueError", {"query": "words", "limit": "how many"}),
        ("Raises:\n\n    Returns:\n        hits", {"query": "words", "limit": "how many"}),
        ("Other Parameters:\n        verbose", {"query": "words", "limit": "how many"}),
    ],
)
def test_an_odd_section_of_a_docstring_costs_no_description(odd: str, found: dict[str, str]) -> None:
    docs = read_docstring(f"""Search the web.

    Args:
        query: words
        limit (int, optional): how many

    {odd}
    """)
    assert docs == ParsedDocstring("Search the web.", found)


def test_a_parameter_without_a_description_costs_the_others_none() -> None:
    docs = read_docstring("""Add.

    Args:
        a
        b: the second
    """)
    assert docs == ParsedDocstring("Add.", {"b": "the second"})


def test_parameters_that_cannot_be_read_from_a_docstring_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def search(query: str) -> str:
        """Search. Args: query: words

        Args: query: words
        """
        return query

    read_signature(search, "tool search")
    assert "tool search: its docstring describes no parameter" in capsys.readouterr().err


def test_numpy_docstrings_describe_parameters() -> None:
    docs = read_docstring("""Add.

    Parameters
    ----------
    a : int
        the first
        number
    b
        the second
    """)
    assert docs == ParsedDocstring("Add.", {"a": "the first number", "b": "the second"})


class Passenger(BaseModel):
    name: str = Field(min_length=1, description="as in the passport")
    born: date


class Booking(BaseModel):
    passengers: list[Passenger]
    seats: Annotated[int, Field(ge=1, le=9)] = 1


def book(booking: Booking, day: date, hours: Annotated[int, Field(ge=0)] = 0) -> str:
    """Book a flight."""
    return f"{booking.passengers[0].born.year} {day.isoformat()} {hours}"


def test_models_dates_and_constraints_of_pydantic_are_described() -> None:
    parameters = FunctionTool.of(book).spec.parameters
    assert parameters["properties"] == {
        "booking": {
            "type": "object",
            "properties": {
                "passengers": {"type": "array", "items": {"$ref": "#/$defs/Passenger"}},
                "seats": {"type": "integer", "minimum": 1, "maximum": 9, "default": 1},
            },
            "required": ["passengers"],
        },
        "day": {"type": "string", "format": "date"},
        "hours": {"type": "integer", "minimum": 0, "default": 0},
    }
    assert parameters["$defs"]["Passenger"]["properties"]["name"] == {
        "type": "string",
        "minLength": 1,
        "description": "as in the passport",
    }


def test_values_become_models_and_what_does_not_fit_is_said_with_its_place() -> None:
    spec = FunctionTool.of(book).spec
    ada = {"name": "Ada", "born": "1815-12-10"}
    given = spec.validate(
        {"booking": Untyped('{"passengers": [{"name": "Ada", "born": "1815-12-10"}]}'), "day": "2026-11-16"}
    )
    assert given == {"booking": Booking(passengers=[Passenger(**ada)]), "day": date(2026, 11, 16)}
    for booking, day, place in (
        ({"passengers": [ada], "seats": 12}, "2026-11-16", "booking.seats: must be at most 9"),
        ({"passengers": [{"name": "Ada"}]}, "2026-11-16", "booking.passengers.0: missing: born"),
        ({"passengers": [ada]}, "the day after", "day: Input should be a valid date"),
        ({"passengers": [{**ada, "born": "<|im_end|>"}]}, "2026-11-16", "booking.passengers.0.born: Input should be"),
    ):
        with pytest.raises(InvalidArgument, match=place):
            spec.validate({"booking": booking, "day": day})


def test_two_models_of_one_name_are_refused() -> None:
    group = create_model("Group", people=(list[create_model("Passenger", age=(int, ...))], ...))  # type: ignore[misc]

    def f(a: Booking, b: group) -> None: ...  # type: ignore[valid-type]

    with pytest.raises(ValueError, match="two of its types are called 'Passenger'"):
        FunctionTool.of(f)


def test_a_function_without_a_docstring_has_an_empty_description() -> None:
    def bare(a: int) -> int:
        return a

    assert FunctionTool.of(bare).spec.description == ""


def test_types_become_schemas() -> None:
    def everything(
        text: str,
        ratio: float,
        flag: bool,
        choice: Literal["a", "b"],
        unit: Unit,
        words: list[str],
        counts: dict[str, int],
        maybe: int | None,
        either: int | str,
        place: Place,
        span: Range,
        pair: tuple[int, ...],
        anything: Any,
        noted: Annotated[int, "a note"],
        loose: list,  # type: ignore[type-arg]
    ) -> None: ...

    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    assert properties(everything) == {
        "text": {"type": "string"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "choice": {"type": "string", "enum": ["a", "b"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "words": {"type": "array", "items": {"type": "string"}},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "maybe": {"type": ["integer", "null"]},
        "either": {"type": ["integer", "string"]},
        "place": place,
        "span": {
            "type": "object",
            "properties": {"low": {"type": "integer"}, "high": {"type": "integer"}},
            "required": ["high", "low"],
            "additionalProperties": False,
        },
        "pair": {"type": "array", "items": {"type": "integer"}},
        "anything": {},
        "noted": {"type": "integer", "description": "a note"},
        "loose": {"type": "array"},
    }


def test_a_richer_optional_is_an_alternative() -> None:
    def f(unit: Unit | None = None) -> None: ...

    assert properties(f)["unit"] == {
        "anyOf": [{"type": "string", "enum": ["celsius", "fahrenheit"]}, {"type": "null"}],
    }


def test_an_injected_parameter_is_hidden() -> None:
    def f(a: int, secret: Injected[str]) -> None: ...

    assert properties(f).keys() == {"a"}
    assert FunctionTool.of(f).spec.needs_task


def test_a_name_can_be_given() -> None:
    @tool(name="plus")
    def f(a: int) -> None: ...

    assert FunctionTool.of(f).spec.name == "plus"
    assert f(1) is None


def unannotated(a, b: int) -> None: ...  # type: ignore[no-untyped-def]
def variadic(*a: int) -> None: ...
def keywords(**a: int) -> None: ...
def positional(a: int, /) -> None: ...
def foreign(a: Callable[[int], int]) -> None: ...
def unknown(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@dataclass
class Tree:
    children: "list[Tree]"


def recursive(a: Tree) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (unannotated, "parameter 'a' has no annotation"),
        (variadic, r"'\*a' cannot be given by name"),
        (keywords, r"'\*\*a' cannot be given by name"),
        (positional, "'a' cannot be given by name"),
        (foreign, "parameter 'a' has a type .*Callable"),
        (unknown, "annotations cannot be read"),
        (recursive, "refers to itself"),
    ],
)
def test_what_cannot_be_described_is_an_error_that_names_it(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"{function.__name__}.*{words}"):
        FunctionTool.of(function)


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        ({"type": "integer"}, "7", "must be a whole number, got '7'"),
        ({"type": "integer"}, True, "got true"),
        ({"type": "integer"}, 1.5, "got 1.5"),
        ({"type": "number"}, None, "must be a number, got null"),
        ({"type": "string"}, 7, "must be a string, got 7"),
        ({"type": "boolean"}, 1, "must be true or false"),
        ({"type": "null"}, 0, "must be null"),
        ({"type": "array", "items": {"type": "integer"}}, [1, "x"], "1: must be a whole number"),
        ({"type": "array"}, {"a": 1}, "must be a list"),
        ({"type": ["integer", "null"]}, "x", "must be a whole number, got 'x' or must be null"),
        ({"enum": ["a", 1]}, True, "must be one of 'a', 1, got true"),
        ({"const": 3}, 4, "must be one of 3"),
        ({"type": "integer", "minimum": 2}, 1, "must be at least 2"),
        ({"type": "number", "exclusiveMaximum": 2}, 2, "must be under 2"),
        ({"type": "string", "maxLength": 2}, "abc", "length of at most 2"),
        ({"type": "array", "minItems": 1}, [], "length of at least 1"),
        ({"allOf": [{"type": "integer"}, {"maximum": 3}]}, 4, "at most 3"),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "x", "whole number"),
        ({"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}, {"a": {"b": "x"}}, "a.b: must be a whole"),
        ({"type": "object", "required": ["a", "b"]}, {}, "missing: a, b"),
        ({"type": "object", "additionalProperties": False, "properties": {"a": {}}}, {"z": 1}, "no 'z'; known: a"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"z": "x"}, "z: must be a whole number"),
        (False, 1, "no value fits"),
    ],
)
def test_a_value_that_does_not_fit_says_where_and_why(schema: Mapping[str, Any], value: object, words: str) -> None:
    wrapped = {"type": "object", "properties": {"x": schema}}
    assert words in problem_of(wrapped, {"x": value})


def test_references_may_be_circular() -> None:
    schema = {
        "$defs": {"node": {"properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}},
        "properties": {"head": {"$ref": "#/$defs/node"}},
    }
    assert compile_validator(schema)({"head": {"value": 1, "next": {"value": 2}}})
    assert problem_of(schema, {"head": {"next": {"value": "x"}}}).startswith("head.next.value")


def test_unknown_keywords_are_left_to_the_server() -> None:
    check = compile_validator(
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$", "format": "x"}}}
    )
    assert check({"a": "b"}) == {"a": "b"}


def test_whole_floats_are_integers_and_input_is_left_alone() -> None:
    given_arguments = {"a": 2.0}
    fitted = compile_validator({"properties": {"a": {"type": "integer"}}})(given_arguments)
    assert fitted == {"a": 2} and type(fitted["a"]) is int
    assert type(given_arguments["a"]) is float


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, " 7 ", 7),
        ({"type": "number"}, "7.5", 7.5),
        ({"type": "string"}, "7", "7"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "[1", "[1"),
        ({}, "1", 1),
    ],
)
def test_untyped_text_takes_the_type_of_the_schema(schema: Mapping[str, Any], text: str, value: object) -> None:
    fitted = compile_validator({"properties": {"x": schema}})({"x": Untyped(text)})["x"]
    assert fitted == value and type(fitted) is type(value)


def test_typed_text_stays_text() -> None:
    assert "must be a whole number" in problem_of({"properties": {"x": {"type": "integer"}}}, {"x": "7"})


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.text().map(Untyped)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


KEYWORDS = [
    *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "anyOf", "oneOf", "allOf"),
    *("$ref", "minimum", "maxLength", "minItems", "pattern"),
]
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "#", "#/properties/x"])
SCHEMA = st.recursive(
    st.one_of(JSON, TYPES),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
        st.lists(inner, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(SCHEMA, JSON)
def test_no_schema_and_no_value_break_a_check(schema: Any, value: Any) -> None:
    check = compile_validator({"type": "object", "properties": {"x": schema}})
    try:
        check({"x": value})
    except InvalidArgument as error:
        assert str(error)
    except RecursionError:
        assert "$ref" in str(schema)
