"""What each kind of node can be told, with types, units, defaults and ranges.

A configuration file is bound to these classes by ``settings``: names, types and units come from
here, and so does the JSON schema in the documentation. ``Size`` is written as ``32MB`` or ``4GiB``,
``Duration`` as ``25ms`` or ``72h``; plain numbers are bytes and seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

from quiver.config import MIB, Ack, BatchCompression, Durability, SizeCapPolicy
from quiver.errors import InvalidConfig

Size: TypeAlias = Annotated[int, "bytes"]
Duration: TypeAlias = Annotated[float, "seconds"]


def require(condition: object, message: str) -> None:
    """``InvalidConfig`` with the message unless the condition holds."""
    if not condition:
        raise InvalidConfig(message)


# --- security -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Certificates. With ``client_ca_file`` clients must show one that it signed."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthOptions:
    """API keys. Only their hashes are in ``keys_file``, which is read again when it changes."""

    keys_file: Path
    header: str = "x-api-key"
    """Beside ``authorization: Bearer`` and ``x-junjo-api-key``, which are always understood."""
    reload_interval: Duration = 5.0


# --- receivers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverOptions:
    """What all receivers have.

    ``insecure_ok`` allows listening beyond this machine without TLS and keys.
    """

    listening_addr: str
    tls: TlsOptions | None = None
    auth: AuthOptions | None = None
    insecure_ok: bool = False
    max_request_bytes: Size = 16 * MIB
    """After decompression."""
    max_compressed_bytes: Size = 16 * MIB
    max_connections: int = 4096
    max_waiting_requests: int = 1024
    """Requests that were received and are not answered yet; more are told to come later."""
    max_waiting_bytes: Size = 256 * MIB
    retry_after: Duration = 1.0
    """What refused clients are told to wait."""
    keep_headers: tuple[str, ...] = ()
    """Headers that go into the context of an item."""
    response_stream_channel_size: int = 256

    def __post_init__(self) -> None:
        host, colon, port = self.listening_addr.rpartition(":")
        require(
            colon and host and port.isdecimal() and int(port) < 2**16,
            f"listening_addr is {self.listening_addr!r}; it must be host:port, as 127.0.0.1:4317",
        )
        for name in (
            "max_request_bytes",
            "max_compressed_bytes",
            "max_connections",
            "max_waiting_requests",
            "max_waiting_bytes",
            "response_stream_channel_size",
        ):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")

    @property
    def host(self) -> str:
        """Without brackets."""
        return self.listening_addr.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """0 lets the system choose."""
        return int(self.listening_addr.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpGrpcOptions(ReceiverOptions):
    """OTLP over gRPC."""

    listening_addr: str = "127.0.0.1:4317"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpHttpOptions(ReceiverOptions):
    """OTLP over HTTP, protobuf and JSON."""

    listening_addr: str = "127.0.0.1:4318"
    max_json_bytes: Size = 8 * MIB
    """JSON takes dozens of times its size in memory while it is read."""
    max_header_bytes: Size = 64 * 1024
    idle_timeout: Duration = 60.0
    request_timeout: Duration = 30.0
    """From the first byte of a request to its last: a slow sender does not hold a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtapOptions(ReceiverOptions):
    """OTAP streams over gRPC."""

    listening_addr: str = "127.0.0.1:4319"
    max_streams: int = 256
    max_stream_bytes: Size = 64 * MIB
    """Dictionaries and schemas that one stream may make the receiver remember."""


# --- processors -----------------------------------------------------------------------------------


class OtlpHandling(enum.StrEnum):
    """Whether OTLP requests are stored as they came, or as OTAP tables."""

    PASS_THROUGH = "pass_through"  # noqa: S105 - it passes through, it is no password
    CONVERT_TO_ARROW = "convert_to_arrow"


class Recovery(enum.StrEnum):
    """What a destination that comes back gets first."""

    OLDEST_FIRST = "oldest_first"
    NEWEST_FIRST = "newest_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalOptions:
    """The log of the store."""

    max_size: Size = 128 * MIB
    rotation_target: Size = 64 * MIB
    flush_interval: Duration = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions:
    """The segments of the store."""

    target_size: Size = 32 * MIB
    max_open_duration: Duration = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionOptions:
    """How much is kept. ``size_cap`` is for all cores together."""

    size_cap: Size | None = 10 * 1024 * MIB
    size_cap_policy: SizeCapPolicy = SizeCapPolicy.BACKPRESSURE
    max_age: Duration | None = None
    max_retain_after_ingestion_hours: float | None = None
    """The same in hours, as the first documents call it."""
    min_free_space: Size = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """What happens when a destination refuses: it is tried again for as long as it takes."""

    initial_interval: Duration = 1.0
    max_interval: Duration = 30.0
    multiplier: float = 2.0
    jitter: float = 0.5
    """The share of a pause that is left to chance."""

    def __post_init__(self) -> None:
        require(self.initial_interval > 0, "retry.initial_interval must be above 0")
        require(
            self.max_interval >= self.initial_interval,
            "retry.max_interval must not be below retry.initial_interval",
        )
        require(self.multiplier >= 1, "retry.multiplier must be at least 1")
        require(0 <= self.jitter <= 1, "retry.jitter must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistenceOptions:
    """A store between those who send and those who take. Each destination has its own progress."""

    path: Path = Path("quiver_data")
    durability: Durability = Durability.WAL
    ack: Ack = Ack.DURABLE
    otlp_handling: OtlpHandling = OtlpHandling.PASS_THROUGH
    wal: WalOptions = field(default_factory=WalOptions)
    segment: SegmentOptions = field(default_factory=SegmentOptions)
    retention: RetentionOptions = field(default_factory=RetentionOptions)
    retry: RetryOptions = field(default_factory=RetryOptions)
    max_in_flight: int = 64
    """Bundles that a destination works on at the same time."""
    max_in_flight_bytes: Size = 128 * MIB
    drain_rate: float | None = None
    """Bundles per second that a destination gets after an outage; None: as many as it takes."""
    recovery: Recovery = Recovery.OLDEST_FIRST
    max_dead_letter_bytes: Size = 1024 * MIB
    """Items that a destination refuses for ever are kept in ``dead_letter`` beside the store."""

    def __post_init__(self) -> None:
        require(self.max_in_flight >= 1, "max_in_flight must be at least 1")
        require(self.max_in_flight_bytes >= 1, "max_in_flight_bytes must be at least 1")
        require(self.drain_rate is None or self.drain_rate > 0, "drain_rate must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Merges small requests: one item for what comes within ``timeout``, or fills ``max_bytes``."""

    timeout: Duration = 0.2
    max_items: int = 8192
    max_bytes: Size = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """When a rule applies: ``attribute`` of ``on`` (item, resource, scope) ``is`` one of these.

    ``field`` names a field of the item instead: name, kind, status_code, severity_number.
    """

    attribute: str | None = None
    on: str = "item"
    field: str | None = None
    equals: tuple[str, ...] = ()
    matches: str | None = None
    """A regular expression, somewhere in the value."""
    exists: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """Which items go on: those that ``keep`` matches, if it is there, without those of ``drop``."""

    drop: tuple[Condition, ...] = ()
    keep: tuple[Condition, ...] = ()


class AttributeAction(enum.StrEnum):
    """What is done with an attribute."""

    SET = "set"
    DROP = "drop"
    KEEP = "keep"
    HASH = "hash"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeRule:
    """One change. ``keep`` drops all other keys; ``hash`` puts a BLAKE3 sum in place of a text."""

    action: AttributeAction
    keys: tuple[str, ...]
    value: str | int | float | bool | None = None
    on: str = "item"
    where: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributesOptions:
    """Changes to attributes, in order."""

    rules: tuple[AttributeRule, ...] = ()


# --- exporters ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTlsOptions:
    """How the other side is checked, and what it is shown."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpExporterOptions:
    """OTLP to a server: ``grpc_endpoint`` or ``http_endpoint``, one of them."""

    grpc_endpoint: str | None = None
    http_endpoint: str | None = None
    timeout: Duration = 15.0
    compression_method: str = "none"
    """``none``, ``gzip``, ``deflate``; over HTTP also ``zstd``."""
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ClientTlsOptions | None = None
    max_in_flight: int = 16

    def __post_init__(self) -> None:
        require(
            bool(self.grpc_endpoint) != bool(self.http_endpoint),
            "an OTLP exporter needs grpc_endpoint or http_endpoint, one of them",
        )
        require(self.max_in_flight >= 1, "max_in_flight must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowOptions:
    """How OTAP payloads are written."""

    payload_compression: str = "none"
    """``none``, ``zstd`` or ``lz4``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtapExporterOptions:
    """OTAP streams to a server."""

    grpc_endpoint: str
    timeout: Duration = 15.0
    compression_method: str = "none"
    """``none``, ``gzip``, ``deflate``; ``zstd`` compresses the payloads instead, see the manual."""
    arrow: ArrowOptions = field(default_factory=ArrowOptions)
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ClientTlsOptions | None = None
    max_in_flight: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetOptions:
    """Parquet files in the lake's schema, in a directory or an object store, by date."""

    url: str
    """``file:///data/spans``, ``s3://bucket/prefix`` ..."""
    max_rows: int = 500_000
    max_bytes: Size = 128 * MIB
    max_delay: Duration = 30.0
    """How long items wait for others before a file is written."""
    compression: str = "zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferExporterOptions:
    """A queue in object storage."""

    url: str
    manifest_path: str = "ingest/manifest"
    data_path_prefix: str = "ingest"
    flush_interval: Duration = 0.1
    flush_size_bytes: Size = 64 * MIB
    compression: BatchCompression = BatchCompression.ZSTD
    committer: str | None = None
    gc_grace_period: Duration = 600.0
    """As the consumer of the queue has it: a batch is not announced later than half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeOptions:
    """The lake: a subscriber in another process, which reads the store and keeps its progress."""

    subscriber: str = "lake"


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugOptions:
    """Writes what passes to standard output: ``basic`` a line an item, ``detailed`` all of it.

    With ``none`` it takes everything and writes nothing.
    """

    verbosity: str = "basic"


# --- the process ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminOptions:
    """Health and metrics."""

    listening_addr: str = "127.0.0.1:8888"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """One process per core, and how it ends."""

    cores: int | None = 1
    """None, ``auto`` in a file: as many as the machine has."""
    admin: AdminOptions = field(default_factory=AdminOptions)
    shutdown_timeout: Duration = 30.0
    max_memory: Size | None = None
    """Resident bytes of one process above which receivers refuse; None: half of the machine."""
