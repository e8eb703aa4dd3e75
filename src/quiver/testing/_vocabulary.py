"""The words of the generated telemetry: services, what they do, and what they say about it.

Names and keys follow the OpenTelemetry semantic conventions where these have one. Everything is
plain data; ``quiver.testing.telemetry`` makes messages of it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

Value: TypeAlias = "str | bool | int | float | bytes | Sequence[Value] | Mapping[str, Value] | None"
_T = TypeVar("_T")

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"
_NOUNS: Final = (
    *("storefront", "checkout", "catalog", "payment", "inventory", "shipping", "account"),
    *("recommendation", "notification", "pricing", "search", "review"),
)
_LANGUAGES: Final = (
    *(("java", "1.54.1"), ("go", "1.38.0")),
    *(("python", "1.37.0"), ("nodejs", "2.1.0")),
)
_SCOPES: Final = ("http.server", "client", "app", "pool", "cache", "scheduler")
_AGENTS: Final = (
    "Mozilla/5.0 (X11; Linux x86_64; rv:143.0) Gecko/20100101 Firefox/143.0",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 18_6 like Mac OS X) AppleWebKit/605.1.15",
    "okhttp/5.1.0",
    "curl/8.16.0",
)
_TEXT: Final = """
the a this each order customer payment answer question model result value list table row time day
price total review product stock parcel account name address please explain summarise compare return
because therefore however given using without between after before since is was has gives takes
shows needs finds keeps and or but if then when where which that of in to for with from over under
first second last new old short long clear likely likewise
"""
_WORDS: Final = tuple(_TEXT.split())


class Draws:
    """Repeatable chance, from the parts of ``random`` that are the same in every Python."""

    __slots__ = ("bits", "random")

    def __init__(self, *seed: object) -> None:
        digest = hashlib.sha256("/".join(map(str, seed)).encode()).digest()
        source = random.Random(int.from_bytes(digest, "big"))  # noqa: S311 - repeatable, not secret
        self.random = source.random
        self.bits = source.getrandbits

    def below(self, limit: int) -> int:
        return int(self.random() * limit)

    def pick(self, items: Sequence[_T]) -> _T:
        return items[int(self.random() * len(items))]

    def chance(self, share: float) -> bool:
        return self.random() < share


# --- Values -----------------------------------------------------------------------------------


def any_value(value: Value) -> AnyValue:
    """A value as OTLP has it. ``None`` is the empty one."""
    made = AnyValue()
    match value:
        case None:
            pass
        case str():
            made.string_value = value
        case bool():
            made.bool_value = value
        case int():
            made.int_value = value
        case float():
            made.double_value = value
        case bytes():
            made.bytes_value = value
        case Mapping():
            made.kvlist_value.SetInParent()
            made.kvlist_value.values.extend(key_values(value))
        case _:
            made.array_value.SetInParent()
            made.array_value.values.extend(any_value(item) for item in value)
    return made


def key_values(attributes: Mapping[str, Value]) -> list[KeyValue]:
    """Attributes, in their order."""
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def _context(draws: Draws) -> Value:
    return {
        "experiment": draws.pick(("a", "b")),
        "limits": {"rate": 10 * draws.below(20), "burst": draws.below(8) / 4},
        "roles": [draws.pick(("buyer", "seller")), draws.bits(8), True],
    }


# Attributes of the application itself. They fill an item up to the number asked for.
_APPLICATION: Final[tuple[tuple[str, Callable[[Draws], Value]], ...]] = (
    ("app.tenant", lambda d: f"tenant-{d.below(40):03}"),
    ("app.region", lambda d: d.pick(("eu-central-1", "eu-west-1", "us-east-1", "ap-south-1"))),
    ("app.plan", lambda d: d.pick(("free", "basic", "premium"))),
    ("app.channel", lambda d: d.pick(("web", "ios", "android", "partner"))),
    ("app.locale", lambda d: d.pick(("de-DE", "en-GB", "en-US", "fr-FR", "ja-JP"))),
    ("enduser.role", lambda d: d.pick(("guest", "customer", "support", "admin"))),
    ("feature_flag.key", lambda d: d.pick(("new-basket", "fast-search", "dark-mode"))),
    ("feature_flag.result.variant", lambda d: d.pick(("on", "off", "control"))),
    ("deployment.ring", lambda d: d.pick(("canary", "early", "broad"))),
    ("app.campaign", lambda d: d.pick(("spring-sale", "newsletter-41", "none"))),
    ("app.build", lambda d: f"shop-2025.{1 + d.below(9)}.{d.below(30)}+sha.4f1c9e7a"),
    ("app.referrer", lambda d: f"https://www.example.com/landing/{d.below(90):04}?from=search"),
    ("thread.name", lambda d: f"worker-{d.below(16)}"),
    ("thread.id", lambda d: 20 + d.below(64)),
    ("app.retry.count", lambda d: d.below(3)),
    ("app.items.count", lambda d: 1 + d.below(20)),
    ("app.basket.value", lambda d: d.below(50_000) / 100),
    ("app.score", lambda d: d.random()),
    ("app.cache.hit", lambda d: d.chance(0.7)),
    ("app.first_visit", lambda d: d.chance(0.1)),
    ("app.tags", lambda d: ["gift", "express", "bulk", "partner"][: d.below(5)]),
    ("app.context", _context),
    ("app.cursor", lambda d: d.bits(96).to_bytes(12, "big")),
    ("app.note", lambda d: None if d.chance(0.5) else "checked by hand"),
)


def application_attributes(draws: Draws, count: int) -> dict[str, Value]:
    """That many of them, each with a value of its own."""
    known = list(_APPLICATION)
    chosen = [known.pop(draws.below(len(known))) for _ in range(min(count, len(known)))]
    more = range(count - len(chosen))
    return {key: make(draws) for key, make in chosen} | {
        f"app.label.{number}": draws.pick(_WORDS) for number in more
    }


# --- Where it comes from ----------------------------------------------------------------------


def noun(service: int) -> str:
    """What a service is about: its name, its table and its topic are called after it."""
    name = _NOUNS[service % len(_NOUNS)]
    return name if service < len(_NOUNS) else f"{name}{service // len(_NOUNS) + 1}"


def resource(service: int, instance: int, draws: Draws) -> bytes:
    """A pod of a service, as ``ResourceSpans``; those of logs and metrics have the same fields."""
    name, (language, sdk) = noun(service), _LANGUAGES[service % len(_LANGUAGES)]
    replica_set, pod = f"{name}-{draws.bits(36):09x}", f"{draws.bits(20):05x}"
    attributes: dict[str, Value] = {
        "service.name": name,
        "service.namespace": "shop",
        "service.version": f"{1 + service % 3}.{draws.below(20)}.{draws.below(10)}",
        "service.instance.id": str(instance),
        "deployment.environment.name": "production",
        "host.name": f"node-{instance % 8:02}.example.net",
        "k8s.cluster.name": "shop-eu",
        "k8s.namespace.name": "shop",
        "k8s.deployment.name": name,
        "k8s.pod.name": f"{replica_set}-{pod}",
        "telemetry.sdk.language": language,
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": sdk,
        "process.pid": 1 + draws.below(30_000),
        "process.command_args": [f"/opt/{name}/bin/run", "--config", f"/etc/{name}.yaml"],
    }
    made = ResourceSpans(schema_url=SCHEMA_URL)
    made.resource.attributes.extend(key_values(attributes))
    made.resource.dropped_attributes_count = (0, 0, 0, 1)[service % 4]
    if service % 2:
        made.resource.entity_refs.add(
            schema_url=SCHEMA_URL, type="service", id_keys=["service.name", "service.instance.id"]
        )
    return made.SerializeToString(deterministic=True)


def scope(service: int, number: int) -> bytes:
    """An instrumentation library, as ``ScopeSpans``; the same fields for logs and metrics."""
    language, _ = _LANGUAGES[service % len(_LANGUAGES)]
    module = _SCOPES[number] if number < len(_SCOPES) else f"module{number}"
    made = InstrumentationScope(name=f"io.opentelemetry.{language}.{module}", version="2.20.1")
    if number % 3 != 1:
        made.attributes.extend(key_values({"scope.stable": number == 0, "scope.level": number}))
    schema_url = (SCHEMA_URL, SCHEMA_URL, "")[number % 3]
    return ScopeSpans(scope=made, schema_url=schema_url).SerializeToString(deterministic=True)


# --- What they do -----------------------------------------------------------------------------


class Fresh(NamedTuple):
    """An attribute with a new number every time, in a text or (``None``) alone."""

    key: str
    text: str | None = None
    bits: int = 14


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """One thing that a service does again and again. Equal only to itself."""

    name: str
    kind: Span.SpanKind.ValueType
    fixed: Mapping[str, Value]  # the same every time
    fresh: tuple[Fresh, ...]
    outcome: tuple[str, int, int] | None = None  # key, its value when it went well, when it failed


@dataclass(frozen=True, slots=True)
class Role:
    """All that a service does. ``calls[i]`` is what a caller sees of ``serves[i]``."""

    serves: tuple[Operation, ...]
    calls: tuple[Operation, ...]
    stores: tuple[Operation, ...]
    works: tuple[Operation, ...]
    publishes: Operation
    consumes: Operation

    def operations(self) -> tuple[Operation, ...]:
        return (
            *(*self.serves, *self.calls, *self.stores, *self.works),
            *(self.publishes, self.consumes),
        )


def role(service: int) -> Role:
    """Every second service is called with HTTP, the others with gRPC."""
    name = noun(service)
    pairs = _http(name) if service % 2 == 0 else _rpc(name)
    return Role(
        serves=tuple(served for served, _ in pairs),
        calls=tuple(call for _, call in pairs),
        stores=_stores(name),
        works=_works(name),
        publishes=_messaging(name, "send", Span.SPAN_KIND_PRODUCER),
        consumes=_messaging(name, "process", Span.SPAN_KIND_CONSUMER),
    )


def _http(name: str) -> list[tuple[Operation, Operation]]:
    made = []
    for number, (method, tail) in enumerate(
        (("GET", ""), ("GET", "/{id}"), ("POST", ""), ("PUT", "/{id}"), ("DELETE", "/{id}"))
    ):
        route = f"/api/v1/{name}{tail}"
        path = route.replace("{id}", "%08x") if tail else f"{route}?page=%d"
        both: dict[str, Value] = {"http.request.method": method, "server.address": f"{name}.shop"}
        outcome = ("http.response.status_code", (200, 200, 201, 204, 204)[number], 500 + number % 4)
        served = Operation(
            name=f"{method} {route}",
            kind=Span.SPAN_KIND_SERVER,
            fixed=both
            | {
                "http.route": route,
                "url.scheme": "https",
                "network.protocol.version": "1.1",
                "user_agent.original": _AGENTS[number % len(_AGENTS)],
            },
            fresh=(
                Fresh("url.path", path, 32 if tail else 5),
                Fresh("user.id", "user-%06x", 24),
                Fresh("client.port"),
            ),
            outcome=outcome,
        )
        call = Operation(
            name=method,
            kind=Span.SPAN_KIND_CLIENT,
            fixed=both | {"server.port": 8443, "network.protocol.name": "http"},
            fresh=(
                Fresh("url.full", f"https://{name}.shop{path}", 32 if tail else 5),
                Fresh("http.request.id", "%032x", 128),
            ),
            outcome=outcome,
        )
        made.append((served, call))
    return made


def _rpc(name: str) -> list[tuple[Operation, Operation]]:
    made = []
    for method in ("Get", "List", "Reserve", "Cancel"):
        service = f"shop.{name}.v1.{name.capitalize()}Service"
        fixed: dict[str, Value] = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            "server.address": f"{name}.shop",
            "server.port": 50051,
        }
        served, call = (
            Operation(
                name=f"{service}/{method}",
                kind=kind,
                fixed=fixed,
                fresh=(
                    Fresh("rpc.message.id"),
                    Fresh("user.id", "user-%06x", 24),
                    Fresh("session.id", "%032x", 128),
                ),
                outcome=("rpc.grpc.status_code", 0, 13),
            )
            for kind in (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
        )
        made.append((served, call))
    return made


def _stores(name: str) -> tuple[Operation, ...]:
    statements = {
        "SELECT": "SELECT id, state, changed_at FROM {} WHERE id = $1 /* %04x */",
        "INSERT": "INSERT INTO {} (id, state, changed_at) VALUES ($1, $2, now()) /* %04x */",
        "UPDATE": "UPDATE {} SET state = $2, changed_at = now() WHERE id = $1 /* %04x */",
    }
    tables = tuple(
        Operation(
            name=f"{verb} {name}",
            kind=Span.SPAN_KIND_CLIENT,
            fixed={
                "db.system.name": "postgresql",
                "db.namespace": "shop",
                "db.collection.name": name,
                "db.operation.name": verb,
                "server.address": "postgres.shop",
            },
            fresh=(
                Fresh("db.query.text", statement.format(name), 16),
                Fresh("db.response.returned_rows", None, 6),
            ),
        )
        for verb, statement in statements.items()
    )
    cache = Operation(
        name="GET",
        kind=Span.SPAN_KIND_CLIENT,
        fixed={
            "db.system.name": "redis",
            "db.namespace": "0",
            "db.operation.name": "GET",
            "server.address": "sessions-cache.shop",
        },
        fresh=(Fresh("db.query.text", f"GET {name}:%08x", 32),),
    )
    return (*tables, cache)


def _works(name: str) -> tuple[Operation, ...]:
    return tuple(
        Operation(
            name=f"{verb} {name}",
            kind=Span.SPAN_KIND_INTERNAL,
            fixed={
                "code.function.name": f"net.example.shop.{name}.service.Handler.{verb}",
                "code.file.path": f"src/main/java/net/example/shop/{name}/service/Handler.java",
                "code.line.number": 40 + 7 * line,
            },
            fresh=(Fresh("app.job.id", "job-%032x", 128), Fresh("app.bytes")),
        )
        for line, verb in enumerate(("validate", "load", "render", "convert"))
    )


def _messaging(name: str, verb: str, kind: Span.SpanKind.ValueType) -> Operation:
    return Operation(
        name=f"{verb} {name}.events",
        kind=kind,
        fixed={
            "messaging.system": "kafka",
            "messaging.destination.name": f"{name}.events",
            "messaging.operation.name": verb,
            "messaging.destination.partition.id": "3",
        },
        fresh=(
            Fresh("messaging.message.id", "%032x", 128),
            Fresh("messaging.kafka.offset", None, 40),
            Fresh("messaging.message.body.size"),
        ),
    )


# --- What they say ----------------------------------------------------------------------------


def sentences(draws: Draws, count: int) -> list[str]:
    """Sentences of 8 to 20 words, to make long texts of."""
    return [
        " ".join(draws.pick(_WORDS) for _ in range(8 + draws.below(13))).capitalize() + "."
        for _ in range(count)
    ]


def exceptions(service: int) -> list[dict[str, Value]]:
    """The exceptions that a service throws, with the attributes of the event."""
    name = noun(service)
    kinds = {
        "java.net.SocketTimeoutException": "Read timed out after 3000 ms",
        "java.lang.IllegalStateException": f"{name} is not in a state to be changed",
        "shop.errors.NotFound": f"no {name} with this id",
    }
    return [
        {
            "exception.type": kind,
            "exception.message": message,
            "exception.stacktrace": f"{kind}: {message}\n"
            + "".join(
                f"\tat shop.{name}.{frame}(Handler.java:{31 * line + 12})\n"
                for line, frame in enumerate(("read", "load", "validate", "handle", "serve"))
            ),
        }
        for kind, message in kinds.items()
    ]
