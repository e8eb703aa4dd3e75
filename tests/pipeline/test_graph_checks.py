"""Graphs whose nodes are all right, and that are wrong as a whole."""

from __future__ import annotations

import pytest
from configurations import graph, load, mistakes, only_mistake

OTLP = "receiver:otlp"
STORE = "processor:persistence"
BATCH = "processor:batch"
DEBUG = "exporter:debug"


def warnings(text: str) -> list[str]:
    return [str(warning) for warning in load(text).warnings]


@pytest.mark.parametrize(
    "nodes",
    [
        {"a": f"{OTLP} -> s", "s": f"{STORE} -> b", "b": f"{BATCH} -> d", "d": DEBUG},
        {"a": f"{OTLP} -> b", "b": f"{BATCH} -> s", "s": f"{STORE} -> d", "d": DEBUG},
        {"a": f"{OTLP} -> b", "b": f"{BATCH} -> d", "d": DEBUG},
        {"a": f"{OTLP} -> d", "d": DEBUG},
        {"a": f"{OTLP} -> b, c", "b": f"{BATCH} -> d", "c": f"{BATCH} -> d", "d": DEBUG},
        {
            "a": f"{OTLP} -> s",
            "s": f"{STORE} -> t | path: one",
            "t": f"{STORE} -> d | path: two",
            "d": DEBUG,
        },
    ],
)
def test_a_store_may_stand_anywhere(nodes: dict[str, str]) -> None:
    assert warnings(graph(**nodes)) == []


def test_a_destination_that_is_not_there() -> None:
    text = graph(a=f"{OTLP} -> stroe", store=f"{STORE} -> d", d=DEBUG)
    assert only_mistake(text) == (
        "p.yaml:5:38: there is no node 'stroe' (did you mean 'store'? allowed: d, store)"
    )


def test_a_receiver_takes_nothing() -> None:
    text = graph(a=f"{OTLP} -> b", b="receiver:otlp_http -> d", d=DEBUG)
    assert "'b' is a receiver: it takes items from nobody" in only_mistake(text)


def test_an_exporter_hands_nothing_on() -> None:
    text = graph(a=f"{OTLP} -> d", d=f"{DEBUG} -> e", e=DEBUG)
    assert only_mistake(text).startswith("p.yaml:9:17: 'd' is an exporter: it hands nothing on")


@pytest.mark.parametrize("kind", [OTLP, BATCH])
def test_what_would_be_lost_is_a_mistake(kind: str) -> None:
    text = graph(a="receiver:otlp_http -> x", x=DEBUG, b=kind)
    if kind == BATCH:
        text = text.replace("[x]", "[b]")
    assert "'b' has no destination: what it gets would be lost" in only_mistake(text)


@pytest.mark.parametrize(
    ("nodes", "circle"),
    [
        ({"b": f"{BATCH} -> b"}, "b -> b"),
        ({"b": f"{BATCH} -> c", "c": f"{STORE} -> b"}, "b -> c -> b"),
        (
            {"b": f"{BATCH} -> d, c", "c": f"{BATCH} -> e", "e": f"{BATCH} -> c, d", "d": DEBUG},
            "c -> e -> c",
        ),
    ],
)
def test_items_do_not_go_round(nodes: dict[str, str], circle: str) -> None:
    found = only_mistake(graph(a=f"{OTLP} -> b", **nodes))
    assert found.endswith(f"items would go round for ever: {circle}")


def test_every_circle_is_told() -> None:
    text = graph(a=f"{OTLP} -> b, c", b=f"{BATCH} -> b", c=f"{BATCH} -> c, d", d=DEBUG)
    assert len(mistakes(text)) == 2


def test_a_long_chain_is_walked() -> None:
    chain = {f"n{i}": f"{BATCH} -> n{i + 1}" for i in range(1100)}
    assert warnings(graph(a=f"{OTLP} -> n0", **chain, n1100=DEBUG)) == []


def test_one_way_out() -> None:
    text = graph(a=OTLP, b=DEBUG, c=DEBUG)
    text += "\nconnections: [{from: 'a[\"x\"]', to: b}, {from: 'a[\"y\"]', to: c}]"
    assert "'a' has one way out, not 2" in only_mistake(text)


def test_a_node_that_nothing_reaches_is_a_warning() -> None:
    text = graph(a=f"{OTLP} -> d", d=DEBUG, b=f"{BATCH} -> e", e=DEBUG)
    assert warnings(text) == [
        "p.yaml:9:3: warning: no receiver leads to 'b'",
        "p.yaml:13:3: warning: no receiver leads to 'e'",
    ]


def test_a_graph_that_receives_nothing_is_a_warning() -> None:
    (warning,) = warnings(graph(s=f"{STORE} -> d", d=DEBUG))
    assert "there is no receiver: nothing comes in" in warning


def test_a_store_that_nobody_reads_is_a_warning() -> None:
    (warning,) = warnings(graph(a=f"{OTLP} -> s", s=STORE))
    assert "nobody takes what 's' stores" in warning


# --- addresses ----------------------------------------------------------------------------------


def two_receivers(one: str, other: str) -> list[str]:
    rest = "insecure_ok: true"
    return mistakes(
        graph(
            a=f"{OTLP} -> d | listening_addr: '{one}', {rest}",
            b=f"{OTLP} -> d | listening_addr: '{other}', {rest}",
            d=DEBUG,
        )
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("127.0.0.1:4317", "127.0.0.1:4317"),
        ("localhost:4317", "127.0.0.1:4317"),
        ("0.0.0.0:4317", "127.0.0.1:4317"),
        ("127.0.0.1:4317", "[::]:4317"),
    ],
)
def test_two_receivers_on_one_address(one: str, other: str) -> None:
    (found,) = two_receivers(one, other)
    assert f"'b' listens on {other}, where 'a' listens already" in found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("127.0.0.1:4317", "127.0.0.1:4318"),
        ("127.0.0.1:4317", "127.0.0.2:4317"),
        ("127.0.0.1:0", "127.0.0.1:0"),
    ],
)
def test_two_addresses(one: str, other: str) -> None:
    assert two_receivers(one, other) == []


def test_the_protocols_of_one_receiver_have_two_addresses() -> None:
    here = "{listening_addr: '127.0.0.1:1'}"
    text = graph(a=f"{OTLP} -> d | protocols: {{grpc: {here}, http: {here}}}", d=DEBUG)
    assert "listens already" in only_mistake(text)


def test_a_receiver_on_the_address_of_admin() -> None:
    text = graph(a=f"{OTLP} -> d | listening_addr: '127.0.0.1:8888'", d=DEBUG)
    assert "'a' and admin both listen on 127.0.0.1:8888" in only_mistake(text)


@pytest.mark.parametrize("host", ["[::]", "10.0.0.1", "collector.example"])
@pytest.mark.parametrize(
    ("rest", "allowed"),
    [
        ("max_connections: 1", False),
        ("insecure_ok: true", True),
        ("tls: {cert_file: a, key_file: b}", True),
        ("auth: {keys_file: a}", True),
    ],
)
def test_an_open_address_needs_protection(host: str, rest: str, allowed: bool) -> None:
    found = mistakes(graph(a=f"{OTLP} -> d | listening_addr: '{host}:4317', {rest}", d=DEBUG))
    assert (found == []) is allowed
    assert all("beyond this machine, without tls and auth" in each for each in found)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    assert mistakes(graph(a=f"{OTLP} -> d | listening_addr: '{host}:4317'", d=DEBUG)) == []


# --- stores and their subscribers ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "allowed"),
    [
        ("data", "data", False),
        ("data", "./x/../data", False),
        ("data", "data/core_0", False),
        ("/data", "/data2", True),
        ("data/a", "data/b", True),
    ],
)
def test_each_store_has_a_directory_of_its_own(one: str, other: str, allowed: bool) -> None:
    text = graph(
        a=f"{OTLP} -> s",
        s=f"{STORE} -> t | path: {one}",
        t=f"{STORE} -> d | path: {other}",
        d=DEBUG,
    )
    found = mistakes(text)
    assert (found == []) is allowed
    assert all("'t' and 's' store in one directory" in each for each in found)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("retention: {max_age: 0}", "p.yaml:8:35: retention.max_age is 0.0; it must be above 0"),
        ("max_age: 0", "p.yaml:8:5: retention.max_age is 0.0; it must be above 0"),
        ("segment: {max_open_duration: 0}", "p.yaml:8:43: segment.max_open_duration must be"),
    ],
)
def test_a_store_that_would_not_open(config: str, message: str) -> None:
    found = only_mistake(graph(a=f"{OTLP} -> s", s=f"{STORE} -> d | {config}", d=DEBUG))
    assert found.startswith(message)


@pytest.mark.parametrize("name", ["otlp/export", "a b", "x" * 65, "CON"])
def test_a_destination_of_a_store_is_a_subscriber(name: str) -> None:
    text = f"""
nodes:
  a: {{type: receiver:otlp, out_ports: {{o: {{destinations: [s]}}}}}}
  s: {{type: processor:persistence, out_ports: {{o: {{destinations: ["{name}"]}}}}}}
  "{name}": {{type: exporter:debug}}
"""
    assert only_mistake(text).startswith("p.yaml:4:67: subscriber id ")


def test_a_better_name_is_suggested() -> None:
    text = (
        graph(a=f"{OTLP} -> s", s=f"{STORE} -> otlp/export")
        + "\n  otlp/export: {type: exporter:debug}"
    )
    assert "(call it 'otlp_export')" in only_mistake(text)


def test_a_lake_is_the_subscriber_that_it_says() -> None:
    nodes = {"a": f"{OTLP} -> s", "s": f"{STORE} -> x, y", "x": "exporter:lake"}
    assert mistakes(graph(**nodes, y="exporter:lake | subscriber: other")) == []
    found = only_mistake(graph(**nodes, y="exporter:lake"))
    assert "'y' and 'x' would be one subscriber, 'lake'" in found
    found = only_mistake(graph(**nodes, y="exporter:lake | subscriber: a/b"))
    assert "subscriber id 'a/b' must be" in found


def test_a_lake_reads_from_a_store() -> None:
    text = graph(a=f"{OTLP} -> l", l="exporter:lake")
    assert "only a persistence node leads to it" in only_mistake(text)
    text = graph(a=f"{OTLP} -> d", d=DEBUG, l="exporter:lake")
    assert "it must be a destination of a persistence node" in only_mistake(text)
