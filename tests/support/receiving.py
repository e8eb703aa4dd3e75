"""Receivers on free ports, somebody who takes what they send on, and certificates for them."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quiver.bundle import Signal
from quiver.metrics import Metrics
from quiver.otlp.messages import REQUEST_TYPES
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.receivers.otlp_grpc import OtlpGrpcReceiver
from quiver.pipeline.receivers.otlp_http import OtlpHttpReceiver
from quiver.pipeline.settings.options import OtlpGrpcOptions, OtlpHttpOptions, TlsOptions

BOUND = 30.0
"""Seconds after which a wait fails."""


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class Collector:
    """Takes items, or raises what it is told; ``gate`` holds them up."""

    name: str = "collector"
    items: list[Item] = field(default_factory=list)
    answer: Callable[[Item], BaseException | None] = lambda _: None
    gate: asyncio.Event = field(default_factory=_open_gate)
    waiting: int = 0

    async def start(self) -> None: ...

    async def stop(self, deadline: float) -> None: ...

    async def take(self, item: Item) -> None:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        error = self.answer(item)
        if error is not None:
            raise error
        self.items.append(item)

    @property
    def requests(self) -> list[bytes]:
        return [request for item in self.items for request in item.requests]


@dataclass
class Rig:
    """A receiver and what is around it."""

    receiver: Any
    taker: Collector
    metrics: Metrics

    @property
    def where(self) -> str:
        host, port = self.receiver.address
        return f"{host}:{port}"

    @property
    def port(self) -> int:
        return int(self.receiver.address[1])


@asynccontextmanager
async def http_receiver(
    taker: Collector | None = None,
    *,
    pressure: Callable[[], bool] = lambda: False,
    **options: Any,  # noqa: ANN401 - those of the receiver
) -> AsyncIterator[Rig]:
    made = OtlpHttpOptions(**{"listening_addr": "127.0.0.1:0", **options})
    async with _running(OtlpHttpReceiver, made, taker or Collector(), pressure) as rig:
        yield rig


@asynccontextmanager
async def grpc_receiver(
    taker: Collector | None = None,
    *,
    pressure: Callable[[], bool] = lambda: False,
    **options: Any,  # noqa: ANN401 - those of the receiver
) -> AsyncIterator[Rig]:
    made = OtlpGrpcOptions(**{"listening_addr": "127.0.0.1:0", **options})
    async with _running(OtlpGrpcReceiver, made, taker or Collector(), pressure) as rig:
        yield rig


@asynccontextmanager
async def _running(
    kind: Any,  # noqa: ANN401 - either receiver
    options: object,
    taker: Collector,
    pressure: Callable[[], bool],
) -> AsyncIterator[Rig]:
    metrics = Metrics()
    receiver = kind(
        "in", options, Port([taker]), metrics=metrics, pressure=pressure, now_ns=lambda: 42
    )
    await receiver.start()
    try:
        yield Rig(receiver, taker, metrics)
    finally:
        await receiver.stop(asyncio.get_running_loop().time() + 5)


async def eventually(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait until it holds."""
    end = asyncio.get_running_loop().time() + BOUND
    while not condition():
        if asyncio.get_running_loop().time() > end:
            raise AssertionError(f"{what} did not come to hold in {BOUND} s")
        await asyncio.sleep(0.005)


def request_of(signal: Signal, count: int = 3, text: str = "x") -> bytes:
    """A small request with so many items."""
    message: Any = REQUEST_TYPES[signal]()
    if signal is Signal.TRACES:
        scope = message.resource_spans.add().scope_spans.add()
        for index in range(count):
            span = scope.spans.add(name=f"{text}{index}")
            span.trace_id, span.span_id = bytes([1] * 16), bytes([2] * 8)
    elif signal is Signal.LOGS:
        scope = message.resource_logs.add().scope_logs.add()
        for index in range(count):
            scope.log_records.add(severity_text=f"{text}{index}")
    else:
        scope = message.resource_metrics.add().scope_metrics.add()
        metric = scope.metrics.add(name=text)
        for index in range(count):
            metric.gauge.data_points.add(as_int=index)
    return bytes(message.SerializeToString())


# --- certificates -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificates:
    """An authority, and what it signed for a server and for a client."""

    ca: Path
    server: TlsOptions
    mutual: TlsOptions
    client_cert: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    now = datetime.now(UTC)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quiver test authority")])
    made: Mapping[str, Path] = {
        name: folder / f"{name}.pem" for name in ("ca", "server", "server_key", "client", "key")
    }

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, *, is_ca: bool) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(ca_name if is_ca else subject)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
                critical=False,
            )
        )
        if is_ca:
            usage = x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=True,
                crl_sign=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            )
            builder = builder.add_extension(usage, critical=True)
        else:
            names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(ca_key, hashes.SHA256())

    made["ca"].write_bytes(_pem(certificate("ca", ca_key, is_ca=True)))
    for name, key_name in (("server", "server_key"), ("client", "key")):
        key = ec.generate_private_key(ec.SECP256R1())
        made[name].write_bytes(_pem(certificate(name, key, is_ca=False)))
        made[key_name].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    server = TlsOptions(cert_file=made["server"], key_file=made["server_key"])
    mutual = TlsOptions(
        cert_file=made["server"], key_file=made["server_key"], client_ca_file=made["ca"]
    )
    return Certificates(made["ca"], server, mutual, made["client"], made["key"])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
