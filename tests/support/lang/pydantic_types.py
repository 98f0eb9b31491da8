"""The types that Pydantic's documentation lists: standard library, Pydantic's own, network types."""

from __future__ import annotations

import collections
import collections.abc
import datetime
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import typing
import uuid
from collections import deque
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types
import pydantic
from pydantic import networks
from typing_extensions import TypedDict


class Colour(enum.Enum):
    RED = "red"
    BLUE = "deep blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float


class Place(TypedDict):
    town: str
    height: typing.NotRequired[float]


class Inner(pydantic.BaseModel):
    words: list[str] = []
    ratio: float | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    good: bool


class Numbers(pydantic.RootModel[list[int]]): ...


Item = typing.TypeVar("Item")


class Box(pydantic.BaseModel, typing.Generic[Item]):
    item: Item


@pydantic.dataclasses.dataclass
class Person:
    name: str
    born: datetime.date


STANDARD_TYPES: list[Any] = [
    bool, int, float, str, bytes, bytearray, complex, decimal.Decimal, fractions.Fraction, type(None), Any, object,
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
    Colour, Size, Access, Literal["a", 1, True, None],
    list, list[int], list[int], tuple, tuple[int, str], tuple[int, ...], tuple[int, str], Point,
    deque, deque[int], set, set[int], set[str], set[Colour], frozenset, frozenset[int], collections.abc.Set[int],
    collections.abc.MutableSet[int],
    dict, dict[str, int], dict[int, str], dict[Colour, int], dict[uuid.UUID, int], dict[datetime.date, int],
    dict[decimal.Decimal, int], Place, collections.OrderedDict[str, int], collections.defaultdict[str, int],
    collections.Counter[str], collections.abc.Mapping[str, int], collections.abc.MutableMapping[str, int],
    collections.abc.Sequence[int], collections.abc.MutableSequence[int], collections.abc.Iterable[int],
    typing.Generator[int, None, None], type, type[int], typing.Callable[[int], int], typing.Hashable,
    re.Pattern, re.Pattern[str], re.Pattern[bytes], typing.Pattern[str], pathlib.Path, pathlib.PurePath,
    pathlib.PosixPath, uuid.UUID, ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Interface,
    ipaddress.IPv6Interface, ipaddress.IPv4Network, ipaddress.IPv6Network, typing.Annotated[int, "note"],
    int | str, int | None, list[int | None], Box[int], Numbers, Inner, Person, Cat | Dog,
    Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
]  # fmt: skip
PYDANTIC_TYPES: list[Any] = [
    pydantic.StrictBool, pydantic.StrictInt, pydantic.StrictFloat, pydantic.StrictStr, pydantic.StrictBytes,
    pydantic.PositiveInt, pydantic.NegativeInt, pydantic.NonNegativeInt, pydantic.NonPositiveInt,
    pydantic.PositiveFloat, pydantic.NegativeFloat, pydantic.NonNegativeFloat, pydantic.NonPositiveFloat,
    pydantic.FiniteFloat, pydantic.conint(gt=1, lt=9), pydantic.conint(multiple_of=5), pydantic.confloat(ge=0, le=1),
    pydantic.conbytes(max_length=3), pydantic.constr(min_length=2, max_length=5),
    pydantic.constr(pattern=r"^[a-z]{2,5}$"), pydantic.constr(strip_whitespace=True, min_length=2),
    pydantic.constr(to_upper=True), pydantic.conlist(int, min_length=1, max_length=3),
    pydantic.conset(int, min_length=1), pydantic.conset(int, max_length=3), pydantic.confrozenset(str, min_length=2),
    pydantic.condecimal(max_digits=5, decimal_places=2), pydantic.condecimal(ge=0), pydantic.condecimal(gt=1, lt=3),
    Annotated[decimal.Decimal, pydantic.Field(max_digits=5)], Annotated[decimal.Decimal, pydantic.Field(multiple_of=2)],
    pydantic.condate(gt=datetime.date(2020, 1, 1)), pydantic.UUID1, pydantic.UUID3, pydantic.UUID4, pydantic.UUID5,
    pydantic.UUID6, pydantic.UUID7, pydantic.UUID8,
    pydantic.FilePath, pydantic.DirectoryPath, pydantic.NewPath, pydantic.SocketPath,
    pydantic.Base64Bytes, pydantic.Base64Str, pydantic.Base64UrlBytes, pydantic.Base64UrlStr,
    pydantic.Json, pydantic.Json[int], pydantic.Json[list[int]], pydantic.SecretStr, pydantic.SecretBytes,
    pydantic.Secret[int], pydantic.ByteSize, pydantic.PastDate, pydantic.FutureDate, pydantic.PastDatetime,
    pydantic.FutureDatetime, pydantic.NaiveDatetime, pydantic.AwareDatetime, pydantic.ImportString, pydantic.JsonValue,
    pydantic.SerializeAsAny[Inner], pydantic.InstanceOf[int], pydantic.SkipValidation[int],
    Annotated[int, pydantic.AfterValidator(abs)], Annotated[str, pydantic.StringConstraints(pattern="^[0-9]+$")],
    Annotated[int, annotated_types.Interval(ge=1, le=3)], Annotated[list[int], annotated_types.Len(1, 2)],
    Annotated[datetime.timedelta, pydantic.Field(ge=datetime.timedelta(0))],
    Annotated[datetime.datetime, annotated_types.Timezone(None)],
    Annotated[float, pydantic.Field(allow_inf_nan=False)],
]  # fmt: skip
NETWORK_TYPES: list[Any] = [
    pydantic.AnyUrl, pydantic.AnyHttpUrl, pydantic.HttpUrl, pydantic.FileUrl, pydantic.FtpUrl, pydantic.WebsocketUrl,
    pydantic.AnyWebsocketUrl, pydantic.PostgresDsn, pydantic.CockroachDsn, pydantic.AmqpDsn, pydantic.RedisDsn,
    pydantic.MongoDsn, pydantic.KafkaDsn, pydantic.NatsDsn, pydantic.MySQLDsn, pydantic.MariaDBDsn,
    pydantic.ClickHouseDsn, pydantic.SnowflakeDsn, pydantic.EmailStr, pydantic.NameEmail, pydantic.IPvAnyAddress,
    pydantic.IPvAnyInterface, pydantic.IPvAnyNetwork,
    Annotated[pydantic.AnyUrl, networks.UrlConstraints(allowed_schemes=["ftp", "gopher"])],
]  # fmt: skip
ALL_TYPES = [*STANDARD_TYPES, *PYDANTIC_TYPES, *NETWORK_TYPES]
