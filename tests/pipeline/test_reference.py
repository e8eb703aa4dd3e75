"""The published schema and the tables of the documentation are those of the code."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import yaml
from configurations import FIRST_FORM, NEWER_FORM, PAGE, graph
from json_schema import fits

from quiver.pipeline.settings import options
from quiver.pipeline.settings.reference import renewed, tables
from quiver.pipeline.settings.schema import field_texts, json_schema, names_of, plugins

SCHEMA = json_schema()
RENEW = "run .venv/bin/python tools/renew-configuration-docs"
OPTION_CLASSES = [
    each
    for each in vars(options).values()
    if isinstance(each, type) and dataclasses.is_dataclass(each)
]


def is_allowed(text: str) -> bool:
    document: Any = yaml.safe_load(text)
    return fits(document, SCHEMA, SCHEMA)


def test_the_schema_is_up_to_date() -> None:
    published = (PAGE.parent / "pipeline.schema.json").read_text()
    assert json.loads(published) == SCHEMA, RENEW


def test_the_tables_of_the_page_are_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == renewed(page), RENEW


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lost the marks"):
        renewed("# Configuration")


@pytest.mark.parametrize("cls", OPTION_CLASSES, ids=lambda cls: cls.__name__)
def test_every_option_is_in_the_tables(cls: type) -> None:
    text = tables()
    for field in dataclasses.fields(cls):
        assert f"| `{field.name}` | " in text
    for words in field_texts(cls).values():
        assert " ".join(words.split()).replace("``", "`") in text


def test_every_plugin_has_its_names() -> None:
    text = tables()
    for plugin in plugins():
        assert f"### {plugin.kind} `{plugin.name}`" in text
        for name in names_of(plugin):
            assert f"`{plugin.kind}:{name}`" in text


def test_texts_of_a_base_are_those_of_a_class_too() -> None:
    assert field_texts(options.OtlpHttpOptions)["max_request_bytes"] == "After decompression."


@pytest.mark.parametrize("text", [FIRST_FORM, NEWER_FORM])
def test_the_examples_fit_the_schema(text: str) -> None:
    assert is_allowed(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("target_size", "targt_size"),
        ("durability: wal", "durability: disk"),
        ("size_cap_policy: drop_oldest", "size_cap_policy: drop_newest"),
        ("kind: receiver", "kind: reciever"),
        ("round_robin", "round_robbin"),
        ("destinations:", "destination:"),
        ("grpc_endpoint", "grpc_endpont"),
        ("payload_compression: none", "payload_compression: brotli"),
        ("config:", "confg:"),
        ("nodes:", "node:"),
        ("response_stream_channel_size: 256", "response_stream_channel_size: many"),
    ],
)
def test_mistakes_in_the_first_example_do_not_fit_the_schema(old: str, new: str) -> None:
    # The OTLP receiver is left out: which options it has depends on its protocol.
    text = FIRST_FORM.replace("otel:otlp:receiver", "otel:otlp_grpc:receiver")
    assert old in text
    assert is_allowed(text)
    assert not is_allowed(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("listening_addr", "listen_addr"),
        ("grpc:\n", "grcp:\n"),
        ("- attribute:", "- atribute:"),
        ("retention_size_cap", "retention_size_cup"),
        ("otel_dataflow/v1", "otel_dataflow/v2"),
        ("url:", "uri:"),
        ("to: durable_buffer", "too: durable_buffer"),
    ],
)
def test_mistakes_in_the_newer_example_do_not_fit_the_schema(old: str, new: str) -> None:
    assert old in NEWER_FORM
    assert not is_allowed(NEWER_FORM.replace(old, new))


def test_names_that_stand_for_values_fit_the_schema() -> None:
    config = 'max_in_flight: "${env:N}", durability: "{{d}}", path: "{{p}}"'
    assert is_allowed(graph(store=f"processor:persistence | {config}"))
    assert not is_allowed(graph(store="processor:persistence | max_in_flight: soon"))
    assert is_allowed("nodes: {}\nprocess: {cores: auto}")
    assert not is_allowed("nodes: {}\nprocess: {cores: all}")
