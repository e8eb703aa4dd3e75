"""The options of the two formats, checked before anything is read.

===========================  ==========  =======================================================
option                       default     what it does
===========================  ==========  =======================================================
``signal``                   none        ``traces``, ``logs`` or ``metrics``; needed unless
                                         ``rows`` is ``bundles``
``rows``                     decoded     ``decoded``: a row for each span, record or point;
                                         ``bundles``: what is stored, as it is
``columns``                  all         names with commas between them: only these are handed
                                         to Spark, which has no way to ask for less itself
``promoted``                 none        a JSON list of attributes with a column of their own:
                                         ``[{"key": "http.route", "column": "http_route",
                                         "type": "string", "level": "item"}]``
``since``, ``until``         none        only rows whose event time is at or after the one, before
                                         the other: ISO 8601, UTC unless it says otherwise
``service``                  none        only rows of the service with this name
``pushdown``                 false       batch: take over filters of the query, too; read below
``malformed``                fail        ``skip``: leave out what cannot be read, with a warning
``failOnDataLoss``           true, for   fail when something that should come was deleted before
                             streams     it was read; otherwise there is a warning
                             false
``partitionBytes``           32 MiB      what a task reads, about
``maxBytesPerTrigger``       none        what a micro-batch reads, about; one piece at least
``maxSegmentsPerTrigger``    none        the same by number of segments; only one of the two
``startingOffsets``          earliest    or an offset as JSON, for a query without a checkpoint
===========================  ==========  =======================================================

``quiver`` has besides:

===========================  ==========  =======================================================
``path``                     needed      an absolute directory: a store, or with ``core_*`` in it
``tail``                     true        batch: also what is still in the log
===========================  ==========  =======================================================

``quiver_buffer`` has besides:

===========================  ==========  =======================================================
``url``                      needed      the object store
``manifest``                 as config   the path of the manifest, in the object store
``dataPrefix``               as config   the prefix of the batches
``queueId``                  from both   what ``source_store`` says
``maxBatchesPerTrigger``     none        in place of ``maxSegmentsPerTrigger``
``ack``                      never       ``commit``: see ``queue_source``
``objects.<name>``           none        passed to the object store: keys, regions
===========================  ==========  =======================================================

``since``, ``until`` and ``service`` are applied before rows reach Spark, in streams as well, and
belong to one DataFrame. A filter of a query (``where``) is not taken over by default, because Spark
4.3 keeps it: it plans a Python source once for each DataFrame, and after ``df.where(...)`` has run,
the next query on ``df`` silently gets the rows of that filter only. With ``pushdown`` it is taken
over: use it for a DataFrame that is loaded for one query.

Spark does not tell upper from lower case in the names of options. Those that begin with
``spark.`` are its own.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa

from quiver.bundle import Signal
from quiver.config import MIB, AttributeLevel, AttributeType, PromotedAttribute
from quiver.errors import InvalidConfig
from quiver.lake.layout import EVENT_TIMES, FROM_INGESTION, file_schema
from quiver.lake.pushdown import Condition, micros_of
from quiver.lake.scanning import read_offset
from quiver.otlp.schema import BYTES, CODE, INT, TEXT, TIME

COMMON: Final = (
    *("signal", "rows", "columns", "promoted", "malformed", "failOnDataLoss", "partitionBytes"),
    *("maxBytesPerTrigger", "startingOffsets", "since", "until", "service", "pushdown"),
)
_BUNDLE_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("store", TEXT),
    pa.field("segment", INT),
    pa.field("bundle", CODE),
    pa.field("slot", CODE),
    pa.field("row", CODE),
    pa.field("signal", TEXT),
    pa.field("ingested_time", TIME),
    pa.field("data", BYTES),
]
BUNDLES: Final = pa.schema(_BUNDLE_FIELDS)
"""What ``rows=bundles`` gives.

Slots that hold bytes (OTLP requests, the context of a request) have a row for each of their values;
the others one row, with ``row`` null and ``data`` the batch as an Arrow IPC stream. ``segment`` and
``bundle`` are null for what is still in the log."""
_DEFAULT_PARTITION: Final = 32 * MIB
_MAX_TEXT: Final = 1 << 20
_Member = TypeVar("_Member", AttributeType, AttributeLevel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a scan was asked for, whatever it reads from."""

    signal: Signal | None
    bundles: bool
    columns: tuple[str, ...] | None
    promoted: tuple[PromotedAttribute, ...]
    skip_malformed: bool
    fail_on_loss: bool | None
    """None: it was not said."""
    partition_bytes: int
    max_bytes: int | None
    max_pieces: int | None
    starting: Mapping[str, int] | None
    conditions: tuple[Condition, ...]
    pushdown: bool

    @property
    def all_columns(self) -> pa.Schema:
        """Everything that can be asked for."""
        if self.bundles or self.signal is None:
            return BUNDLES
        schema = file_schema(self.signal, self.promoted)
        return schema.remove(schema.get_field_index(FROM_INGESTION))

    @property
    def schema(self) -> pa.Schema:
        """What the option ``columns`` leaves of it."""
        return choose(self.all_columns, self.columns)


def choose(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """The columns of a schema, in the order asked for."""
    if columns is None:
        return schema
    unknown = [name for name in columns if schema.get_field_index(name) < 0]
    if unknown:
        raise InvalidConfig(
            f"there is no column {', '.join(unknown)}; there are {', '.join(schema.names)}"
        )
    if not columns or len(set(columns)) != len(columns):
        raise InvalidConfig("columns must be named, and each of them once")
    return pa.schema([schema.field(name) for name in columns])


class Given:
    """Options as they were given: texts, whose names have no upper and lower case."""

    def __init__(self, options: Mapping[str, str], known: Sequence[str], prefix: str = "") -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        accepted = {name.lower() for name in known}
        unknown = sorted(
            name
            for name in self._values
            if name not in accepted
            and not name.startswith("spark.")
            and not (prefix and name.startswith(prefix))
        )
        if unknown:
            raise InvalidConfig(
                f"option {', '.join(unknown)} is not known; these are: {', '.join(sorted(known))}"
            )

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        if value is not None and len(value) > _MAX_TEXT:
            raise InvalidConfig(f"option {name} has {len(value)} characters; at most {_MAX_TEXT}")
        return value

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """The value, or the first of the choices when there is none."""
        value = (self.text(name) or choices[0]).lower()
        if value not in choices:
            raise InvalidConfig(f"option {name} is {value!r}; it must be {' or '.join(choices)}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        choices = ("true", "false") if default else ("false", "true")
        return self.one_of(name, choices) == "true"

    def number(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.isascii() or not value.isdecimal() or not 1 <= int(value[:20]) < 2**63:
            raise InvalidConfig(f"option {name} is {value!r}; it must be a whole number above 0")
        return int(value)

    def json(self, name: str) -> Any:  # noqa: ANN401 - whatever it is, the caller checks it
        value = self.text(name)
        try:
            return None if value is None else json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig(f"option {name} is not JSON: {error}") from error


def read_wanted(given: Given, max_pieces: str) -> Wanted:
    """What all formats understand."""
    bundles = given.one_of("rows", ("decoded", "bundles")) == "bundles"
    signal = given.text("signal")
    if signal is None and not bundles:
        raise InvalidConfig("option signal is missing: traces, logs or metrics")
    if signal is not None and signal not in list(Signal):
        raise InvalidConfig(f"option signal is {signal!r}; it must be traces, logs or metrics")
    columns = given.text("columns")
    limits = given.number("maxBytesPerTrigger"), given.number(max_pieces)
    if None not in limits:
        raise InvalidConfig(f"maxBytesPerTrigger and {max_pieces}: Spark takes one limit, not both")
    wanted = Wanted(
        signal=None if signal is None else Signal(signal),
        bundles=bundles,
        columns=None if columns is None else tuple(name.strip() for name in columns.split(",")),
        promoted=_promoted(given.json("promoted")),
        skip_malformed=given.one_of("malformed", ("fail", "skip")) == "skip",
        fail_on_loss=(
            None if given.text("failOnDataLoss") is None else given.flag("failOnDataLoss")
        ),
        partition_bytes=given.number("partitionBytes") or _DEFAULT_PARTITION,
        max_bytes=limits[0],
        max_pieces=limits[1],
        starting=_starting(given),
        conditions=_conditions(given, None if bundles or signal is None else Signal(signal)),
        pushdown=given.flag("pushdown"),
    )
    _ = wanted.schema  # the names are checked now
    return wanted


def _starting(given: Given) -> dict[str, int] | None:
    text = given.text("startingOffsets")
    if text is None or text == "earliest":
        return None
    offset = given.json("startingOffsets")
    if not isinstance(offset, dict):
        raise InvalidConfig(f"option startingOffsets is {text!r}; it must be earliest or an object")
    return read_offset(offset, "option startingOffsets")


def _conditions(given: Given, signal: Signal | None) -> tuple[Condition, ...]:
    asked = {name: given.text(name) for name in ("since", "until", "service")}
    texts = {name: text for name, text in asked.items() if text is not None}
    if texts and signal is None:
        raise InvalidConfig(f"option {', '.join(texts)}: only decoded rows have times and services")
    found = []
    for name, text in texts.items():
        if name == "service":
            found.append(Condition("service_name", "=", text))
        elif signal is not None:
            operator = ">=" if name == "since" else "<"
            found.append(Condition(EVENT_TIMES[signal], operator, _micros(name, text)))
    return tuple(found)


def _micros(name: str, text: str) -> int:
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidConfig(f"option {name} is {text!r}; it must be ISO 8601: {error}") from error
    return micros_of(time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC))


def _promoted(listed: Any) -> tuple[PromotedAttribute, ...]:  # noqa: ANN401 - JSON
    if listed is None:
        return ()
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise InvalidConfig("option promoted must be a JSON list of objects")
    found = []
    for one in listed:
        unknown = one.keys() - {"key", "column", "type", "level"}
        if unknown or not all(isinstance(value, str) for value in one.values()):
            raise InvalidConfig(
                f"option promoted: {one} must have texts in key, column, type, level"
            )
        if not one.get("key") or not one.get("column"):
            raise InvalidConfig(f"option promoted: {one} needs a key and a column")
        found.append(
            PromotedAttribute(
                key=one["key"],
                column=one["column"],
                type=_member(AttributeType, one.get("type", AttributeType.STRING)),
                level=_member(AttributeLevel, one.get("level", AttributeLevel.ITEM)),
            )
        )
    return tuple(found)


def _member(kind: type[_Member], value: str) -> _Member:
    try:
        return kind(value)
    except ValueError:
        raise InvalidConfig(
            f"option promoted: {value!r} must be one of {', '.join(kind)}"
        ) from None
