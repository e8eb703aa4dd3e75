"""Settings become nodes: each of its class, joined as the file says, destinations first."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from types import MappingProxyType

import pytest
from configurations import FIRST_FORM, FIRST_VARIABLES, graph, load
from running import free_ports

from quiver.errors import InvalidConfig
from quiver.metrics import Metrics
from quiver.pipeline import build as build_module
from quiver.pipeline.build import CLASSES, Graph, Surroundings, build, find_class
from quiver.pipeline.node import Dispatch
from quiver.pipeline.persistence import ExternalTaker, Persistence
from quiver.pipeline.settings.load import NodeSpec, PortSpec, Settings, default_settings
from quiver.pipeline.settings.options import DebugOptions
from quiver.pipeline.settings.plugin_names import PLUGINS, Kind
from quiver.pipeline.worker import Pipeline


def built(text: str, core: int = 0) -> Graph:
    return build(load(text), Surroundings(Metrics(), core))


def names(found: Graph) -> list[str]:
    return [node.name for node in found.nodes]


def by_hand(**destinations: tuple[str, ...]) -> Settings:
    """Settings that no file was read for: processors that lead where they are told."""
    place = next(iter(default_settings().nodes.values())).where
    batch = PLUGINS[Kind.PROCESSOR]["batch"]
    nodes = {
        name: NodeSpec(
            name, Kind.PROCESSOR, "batch", batch.options(), {"out": PortSpec(towards)}, place
        )
        for name, towards in destinations.items()
    }
    return Settings(nodes, default_settings().process, "by hand")


def test_destinations_come_before_those_who_send() -> None:
    found = built(
        graph(
            r="receiver:otlp_http -> f",
            f="processor:filter -> b",
            b="processor:batch -> s",
            s="processor:persistence -> x, y",
            x="exporter:debug",
            y="processor:attributes -> z",
            z="exporter:otlp_http | endpoint: 'http://127.0.0.1:1'",
        )
    )
    order = names(found)
    for sender, destination in ("rf", "fb", "bs", "sx", "sy", "yz"):
        assert order.index(destination) < order.index(sender)
    assert sorted(order) == sorted("rfbsxyz")
    assert [node.name for node in found.receivers] == ["r"]
    assert [node.name for node in found.stores] == ["s"]


def test_a_port_sends_where_the_file_says() -> None:
    text = graph(r="receiver:otlp_http -> a, b", a="exporter:debug", b="exporter:debug")
    text = text.replace("[a, b]", "[a, b], dispatch_strategy: broadcast")
    found = built(text)
    (receiver,) = found.receivers
    port = receiver._admission._port  # type: ignore[attr-defined]  # of this kind of receiver
    assert [taker.name for taker in port._destinations] == ["a", "b"]
    assert port._dispatch is Dispatch.BROADCAST


def test_a_store_is_that_of_its_core_and_can_be_made_for_another(tmp_path: Path) -> None:
    text = graph(
        r="receiver:otlp_http -> s",
        s=f"processor:persistence -> x | path: {tmp_path}",
        x="exporter:debug",
    )
    found = built(text, core=3)
    assert [store.directory for store in found.stores] == [tmp_path / "core_3"]
    spare = found.spare_stores["s"]
    assert spare.options.path == tmp_path
    other = spare.make(7)
    assert other.directory == tmp_path / "core_7"
    assert other._destinations == found.stores[0]._destinations


def test_a_lake_is_a_subscriber_and_no_node(tmp_path: Path) -> None:
    found = built(
        graph(
            r="receiver:otlp_http -> s",
            s=f"processor:persistence -> l | path: {tmp_path}",
            l="exporter:lake | subscriber: pond",
        )
    )
    assert names(found) == ["s", "r"]
    (lake,) = found.stores[0]._destinations
    assert isinstance(lake, ExternalTaker)
    assert (lake.name, lake.subscriber) == ("l", "pond")


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("grpc_endpoint: 'http://127.0.0.1:1'", "OtlpGrpcExporter"),
        ("http_endpoint: 'http://127.0.0.1:1'", "OtlpHttpExporter"),
    ],
)
def test_the_endpoint_says_how_otlp_is_sent(endpoint: str, name: str) -> None:
    found = built(graph(r="receiver:otlp_http -> x", x=f"exporter:otlp | {endpoint}"))
    assert type(found.nodes[0]).__name__ == name


def test_every_plugin_has_a_class_or_is_special() -> None:
    special = {"persistence", "lake", "otlp"}  # OTLP is one of two
    named = {
        (kind, plugin.name)
        for kind in Kind
        for plugin in PLUGINS[kind].values()
        if plugin.name not in special
    }
    assert named | {(Kind.EXPORTER, "otlp_grpc"), (Kind.EXPORTER, "otlp_http")} == CLASSES.keys()


@pytest.mark.parametrize("key", CLASSES, ids=str)
def test_every_class_is_where_the_table_says(key: tuple[Kind, str]) -> None:
    kind, plugin = key
    module = f"quiver.pipeline.{kind}s.{CLASSES[key].partition(':')[0]}"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there yet")
    place = next(iter(default_settings().nodes.values())).where
    assert callable(find_class(NodeSpec("n", kind, plugin, object(), {}, place)))


# --- mistakes -----------------------------------------------------------------------------------


def test_what_a_node_refuses_is_told_with_its_place() -> None:
    text = graph(
        r="receiver:otlp_http -> b", b="processor:batch -> x | timeout: 0s", x="exporter:debug"
    )
    with pytest.raises(InvalidConfig, match=r"p\.yaml:6.*: b: timeout must be above 0"):
        built(text)


def test_a_plugin_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**CLASSES, (Kind.EXPORTER, "debug"): "not_there:Nothing"}
    monkeypatch.setattr(build_module, "CLASSES", MappingProxyType(table))
    with pytest.raises(InvalidConfig, match="x: the debug exporter is not part of this version"):
        built(graph(r="receiver:otlp_http -> x", x="exporter:debug"))


def test_a_module_that_a_plugin_needs_is_not_taken_for_the_plugin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needy.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(build_module, "CLASSES", {(Kind.EXPORTER, "debug"): "needy:Nothing"})
    monkeypatch.setattr(build_module, "_PACKAGES", {Kind.EXPORTER: "quiver.pipeline"})
    import quiver.pipeline

    monkeypatch.setattr(quiver.pipeline, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        built(graph(r="receiver:otlp_http -> x", x="exporter:debug"))


def test_settings_made_by_hand_are_checked_too() -> None:
    around = Surroundings(Metrics())
    with pytest.raises(InvalidConfig, match="go round for ever: a -> b -> a"):
        build(by_hand(a=("b",), b=("a",)), around)
    with pytest.raises(InvalidConfig, match="a leads to b, which is not there"):
        build(by_hand(a=("b",)), around)
    settings = default_settings()
    spec = settings.nodes["otlp_http"]
    two = NodeSpec(
        spec.name,
        spec.kind,
        spec.plugin,
        spec.options,
        {"one": PortSpec(("persistence",)), "two": PortSpec(("persistence",))},
        spec.where,
    )
    nodes = {**settings.nodes, "otlp_http": two}
    with pytest.raises(InvalidConfig, match="otlp_http has one way out, not 2"):
        build(Settings(nodes, settings.process, ""), around)
    odd = NodeSpec("x", Kind.EXPORTER, "unheard", DebugOptions(), {}, spec.where)
    with pytest.raises(InvalidConfig, match="there is no exporter unheard"):
        build(Settings({"x": odd}, settings.process, ""), around)


# --- whole files --------------------------------------------------------------------------------


def test_the_defaults_are_built() -> None:
    found = build(default_settings(), Surroundings(Metrics()))
    assert names(found) == ["persistence", "otlp_grpc", "otlp_http"]
    assert isinstance(found.nodes[0], Persistence)


def test_the_first_example_starts(tmp_path: Path) -> None:
    ports = iter(free_ports(2))
    text = re.sub(
        r'listening_addr: "127.0.0.1:\d+"',
        lambda _: f'listening_addr: "127.0.0.1:{next(ports)}"',
        FIRST_FORM,
    ).replace("./quiver_data", str(tmp_path / "data"))

    async def run() -> None:
        settings = load(text, variables=FIRST_VARIABLES)
        async with Pipeline(settings) as pipeline:
            assert pipeline.why_not_ready() is None
            assert (tmp_path / "data" / "core_0").is_dir()
            for name in ("otlp_receiver", "otap_receiver"):
                host, port = pipeline[name].address
                _, writer = await asyncio.open_connection(host, port)
                writer.close()

    asyncio.run(run())
