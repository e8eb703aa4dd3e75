"""What a configuration file may say beside the names and types of ``options``.

The options are named once, in ``options``. The first documents and the newer configurations of the
reference implementation name some of them otherwise; those names are understood here, so that their
files load as they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quiver.pipeline.settings import options

WORDS_FOR_NONE: Final[Mapping[tuple[type, str], str]] = MappingProxyType(
    {(options.ProcessOptions, "cores"): "auto"}
)
"""How None is written, where it has a word of its own."""

_COMPRESSIONS: Final = ("none", "gzip", "deflate", "zstd")
_OWNERS: Final = ("item", "resource", "scope")
CHOICES: Final[Mapping[tuple[type, str], tuple[str, ...]]] = MappingProxyType(
    {
        (options.Condition, "on"): _OWNERS,
        (options.Condition, "field"): ("name", "kind", "status_code", "severity_number"),
        (options.AttributeRule, "on"): _OWNERS,
        (options.OtlpExporterOptions, "compression_method"): _COMPRESSIONS,
        (options.OtapExporterOptions, "compression_method"): _COMPRESSIONS,
        (options.ArrowOptions, "payload_compression"): ("none", "zstd", "lz4"),
        (options.DebugOptions, "verbosity"): ("none", "basic", "detailed"),
    }
)
"""Texts of which only some are allowed."""

_RECEIVED_BYTES: Final = {
    "max_decoding_message_size": "max_request_bytes",
    "max_request_body_size": "max_request_bytes",
    "max_concurrent_requests": "max_waiting_requests",
}
OTHER_NAMES: Final[Mapping[type, Mapping[str, str]]] = MappingProxyType(
    {
        options.OtlpGrpcOptions: _RECEIVED_BYTES,
        options.OtlpHttpOptions: _RECEIVED_BYTES,
        options.OtapOptions: _RECEIVED_BYTES,
        options.PersistenceOptions: {
            "retention_size_cap": "retention.size_cap",
            "max_age": "retention.max_age",
            "size_cap_policy": "retention.size_cap_policy",
            "max_segment_open_duration": "segment.max_open_duration",
            "initial_retry_interval": "retry.initial_interval",
            "max_retry_interval": "retry.max_interval",
            "retry_multiplier": "retry.multiplier",
        },
    }
)
"""Where else an option may stand: a name, and the path that it is short for."""

_ALWAYS: Final = "a request is answered when it is durable or delivered"
_NOT_NEEDED: Final[Mapping[str, str]] = {"wait_for_result": _ALWAYS}
NOT_NEEDED: Final[Mapping[type, Mapping[str, str]]] = MappingProxyType(
    {
        options.OtlpGrpcOptions: _NOT_NEEDED,
        options.OtlpHttpOptions: _NOT_NEEDED,
        options.OtapOptions: _NOT_NEEDED,
        options.OtlpExporterOptions: {
            "client_pool_size": "connections are opened as they are needed, up to max_in_flight",
            "http": "its options stand beside the endpoint",
        },
        options.PersistenceOptions: {
            "poll_interval": "destinations are told at once when there is something for them"
        },
    }
)
"""Options of the reference implementation that change nothing here, and why."""
