"""Receivers over HTTP: TLS, client certificates, and who may listen where."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from receiving import Certificates, Rig, http_receiver, make_certificates, request_of

from quiver.bundle import Signal
from quiver.errors import InvalidConfig
from quiver.pipeline.settings.options import AuthOptions

PROTOBUF = {"content-type": "application/x-protobuf"}
TRACES = request_of(Signal.TRACES)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return uvloop.run if request.param == "uvloop" else asyncio.run


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def post_over_tls(rig: Rig, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=context) as client:
        url = f"https://localhost:{rig.port}/v1/traces"
        large = request_of(Signal.TRACES, 30_000)
        for body in (TRACES, large):
            answer = await client.post(url, content=body, headers=PROTOBUF)
            if answer.status_code != 200:
                return answer.status_code
        return 200


def test_tls(run: Callable[..., None], certificates: Certificates) -> None:
    async def test() -> None:
        async with http_receiver(tls=certificates.server) as rig:
            trusting = ssl.create_default_context(cafile=str(certificates.ca))
            assert await post_over_tls(rig, trusting) == 200
            with pytest.raises(httpx.HTTPError):
                await post_over_tls(rig, ssl.create_default_context())
            with pytest.raises(httpx.HTTPError):
                await httpx.AsyncClient().post(f"http://{rig.where}/v1/traces", content=TRACES)

    run(test())


def test_mutual_tls(run: Callable[..., None], certificates: Certificates) -> None:
    async def test() -> None:
        async with http_receiver(tls=certificates.mutual) as rig:
            context = ssl.create_default_context(cafile=str(certificates.ca))
            with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                await post_over_tls(rig, context)
            context.load_cert_chain(certificates.client_cert, certificates.client_key)
            assert await post_over_tls(rig, context) == 200
            assert len(rig.taker.requests) == 2

    run(test())


def test_certificates_that_cannot_be_used_are_a_mistake(
    tmp_path: Path, certificates: Certificates
) -> None:
    async def start(**files: Path) -> None:
        tls = {"cert_file": certificates.server.cert_file, "key_file": certificates.client_key}
        options = type(certificates.server)(**{**tls, **files})
        async with http_receiver(tls=options):
            pass

    for files in ({}, {"cert_file": tmp_path / "absent"}, {"client_ca_file": tmp_path / "absent"}):
        with pytest.raises(InvalidConfig, match="tls"):
            asyncio.run(start(**files))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "some.host:0"])
def test_nobody_listens_to_everybody_by_accident(address: str) -> None:
    async def test() -> None:
        with pytest.raises(InvalidConfig, match="insecure_ok"):
            async with http_receiver(listening_addr=address):
                pass

    asyncio.run(test())


def test_listening_to_everybody_needs_tls_or_keys_or_a_word(
    tmp_path: Path, certificates: Certificates
) -> None:
    async def works(**options: Any) -> None:  # noqa: ANN401 - those of the receiver
        async with http_receiver(listening_addr="0.0.0.0:0", **options) as rig:
            assert rig.port

    (tmp_path / "keys").write_text('{"version": 1, "keys": []}')
    asyncio.run(works(insecure_ok=True))
    asyncio.run(works(tls=certificates.server))
    asyncio.run(works(auth=AuthOptions(keys_file=tmp_path / "keys")))


@pytest.mark.parametrize("address", ["localhost:0", "127.0.0.2:0", "[::1]:0"])
def test_loopback_needs_nothing(address: str) -> None:
    async def test() -> None:
        try:
            async with http_receiver(listening_addr=address) as rig:
                assert rig.port
        except InvalidConfig as error:
            if "cannot listen" not in str(error):  # a machine without IPv6
                raise

    asyncio.run(test())


def test_an_address_that_is_not_ours_is_a_mistake() -> None:
    async def test() -> None:
        with pytest.raises(InvalidConfig, match="cannot listen"):
            async with http_receiver(listening_addr="192.0.2.1:0", insecure_ok=True):
                pass

    asyncio.run(test())
