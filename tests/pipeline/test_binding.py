"""Options of nodes: values, names that stand for values, names of plugins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from configurations import (
    DEBUG,
    STORE,
    config_mistakes,
    graph,
    load,
    mistakes,
    only_mistake,
    options_of,
    store_of,
)

from quiver.pipeline.settings.options import (
    AdminOptions,
    AttributeAction,
    AttributesOptions,
    FilterOptions,
    OtlpExporterOptions,
    PersistenceOptions,
)
from quiver.pipeline.settings.plugin_names import PLUGINS, Kind, find_plugin

# --- values -------------------------------------------------------------------------------------


def test_texts_stay_what_they_are() -> None:
    bound = options_of(
        """
        rules:
          - {action: set, keys: [no, 1e3, 2024-01-01, on], value: 0.5, on: resource}
          - {action: hash, keys: ["a"], where: [{attribute: x, equals: [yes, 010, ~x]}]}
        """,
        "processor:attributes",
    )
    assert isinstance(bound, AttributesOptions)
    first, second = bound.rules
    assert (first.keys, first.on, first.value) == (
        ("no", "1e3", "2024-01-01", "on"),
        "resource",
        0.5,
    )
    assert first.action is AttributeAction.SET
    assert second.where[0].equals == ("yes", "010", "~x")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ('"5"', "5"),
        ("-2.5", -2.5),
        ("true", True),
        ("off", False),
        ('"true"', "true"),
        ("null", None),
        ("10:30", "10:30"),
        ("0x10", "0x10"),
    ],
)
def test_where_several_types_are_allowed_yaml_decides(text: str, value: object) -> None:
    bound = options_of(
        f"rules: [{{action: set, keys: [a], value: {text}}}]", "processor:attributes"
    )
    assert isinstance(bound, AttributesOptions)
    assert bound.rules[0].value == value
    assert type(bound.rules[0].value) is type(value)


def test_parts_that_are_left_empty_have_their_defaults() -> None:
    assert store_of("wal:\nretention: ~\npath: data") == replace(
        PersistenceOptions(), path=Path("data")
    )
    assert options_of("drop:", "processor:filter") == FilterOptions()


@pytest.mark.parametrize("text", ["true", "yes", "On"])
def test_truths(text: str) -> None:
    bound = options_of(f"drop: [{{attribute: a, exists: {text}}}]", "processor:filter")
    assert isinstance(bound, FilterOptions)
    assert bound.drop[0].exists is True


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("max_in_flight: many", "max_in_flight must be a whole number, not 'many'"),
        ("max_in_flight: 1.5", "max_in_flight must be a whole number, not '1.5'"),
        ("max_in_flight: -1", "max_in_flight must not be negative"),
        ("max_in_flight: 0", "max_in_flight must be at least 1"),
        ("max_in_flight: [1]", "max_in_flight must be a whole number, not a list"),
        ("max_in_flight:", "max_in_flight must be a whole number, not empty"),
        (f"max_in_flight: {'9' * 99}", "max_in_flight must be a whole number, not '99"),
        ("drain_rate: fast", "drain_rate must be a number, not 'fast'"),
        ("drain_rate: .inf", "drain_rate must be a number, not '.inf'"),
        ("path: ''", "path must be a path, not ''"),
        ("wal: 5", "wal must be a mapping of options"),
        ("wal: {max_size: 4XB}", "max_size cannot be '4XB': a size is a number with a unit"),
        ("durability: disk", "durability cannot be 'disk' (allowed: segment_only, wal)"),
        ("durability: wall", "durability cannot be 'wall' (did you mean 'wal'? allowed: "),
        ("retry: {max_interval: 1ms}", "retry.max_interval must not be below"),
        ("Max_In_Flight: 1", "node has no option 'Max_In_Flight' (did you mean 'max_in_flight'?"),
        ("retention_size_cup: 1", "(did you mean 'retention_size_cap'?)"),
    ],
)
def test_what_does_not_fit(config: str, message: str) -> None:
    (found,) = config_mistakes(config)
    assert message in found


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("exporter:parquet", "max_rows: 1", "node needs 'url', which is missing"),
        ("exporter:parquet", "ulr: x", "node has no option 'ulr' (did you mean 'url'? allowed: "),
        ("exporter:otlp", "timeout: 1s", "an OTLP exporter needs grpc_endpoint or http_endpoint"),
        ("exporter:debug", "verbosity: loud", "verbosity cannot be 'loud' (allowed: basic, deta"),
        ("processor:filter", "drop: x", "drop must be a list, not 'x' (write [x])"),
        ("processor:filter", "drop: [x]", "drop[0] must be a mapping of options"),
        ("processor:filter", "drop: [{on: spam}]", "on cannot be 'spam'"),
        ("exporter:otlp", "{grpc_endpoint: a, headers: x}", "headers must be a mapping, not 'x'"),
        ("exporter:otlp", "{grpc_endpoint: a, headers: {b: [1]}}", "headers.b must be a text, not"),
        ("exporter:otlp", "{grpc_endpoint: ~, http_endpoint: }", "needs grpc_endpoint or http"),
    ],
)
def test_what_does_not_fit_other_nodes(kind: str, config: str, message: str) -> None:
    (found,) = config_mistakes(config, kind)
    assert message in found


def test_a_mistake_of_several_options_stands_at_one_of_them() -> None:
    (found,) = config_mistakes("path: a\nretry:\n  multiplier: 3\n  jitter: 7")
    assert found == "p.yaml:8:17: retry.jitter must be between 0 and 1"


def test_an_endpoint_is_that_of_its_protocol() -> None:
    bound = options_of("{endpoint: http://a, client_pool_size: 1, http: {}}", "exporter:otlp_http")
    assert bound == OtlpExporterOptions(http_endpoint="http://a")
    bound = options_of("endpoint: http://a", "urn:otel:exporter:otlp_grpc")
    assert bound == OtlpExporterOptions(grpc_endpoint="http://a")


# --- names that stand for values ----------------------------------------------------------------


def test_names_are_replaced() -> None:
    text = graph(a="receiver:otlp -> s", s=f"{STORE} -> d", d=DEBUG)
    text += (
        "\nprocess:\n  cores: ${env:CORES}\n  admin: {listening_addr: '{{ host }}:${env:P:-81}'}"
    )
    settings = load(text, {"CORES": "3"}, {"host": "127.0.0.9"})
    assert settings.process.cores == 3
    assert settings.process.admin == AdminOptions(listening_addr="127.0.0.9:81")
    assert load(text, {"CORES": "auto", "P": ""}, {"host": "h"}).process.cores is None
    other = load(text, {"CORES": "3", "P": "82"}, {"host": "h"}).process
    assert other.admin == AdminOptions(listening_addr="h:82")


def test_a_name_that_becomes_nothing_is_nothing() -> None:
    text = graph(a="receiver:otlp -> d", d=DEBUG) + "\nprocess:\n  max_memory: ${env:MEMORY:-}\n"
    assert load(text).process.max_memory is None
    assert load(text, {"MEMORY": "2GiB"}).process.max_memory == 2**31


def test_a_value_is_not_looked_into_again() -> None:
    text = graph(a="receiver:otlp -> e", e="exporter:otlp | grpc_endpoint: '{{e}}$${env:X}'")
    node = load(text, variables={"e": "{{f}}: {a: [b"}).nodes["e"]
    assert node.options == OtlpExporterOptions(grpc_endpoint="{{f}}: {a: [b${env:X}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("'{{hots}}'", "variable 'hots' has no value (did you mean {{host}}? give it with --set"),
        ("'{{}}'", "variable '' has no value"),
        ("'${env:NOPE}'", "environment variable 'NOPE' is not set (set it, or give a default as"),
        ("'${NOPE}'", "${NOPE} names nothing (write ${env:NOPE} for the environment"),
        ("{{host}}", "grpc_endpoint must be a text, not a mapping"),
    ],
)
def test_names_that_stand_for_nothing(text: str, message: str) -> None:
    file = graph(a="receiver:otlp -> e", e=f"exporter:otlp | grpc_endpoint: {text}")
    found = mistakes(file, variables={"host": "h"})
    assert any(each.startswith("p.yaml:8:29: ") and message in each for each in found), found


def test_a_missing_name_is_told_once() -> None:
    text = graph(a="receiver:otlp -> s", s=f"{STORE} | wal: {{max_size: '{{{{size}}}}'}}")
    assert "has no value" in only_mistake(text)


def test_a_value_from_outside_is_not_shown() -> None:
    text = graph(a="receiver:otlp -> s", s=f"{STORE} | max_in_flight: '${{env:TOKEN}}'")
    found = only_mistake(text, environment={"TOKEN": "hunter2"})
    assert "hunter2" not in found
    assert "not '${env:TOKEN}'" in found


# --- names of plugins ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "plugin"),
    [
        ("urn:otel:otlp:receiver", None, "otlp_grpc"),
        ("urn:otel:otap:receiver", Kind.RECEIVER, "otap"),
        ("urn:otap:processor:persistence", Kind.PROCESSOR, "persistence"),
        ("urn:otel:otap:exporter", None, "otap"),
        ("urn:otel:otlp:exporter", None, "otlp"),
        ("urn:otel:receiver:otlp", None, "otlp_grpc"),
        ("urn:otel:processor:durable_buffer", None, "persistence"),
        ("urn:otel:exporter:otlp_grpc", None, "otlp"),
        ("urn:quiver:exporter:lake", None, "lake"),
        ("receiver:otlp", None, "otlp_grpc"),
        ("otlp:receiver", None, "otlp_grpc"),
        ("otlp_http", Kind.RECEIVER, "otlp_http"),
        ("exporter:console", None, "debug"),
    ],
)
def test_plugins_by_name(text: str, kind: Kind | None, plugin: str) -> None:
    assert find_plugin(text, kind)[0].name == plugin


def test_the_table_of_names_is_complete() -> None:
    from quiver.pipeline.settings import plugin_names

    documented = plugin_names.__doc__ or ""
    for kind, plugins in PLUGINS.items():
        for name, plugin in plugins.items():
            assert any(
                line.split()[:2] == [kind, plugin.name] and f"``{name}``" in line
                for line in documented.splitlines()
            ), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type: receiver:oltp", "there is no receiver 'oltp' (did you mean 'otlp'? allowed: "),
        ("type: reciever:otlp", "does not name a plugin (did you mean 'receiver' for its kind?"),
        ("type: otlp", "'otlp' does not name a plugin (write urn:otel:otlp:receiver or"),
        ("type: 'urn:acme:receiver:otlp'", "there is no plugin of namespace 'acme'"),
        ("type: processor:parquet", "(its kind is exporter; allowed: "),
        ("{kind: exporter, type: receiver:otlp}", "is of kind receiver, but kind says exporter"),
        ("{kind: sender, type: otlp:receiver}", "there is no kind 'sender'"),
        ("{type: receiver:otlp, plugin_urn: x}", "either type or plugin_urn, not both"),
        ("config: {}", "node 'a' needs a type, or a plugin_urn"),
        ("type: [x]", "the type of a node must be a text"),
        ("{type: exporter:debug, confg: {}}", "has no key 'confg' (did you mean 'config'?"),
    ],
)
def test_nodes_that_are_nothing(text: str, message: str) -> None:
    found = mistakes(f"nodes:\n  a:\n    {text}\n")
    assert any(message in each for each in found), found
