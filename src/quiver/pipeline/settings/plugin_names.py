"""Which names mean which plugin.

=========  =============  ============================================================
kind       plugin         names in a file
=========  =============  ============================================================
receiver   otlp_grpc      ``otlp``, ``otlp_grpc``
receiver   otlp_http      ``otlp`` with ``protocol: http``, ``otlp_http``
receiver   otap           ``otap``
processor  persistence    ``persistence``, ``durable_buffer``, ``store_and_forward``
processor  batch          ``batch``
processor  filter         ``filter``
processor  attributes     ``attributes``, ``attribute``
exporter   otlp           ``otlp``, ``otlp_grpc``, ``otlp_http``
exporter   otap           ``otap``
exporter   parquet        ``parquet``
exporter   buffer         ``buffer``
exporter   lake           ``lake``
exporter   debug          ``debug``, ``console``
=========  =============  ============================================================

A name stands in one of these forms, with the kind before or after it:
``urn:otel:otlp:receiver``, ``urn:otel:receiver:otlp``, ``receiver:otlp``, ``otlp:receiver``; and
alone, ``otlp``, where ``kind: receiver`` stands beside it. The namespace of a URN is ``otel``,
``otap`` or ``quiver``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quiver.errors import InvalidConfig
from quiver.pipeline.settings import options
from quiver.pipeline.settings.mistakes import nearest, quoted, suggestion


class Kind(enum.StrEnum):
    """What a node does."""

    RECEIVER = "receiver"
    PROCESSOR = "processor"
    EXPORTER = "exporter"


@dataclass(frozen=True, slots=True)
class Plugin:
    """What a node is, and what it can be told. ``endpoint`` is short for that option."""

    kind: Kind
    name: str
    options: type
    endpoint: str | None = None


NAMESPACES: Final = ("otel", "otap", "quiver")
OTLP_GRPC: Final = Plugin(Kind.RECEIVER, "otlp_grpc", options.OtlpGrpcOptions)
OTLP_HTTP: Final = Plugin(Kind.RECEIVER, "otlp_http", options.OtlpHttpOptions)
PERSISTENCE: Final = Plugin(Kind.PROCESSOR, "persistence", options.PersistenceOptions)
LAKE: Final = Plugin(Kind.EXPORTER, "lake", options.LakeOptions)
_OTLP: Final = "otlp"
_OTLP_OPTIONS: Final = options.OtlpExporterOptions

PLUGINS: Final[Mapping[Kind, Mapping[str, Plugin]]] = MappingProxyType(
    {
        Kind.RECEIVER: {
            _OTLP: OTLP_GRPC,
            "otlp_grpc": OTLP_GRPC,
            "otlp_http": OTLP_HTTP,
            "otap": Plugin(Kind.RECEIVER, "otap", options.OtapOptions),
        },
        Kind.PROCESSOR: {
            "persistence": PERSISTENCE,
            "durable_buffer": PERSISTENCE,
            "store_and_forward": PERSISTENCE,
            "batch": Plugin(Kind.PROCESSOR, "batch", options.BatchOptions),
            "filter": Plugin(Kind.PROCESSOR, "filter", options.FilterOptions),
            "attributes": Plugin(Kind.PROCESSOR, "attributes", options.AttributesOptions),
            "attribute": Plugin(Kind.PROCESSOR, "attributes", options.AttributesOptions),
        },
        Kind.EXPORTER: {
            _OTLP: Plugin(Kind.EXPORTER, _OTLP, _OTLP_OPTIONS),
            "otlp_grpc": Plugin(Kind.EXPORTER, _OTLP, _OTLP_OPTIONS, "grpc_endpoint"),
            "otlp_http": Plugin(Kind.EXPORTER, _OTLP, _OTLP_OPTIONS, "http_endpoint"),
            "otap": Plugin(Kind.EXPORTER, "otap", options.OtapExporterOptions),
            "parquet": Plugin(Kind.EXPORTER, "parquet", options.ParquetOptions),
            "buffer": Plugin(Kind.EXPORTER, "buffer", options.BufferExporterOptions),
            "lake": LAKE,
            "debug": Plugin(Kind.EXPORTER, "debug", options.DebugOptions),
            "console": Plugin(Kind.EXPORTER, "debug", options.DebugOptions),
        },
    }
)


class UnknownPlugin(InvalidConfig):
    """A name that means no plugin, and what may have been meant."""

    def __init__(self, message: str, hint: str) -> None:
        self.hint = hint
        super().__init__(message)


def find_plugin(text: str, kind: Kind | None) -> tuple[Plugin, bool]:
    """The plugin by that name, and whether the file may still choose among the OTLP receivers."""
    name_kind, name = _split(text, kind)
    if kind is not None and name_kind is not kind:
        raise UnknownPlugin(
            f"{quoted(text)} is of kind {name_kind}, but kind says {kind}", f"kind: {name_kind}"
        )
    plugin = PLUGINS[name_kind].get(name)
    if plugin is None:
        hint = suggestion(name, PLUGINS[name_kind])
        elsewhere = [other for other in Kind if name in PLUGINS[other]]
        if elsewhere and nearest(name, PLUGINS[name_kind]) is None:
            hint = f"its kind is {elsewhere[0]}; {hint}"
        raise UnknownPlugin(f"there is no {name_kind} {quoted(name)}", hint)
    return plugin, name == _OTLP and name_kind is Kind.RECEIVER


def _split(text: str, kind: Kind | None) -> tuple[Kind, str]:
    words = text.split(":")
    if words[0] == "urn" and len(words) == 4:  # noqa: PLR2004 - urn, namespace, kind and name
        if words[1] not in NAMESPACES:
            raise UnknownPlugin(
                f"there is no plugin of namespace {quoted(words[1])}",
                suggestion(words[1], NAMESPACES),
            )
        words = words[2:]
    if len(words) == 1 and kind is not None:
        return kind, words[0]
    kinds = {str(each) for each in Kind}
    if len(words) == 2 and len(kinds & set(words)) == 1:  # noqa: PLR2004 - kind and name
        first, second = words
        return (Kind(first), second) if first in kinds else (Kind(second), first)
    meant = nearest(words[-1], kinds) or nearest(words[0], kinds)
    question = f"did you mean {meant!r} for its kind? " if meant else ""
    raise UnknownPlugin(
        f"{quoted(text)} does not name a plugin",
        f"{question}write urn:otel:otlp:receiver or receiver:otlp, with receiver, processor or "
        "exporter for its kind",
    )
