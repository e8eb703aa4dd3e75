"""The OTLP exporters with TLS: who is checked, and what is shown."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from answering import GRPC, HTTP, Protocol, Server, grpc_server, http_server, item, refusal
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quiver.errors import InvalidConfig, TryLater
from quiver.pipeline.node import Taker
from quiver.pipeline.settings.options import ClientTlsOptions

both = pytest.mark.parametrize("protocol", [GRPC, HTTP], ids=str)
NOW = dt.datetime.now(dt.UTC)


class Signed(NamedTuple):
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(self._certificate(self._name, self._key.public_key(), None))

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, host: str | None
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - dt.timedelta(days=1))
            .not_valid_after(NOW + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        )
        if host is not None:
            names = x509.SubjectAlternativeName([x509.DNSName(host)])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def sign(self, host: str) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        files = Signed(self._directory / f"{host}.crt", self._directory / f"{host}.key")
        files.cert.write_bytes(self._certificate(subject, key.public_key(), host))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files


def server_credentials(signed: Signed, client_ca: Path | None) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(signed.key.read_bytes(), signed.cert.read_bytes())],
        client_ca.read_bytes() if client_ca else None,
        require_client_auth=client_ca is not None,
    )


def server_context(signed: Signed, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(signed.cert, signed.key)
    if client_ca:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@asynccontextmanager
async def secure_server(
    protocol: Protocol, signed: Signed, client_ca: Path | None
) -> AsyncIterator[Server]:
    if protocol is GRPC:
        async with grpc_server(Server(), server_credentials(signed, client_ca)) as server:
            yield server
    else:
        async with http_server(Server(), server_context(signed, client_ca)) as server:
            yield server


@asynccontextmanager
async def secure_exporter(
    protocol: Protocol, server: Server, tls: ClientTlsOptions
) -> AsyncIterator[Taker]:
    endpoint = f"https://127.0.0.1:{server.port}"
    name = "grpc_endpoint" if protocol is GRPC else "http_endpoint"
    async with protocol.exporter(server, **{name: endpoint, "tls": tls}) as node:
        yield node


@both
def test_the_server_is_checked(protocol: Protocol, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")

    async def run() -> None:
        async with secure_server(protocol, ours.sign("collector.test"), None) as server:
            good = ClientTlsOptions(ca_file=ours.file, server_name="collector.test")
            async with secure_exporter(protocol, server, good) as node:
                await node.take(item(b"x"))
            assert server.bodies == [b"x"]
            for bad in (
                ClientTlsOptions(ca_file=theirs.file, server_name="collector.test"),
                ClientTlsOptions(ca_file=ours.file, server_name="other.test"),
            ):
                async with secure_exporter(protocol, server, bad) as node:
                    assert isinstance(await refusal(node, item(b"y")), TryLater)
            assert server.bodies == [b"x"]

    asyncio.run(run())


@both
def test_a_file_that_is_not_there(protocol: Protocol, tmp_path: Path) -> None:
    async def run() -> None:
        tls = ClientTlsOptions(ca_file=tmp_path / "nowhere.pem")
        with pytest.raises(InvalidConfig, match=r"nowhere\.pem"):
            await secure_exporter(protocol, Server(), tls).__aenter__()

    asyncio.run(run())


@both
def test_the_client_shows_its_certificate(protocol: Protocol, tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    client = ours.sign("client.test")

    async def run() -> None:
        async with secure_server(protocol, ours.sign("collector.test"), ours.file) as server:
            tls = ClientTlsOptions(
                ca_file=ours.file,
                server_name="collector.test",
                cert_file=client.cert,
                key_file=client.key,
            )
            async with secure_exporter(protocol, server, tls) as node:
                await node.take(item(b"x"))
            without = ClientTlsOptions(ca_file=ours.file, server_name="collector.test")
            async with secure_exporter(protocol, server, without) as node:
                assert isinstance(await refusal(node, item(b"y")), TryLater)
            assert server.bodies == [b"x"]

    asyncio.run(run())
