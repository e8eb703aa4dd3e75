"""OTLP and Arrow: what came over the wire as columns, and back, without Python work per span.

    from quiver.bundle import Signal
    from quiver.otlp import decode, encode

    decoded = decode(Signal.TRACES, requests)     # serialised ExportTraceServiceRequest messages
    decoded.table                                 # one row for each span, in the lake's schema
    decoded.failures                              # requests that could not be read, and why
    encode(Signal.TRACES, decoded.table, decoded.requests)

The way of the bytes: ``wire`` to the request batch, one row a request with everything nested in it;
from there ``flat`` to the tables of the lake, or ``otap`` to the tables of OTAP; and back.
"""

from quiver.otlp.convert import Converted, Decoded, decode, encode, from_otap, to_otap
from quiver.otlp.flat import Source
from quiver.otlp.json_text import from_json, to_json
from quiver.otlp.schema import lake_schema

__all__ = [
    "Converted",
    "Decoded",
    "Source",
    "decode",
    "encode",
    "from_json",
    "from_otap",
    "lake_schema",
    "to_json",
    "to_otap",
]
