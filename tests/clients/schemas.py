"""Prints a JSON schema of each kind of field that pydantic has, as it and the openai package write them, and then those that
stand in standard input, as schemas.mjs prints them: one JSON object a line, without those that were there before.
"""

import collections
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import sys
import typing
import uuid
from typing import Annotated, Literal, Optional, Union

import openai.lib._pydantic as strict
import pydantic
import typing_extensions
from pydantic import Field


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Node(pydantic.BaseModel):
    value: int
    children: list["Node"] = []


class Point(typing_extensions.NamedTuple):
    x: int
    y: float = 0


class Movie(typing_extensions.TypedDict, total=False):
    title: typing_extensions.Required[str]
    year: int


@dataclasses.dataclass
class Item:
    name: str
    price: Annotated[float, Field(gt=0)]


class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: int


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]
    a: str

T = typing.TypeVar("T")


class Page(pydantic.BaseModel, typing.Generic[T]):
    items: list[T]
    next: Optional[str] = None


kinds = {
    "str": str, "int": int, "float": float, "bool": bool, "None": None, "bytes": bytes, "Any": typing.Any, "object": dict, "list": list,
    "datetime": datetime.datetime, "date": datetime.date, "time": datetime.time, "timedelta": datetime.timedelta,
    "AwareDatetime": pydantic.AwareDatetime, "NaiveDatetime": pydantic.NaiveDatetime, "PastDate": pydantic.PastDate, "FutureDatetime": pydantic.FutureDatetime,
    "Decimal": decimal.Decimal, "Decimal limited": Annotated[decimal.Decimal, Field(max_digits=8, decimal_places=2)], "Decimal bounded": Annotated[decimal.Decimal, Field(ge=0, le=100)],
    "UUID": uuid.UUID, "UUID4": pydantic.UUID4, "Path": pathlib.Path, "FilePath": pydantic.FilePath,
    "IPv4Address": ipaddress.IPv4Address, "IPv6Address": ipaddress.IPv6Address, "IPvAnyAddress": pydantic.IPvAnyAddress, "IPv4Network": ipaddress.IPv4Network,
    "EmailStr": pydantic.EmailStr, "NameEmail": pydantic.NameEmail, "AnyUrl": pydantic.AnyUrl, "HttpUrl": pydantic.HttpUrl, "PostgresDsn": pydantic.PostgresDsn,
    "SecretStr": pydantic.SecretStr, "Json": pydantic.Json, "Base64Str": pydantic.Base64Str, "Pattern": re.Pattern, "ByteSize": pydantic.ByteSize,
    "PositiveInt": pydantic.PositiveInt, "NonNegativeFloat": pydantic.NonNegativeFloat, "FiniteFloat": pydantic.FiniteFloat, "StrictInt": pydantic.StrictInt,
    "conint": Annotated[int, Field(ge=1, lt=100, multiple_of=5)], "confloat": Annotated[float, Field(gt=-1.5, le=2.25)], "multiple of 0.1": Annotated[float, Field(multiple_of=0.1)],
    "constr": Annotated[str, Field(min_length=2, max_length=8, pattern=r"^[a-z]+$")], "StringConstraints": Annotated[str, pydantic.StringConstraints(strip_whitespace=True, to_lower=True, pattern=r"^\w+(-\w+)*$")],
    "conlist": Annotated[list[int], Field(min_length=1, max_length=3)], "set of Literal": set[Literal["a", "b", "c"]], "frozenset of Enum": frozenset[Color], "set of bool": set[bool],
    "dict": dict[str, int], "dict of Enum": dict[Color, int], "dict of int": dict[int, str], "dict of constr": dict[Annotated[str, Field(pattern=r"^x-")], int], "dict limited": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
    "tuple": tuple[int, str], "tuple of any length": tuple[int, ...], "empty tuple": tuple[()], "NamedTuple": Point, "TypedDict": Movie, "dataclass": Item, "deque": collections.deque[int], "Sequence": typing.Sequence[str],
    "Enum": Color, "IntEnum": Level, "Literal": Literal["a", 1, None, True], "Optional": Optional[int], "Union": Union[int, str, None], "Optional model": Optional[Cat],
    "discriminated union": Annotated[Union[Cat, Dog], Field(discriminator="kind")], "union of models": Union[Cat, Dog], "list of unions": list[Annotated[Union[Cat, Dog], Field(discriminator="kind")]],
    "recursive": Node, "generic": Page[Cat], "forbid": Closed, "allow": Open, "default": Annotated[int, Field(default=3, description="three", examples=[1])], "JsonValue": pydantic.JsonValue,
}
lines = []
for name, kind in kinds.items():
    model = pydantic.create_model("Reply", value=(kind, ...))
    for client, make in {"pydantic": lambda m: m.model_json_schema(), "openai": strict.to_strict_json_schema}.items():
        lines.append({"client": client, "kind": name, "schema": make(model)})
lines += map(json.loads, sys.stdin)
seen = set()
for line in lines:
    line["schema"].pop("$schema", None)
    key = json.dumps(line["schema"], sort_keys=True)
    if key not in seen:
        seen.add(key)
        print(json.dumps(line, separators=(",", ":"), ensure_ascii=False))
