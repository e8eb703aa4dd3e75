"""Configuration files as a whole: what they mean, and every mistake in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from configurations import (
    DEBUG,
    FIRST_FORM,
    FIRST_VARIABLES,
    NEWER_ENVIRONMENT,
    NEWER_FORM,
    NEWER_VARIABLES,
    config_mistakes,
    graph,
    load,
    mistakes,
    only_mistake,
    store_of,
)
from hypothesis import example, given
from hypothesis import settings as how
from hypothesis import strategies as st

from quiver.config import Durability, SizeCapPolicy
from quiver.errors import InvalidConfig
from quiver.pipeline.node import Dispatch
from quiver.pipeline.settings.load import (
    InvalidSettings,
    PortSpec,
    Settings,
    default_settings,
    load_settings,
    read_settings,
)
from quiver.pipeline.settings.options import (
    OtapExporterOptions,
    OtapOptions,
    OtlpExporterOptions,
    OtlpGrpcOptions,
    OtlpHandling,
    OtlpHttpOptions,
    PersistenceOptions,
    ProcessOptions,
)
from quiver.pipeline.settings.plugin_names import Kind

# --- the examples -------------------------------------------------------------------------------


def first_example() -> Settings:
    return load(FIRST_FORM, variables=FIRST_VARIABLES)


def newer_example() -> Settings:
    return load(NEWER_FORM, NEWER_ENVIRONMENT, NEWER_VARIABLES)


@pytest.mark.parametrize("example", [first_example, newer_example])
def test_the_examples_of_the_page_load(example: object) -> None:
    assert callable(example)
    assert example().warnings == ()


def test_the_first_form() -> None:
    nodes = first_example().nodes
    ports = {"out_port": PortSpec(("persistence",), Dispatch.ROUND_ROBIN)}
    assert [*nodes] == [
        "otlp_receiver",
        "otap_receiver",
        "persistence",
        "otap_exporter",
        "otlp_exporter",
    ]
    receiver = nodes["otlp_receiver"]
    assert (receiver.kind, receiver.plugin, receiver.ports) == (Kind.RECEIVER, "otlp_grpc", ports)
    assert receiver.options == OtlpGrpcOptions(listening_addr="127.0.0.1:4317")
    assert (receiver.where.source, receiver.where.line) == ("p.yaml", 2)
    assert nodes["otap_receiver"].options == OtapOptions(listening_addr="127.0.0.1:4318")
    assert nodes["persistence"].destinations == ("otap_exporter", "otlp_exporter")
    exporter = nodes["otap_exporter"].options
    assert isinstance(exporter, OtapExporterOptions)
    assert (exporter.grpc_endpoint, exporter.compression_method) == ("http://backend:1235", "zstd")
    assert nodes["otlp_exporter"].options == OtlpExporterOptions(
        grpc_endpoint="http://127.0.0.1:4318"
    )


def test_the_store_of_the_first_form() -> None:
    store = first_example().nodes["persistence"].options
    assert isinstance(store, PersistenceOptions)
    assert (store.path, store.durability) == (Path("quiver_data"), Durability.WAL)
    assert (store.segment.target_size, store.wal.max_size) == (32 * 10**6, 4 * 10**9)
    assert store.wal.flush_interval == 0.025
    retention = store.retention
    assert (retention.size_cap, retention.size_cap_policy) == (
        500 * 10**9,
        SizeCapPolicy.DROP_OLDEST,
    )
    assert retention.max_retain_after_ingestion_hours == 72


def test_the_newer_form() -> None:
    settings = newer_example()
    assert settings.process.cores == 2
    assert [*settings.nodes][:2] == ["receiver/grpc", "receiver/http"]
    http = settings.nodes["receiver/http"]
    assert isinstance(http.options, OtlpHttpOptions)
    assert (http.plugin, http.options.listening_addr) == ("otlp_http", "0.0.0.0:4318")
    assert http.options.tls is not None
    assert http.options.tls.cert_file == Path("/etc/quiver/server.crt")
    assert http.destinations == ("without_health_checks",)
    exporter = settings.nodes["backend"].options
    assert isinstance(exporter, OtlpExporterOptions)
    assert exporter.headers == {"authorization": "Bearer secret"}
    assert settings.nodes["durable_buffer"].destinations == ("backend", "files")


def test_the_options_of_the_durable_buffer() -> None:
    store = store_of("""
        path: /data
        retention_size_cap: "10 GiB"
        max_age: 72h
        size_cap_policy: drop_oldest
        max_segment_open_duration: 2s
        initial_retry_interval: 3s
        max_retry_interval: 40s
        retry_multiplier: 1.5
        max_in_flight: 1000
        otlp_handling: convert_to_arrow
        poll_interval: 100ms
    """)
    assert store.retention.size_cap == 10 * 2**30
    assert store.retention.max_age == 72 * 3600
    assert store.retention.size_cap_policy is SizeCapPolicy.DROP_OLDEST
    assert store.segment.max_open_duration == 2
    retry = store.retry
    assert (retry.initial_interval, retry.max_interval, retry.multiplier) == (3, 40, 1.5)
    assert (store.max_in_flight, store.otlp_handling) == (1000, OtlpHandling.CONVERT_TO_ARROW)


def test_an_option_and_its_other_name_are_not_both_given() -> None:
    found = config_mistakes("max_age: 1h\nretention:\n  max_age: 2h\n  size_cap: 1GB")
    assert found == [
        "p.yaml:5:7: 'max_age' is the same as 'retention.max_age': only one can be given"
    ]
    store = store_of("max_age: 1h\nretention: {size_cap: 1GB}")
    assert (store.retention.max_age, store.retention.size_cap) == (3600, 10**9)


def test_no_file_at_all() -> None:
    settings = default_settings()
    found = {node.name: (node.plugin, node.destinations) for node in settings.nodes.values()}
    assert found == {
        "otlp_grpc": ("otlp_grpc", ("persistence",)),
        "otlp_http": ("otlp_http", ("persistence",)),
        "persistence": ("persistence", ()),
    }
    assert settings.nodes["otlp_grpc"].options == OtlpGrpcOptions(listening_addr="127.0.0.1:4317")
    assert settings.nodes["otlp_http"].options == OtlpHttpOptions(listening_addr="127.0.0.1:4318")
    assert settings.nodes["persistence"].options == PersistenceOptions(path=Path("quiver_data"))
    assert settings.process == ProcessOptions()


# --- receivers of OTLP --------------------------------------------------------------------------


def otlp(config: str) -> list[tuple[str, str, str]]:
    """Name, plugin and address of what an OTLP receiver with this configuration becomes."""
    found = load(graph(r=f"receiver:otlp -> d | {config}", d=DEBUG)).nodes.values()
    return [
        (node.name, node.plugin, node.options.listening_addr)
        for node in found
        if isinstance(node.options, OtlpGrpcOptions | OtlpHttpOptions)
    ]


def test_an_otlp_receiver_is_one_node_or_two() -> None:
    here = "listening_addr: '127.0.0.1:1'"
    assert otlp(here) == [("r", "otlp_grpc", "127.0.0.1:1")]
    assert otlp(f"{here}, protocol: grpc") == [("r", "otlp_grpc", "127.0.0.1:1")]
    assert otlp(f"{here}, protocol: http") == [("r", "otlp_http", "127.0.0.1:1")]
    assert otlp("") == [("r", "otlp_grpc", "127.0.0.1:4317")]
    assert otlp("protocols: {http: }") == [("r", "otlp_http", "127.0.0.1:4318")]
    assert otlp(f"protocols: {{grpc: {{{here}}}, http: }}") == [
        ("r/grpc", "otlp_grpc", "127.0.0.1:1"),
        ("r/http", "otlp_http", "127.0.0.1:4318"),
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("protocol: htpp", "protocol cannot be 'htpp' (did you mean 'http'?"),
        ("protocols: {grcp: }", "protocols has no key 'grcp' (did you mean 'grpc'?"),
        ("protocols: {}", "protocols is empty"),
        ("protocols: {http: }, tls: ", "with protocols has no key 'tls'"),
        (
            "protocols: {grpc: {listen: x}}",
            "r has no option 'listen' (did you mean 'listening_addr",
        ),
        ("protocols: {grpc: {l: x}, http: }", "r/grpc has no option 'l'"),
        ("listening_addr: 4317", "listening_addr is '4317'; it must be host:port"),
        ("max_json_bytes: 1", "has no option 'max_json_bytes'"),
    ],
)
def test_mistakes_of_otlp_receivers(config: str, message: str) -> None:
    found = mistakes(graph(r=f"receiver:otlp -> d | {config}", d=DEBUG))
    assert any(message in each for each in found), found


def test_the_name_of_a_protocol_may_be_taken() -> None:
    text = graph(r="receiver:otlp -> d | protocols: {grpc: , http: }", d=DEBUG)
    text += "\n  r/http: {type: exporter:debug}"
    assert "'r/http' is the name of a node already" in only_mistake(text)


# --- the file as a whole ------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once() -> None:
    text = FIRST_FORM
    for right, wrong in (
        ("- otap_exporter", "- otap_exprter"),
        ("dispatch_strategy: round_robin", "dispatch_strategy: round"),
        ("target_size: 32MB", "target_size: 32XB"),
        ("drop_oldest", "drop_older"),
        ("kind: exporter", "kind: importer"),
        ("urn:otel:otap:receiver", "urn:otel:otup:receiver"),
    ):
        text = text.replace(right, wrong)
    places = [each.split(" ")[0] for each in mistakes(text)]
    assert places == [
        *("p.yaml:9:28:", "p.yaml:17:17:", "p.yaml:22:28:", "p.yaml:34:13:", "p.yaml:36:28:"),
        *("p.yaml:44:22:", "p.yaml:52:26:", "p.yaml:55:11:", "p.yaml:58:22:", "p.yaml:63:11:"),
    ]


def test_connections_may_fan_in_and_out() -> None:
    text = graph(a="receiver:otlp", b="receiver:otlp_http", c=DEBUG, d=DEBUG)
    text += """
connections:
  - {from: [a, b], to: [c, d], policies: {dispatch: broadcast}}
  - {from: 'a["default"]', to: e}
"""
    text = text.replace("connections:", "  e: {type: exporter:debug}\nconnections:")
    nodes = load(text).nodes
    assert nodes["a"].ports == {"default": PortSpec(("c", "d", "e"), Dispatch.BROADCAST)}
    assert nodes["b"].ports == {"default": PortSpec(("c", "d"), Dispatch.BROADCAST)}


@pytest.mark.parametrize(
    ("connection", "message"),
    [
        ("{from: a, to: cc}", "there is no node 'cc' (did you mean 'c'?"),
        ("{from: aa, to: c}", "there is no node 'aa' (did you mean 'a'?"),
        ("{from: a, to: [c, c]}", "'c' is a destination already"),
        ("{from: a}", "a connection needs to"),
        ("{frm: a, to: c}", "has no key 'frm' (did you mean 'from'?"),
        ("a", "a connection must be a mapping"),
        ("{from: a, to: {b: c}}", "to must be a list"),
        (
            "{from: a, to: c, policies: {dispatch: some_of}}",
            "dispatch cannot be 'some_of' (did you",
        ),
    ],
)
def test_mistakes_of_connections(connection: str, message: str) -> None:
    text = graph(a="receiver:otlp", c=DEBUG)
    found = mistakes(f"{text}\nconnections:\n  - {connection}\n")
    assert any(message in each for each in found), found


def test_one_of_several_is_the_one_with_the_least_to_do() -> None:
    text = graph(a="receiver:otlp", c=DEBUG)
    text += "\nconnections: [{from: a, to: c, policies: {dispatch: one_of}}]"
    assert load(text).nodes["a"].ports["default"].dispatch is Dispatch.LEAST_LOADED


def test_connections_that_disagree() -> None:
    text = graph(a="receiver:otlp", c=DEBUG, d=DEBUG)
    text += """
connections:
  - {from: a, to: c, policies: {dispatch: random}}
  - {from: a, to: d, policies: {dispatch: broadcast}}
"""
    assert "'a' dispatches by random already" in only_mistake(text)


def test_pipelines_share_a_process() -> None:
    pipeline = "{{nodes: {{{0}: {{type: receiver:otlp_{1}}}, {2}: {{type: exporter:debug}}}}, "
    pipeline += "connections: [{{from: {0}, to: {2}}}]}}"
    one, two = pipeline.format("a", "grpc", "b"), pipeline.format("c", "http", "d")
    text = f"groups:\n  g:\n    pipelines:\n      one: {one}\n      two: {two}\n"
    assert [*load(text).nodes] == ["a", "b", "c", "d"]
    assert [*load(text.replace("groups", "pipeline_groups")).nodes] == ["a", "b", "c", "d"]
    same = text.replace(two, pipeline.format("c", "http", "b"))
    assert "there is a node 'b' in another pipeline" in mistakes(same)[0]
    assert (
        "topics are not supported" in mistakes(text.replace("    pip", "    topics:\n    pip"))[0]
    )


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("process: {cores: auto}", None),
        ("process: {cores: 4}", 4),
        ("policies: {resources: {core_allocation: {type: all_cores}}}", None),
        ("policies: {resources: {core_allocation: {type: core_count, count: 3}}}", 3),
        ("engine: {http_admin: {bind_address: '127.0.0.1:85'}}", 1),
    ],
)
def test_the_options_of_the_process(text: str, cores: int | None) -> None:
    process = load(f"{graph(a='receiver:otlp -> b', b=DEBUG)}\n{text}\n").process
    assert process.cores == cores
    assert (process.admin.listening_addr == "127.0.0.1:85") is ("engine" in text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("process: {cores: 0}", "cores must be at least 1, or auto"),
        ("process: {cores: all}", "cores, if not auto, must be a whole number, not 'all'"),
        ("process: {core: 1}", "process has no option 'core' (did you mean 'cores'?"),
        ("policies: {resources: {core_allocation: {type: core_set}}}", "'core_set' cannot be used"),
        ("version: otel_dataflow/v7", "version 'otel_dataflow/v7' is not known"),
        ("conections: []", "the file has no key 'conections' (did you mean 'connections'?"),
        ("engine: 5", "engine must be a mapping"),
    ],
)
def test_mistakes_beside_the_nodes(text: str, message: str) -> None:
    assert message in only_mistake(f"{graph(a='receiver:otlp -> b', b=DEBUG)}\n{text}\n")


def test_what_is_not_used_is_a_warning() -> None:
    text = graph(a="receiver:otlp -> b | wait_for_result: true", b=DEBUG)
    text += "\npolicies: {health: {}}\nengine: {telemetry: {}}\nsettings: {size: 1}\n"
    settings = load(text, variables={"unused": "1"})
    assert [mistake.message.split(" ")[0] for mistake in settings.warnings] == [
        *("variable", "'wait_for_result'", "'policies.health'", "'engine.telemetry'"),
        "'settings.size'",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.yaml:1:1: the file is empty"),
        ("nodes:", "p.yaml:1:1: there are no nodes"),
        ("[1]", "p.yaml:1:1: the file must be a mapping"),
        ("nodes: {a: 5}", "p.yaml:1:12: node 'a' must be a mapping"),
        ("nodes:\n\ta: 1", "p.yaml:2:1: not YAML: while scanning for the next token, found"),
        ("nodes: [", "p.yaml:1:9: not YAML"),
        ("a: b: c", "p.yaml:1:5: not YAML: mapping values are not allowed here (check the ind"),
        ("---\na: 1\n---\nb: 1\n", "only one document is allowed"),
        ("nodes:\n  a: 1\n  a: 2\n", "p.yaml:3:3: key 'a' comes twice (first in line 2)"),
        ("a: !!python/object:os.system x", "python/object:os.system' is not supported"),
        ("a: !x y", "tag '!x' is not supported"),
        ("a: \x00", "p.yaml:1:1: not YAML: a character that is not text"),
        ("a: *b", "found undefined alias 'b'"),
        ("<<: 5", "only mappings can be merged"),
        ("a: &a [*a]", "nested more than 32 deep"),
        ("&a {<<: *a}", "nested more than 32 deep"),
        ("[" * 5000, "nested more than 32 deep"),
        ("x" * 200_000, "the file is longer than 131072 characters"),
        ("nodes: {'a\\nb': {type: exporter:debug}, '': {}}", "a node cannot be called ''"),
    ],
)
def test_what_is_no_configuration(text: str, message: str) -> None:
    found = mistakes(text)
    assert any(message in each for each in found), found


def test_aliases_cannot_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "more than 50000 values, counting aliases" in only_mistake("\n".join(lines))


def test_merged_mappings() -> None:
    text = """
nodes:
  a: &a {type: receiver:otlp, out_ports: {o: {destinations: [d]}}, config: {max_connections: 5}}
  b: {<<: [*a], config: {listening_addr: "127.0.0.1:1"}}
  d: {type: exporter:debug}
"""
    node = load(text).nodes["b"]
    assert node.options == OtlpGrpcOptions(listening_addr="127.0.0.1:1")
    assert node.destinations == ("d",)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("\ufeff" + FIRST_FORM)
    settings = read_settings(path, environment={}, variables=FIRST_VARIABLES)
    assert (settings.source, len(settings.nodes)) == (str(path), 5)
    with pytest.raises(FileNotFoundError):
        read_settings(tmp_path / "none", environment={}, variables={})


def test_mistakes_are_a_mistake_of_the_configuration() -> None:
    with pytest.raises(InvalidConfig, match=r"p\.yaml:1:1: the file is empty"):
        load("")


# --- anything -----------------------------------------------------------------------------------

_PIECES = st.sampled_from(
    [
        *FIRST_FORM.split(),
        *NEWER_FORM.split(),
        *"{}[],:&*!|>-?#%@'\"\n\t",
        "\n  ",
        ": ",
        "<<: *a",
        "~",
    ]
)


@how(max_examples=300, deadline=None)
@given(st.text(max_size=80) | st.lists(_PIECES, max_size=30).map(" ".join))
@example("nodes: {a: {type: {}}}")
@example("nodes: {a: {out_ports: {b: {destinations: {}}}}}")
def test_any_text_is_settings_or_mistakes(text: str) -> None:
    try:
        load_settings(text, source="s", environment={}, variables={})
    except InvalidSettings as error:
        found = error.mistakes
    else:
        return
    assert found


@how(max_examples=150, deadline=None)
@given(
    st.sampled_from([FIRST_FORM, NEWER_FORM]),
    st.lists(st.tuples(st.integers(0, 90), st.sampled_from(["drop", "indent", "cut", "swap"]))),
    _PIECES,
)
def test_a_changed_example_is_settings_or_mistakes(
    text: str, changes: list[tuple[int, str]], piece: str
) -> None:
    lines = text.splitlines()
    for number, change in changes:
        index = number % len(lines)
        head, colon, _ = lines[index].partition(":")
        lines[index] = {
            "drop": "",
            "indent": f"  {lines[index]}",
            "cut": f"{head}{colon}",
            "swap": f"{head}{colon} {piece}",
        }[change]
    try:
        load("\n".join(lines), NEWER_ENVIRONMENT, {**FIRST_VARIABLES, **NEWER_VARIABLES})
    except InvalidSettings as error:
        found = error.mistakes
    else:
        return
    assert all(mistake.place.line <= len(lines) + 1 for mistake in found)
