"""The admin port: health, figures, and callers who do not behave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from quiver.errors import InvalidConfig
from quiver.openmetrics import CONTENT_TYPE, Figures
from quiver.pipeline import admin as admin_module
from quiver.pipeline.admin import AdminServer
from quiver.pipeline.settings.options import AdminOptions


@dataclass
class Process:
    """What is looked at."""

    reason: str | None = None
    told: Figures = field(default_factory=lambda: Figures({"a.b_total": 1.0}))
    is_broken: bool = False

    def why_not_ready(self) -> str | None:
        return self.reason

    async def figures(self) -> Figures:
        if self.is_broken:
            raise RuntimeError("no figures today")
        return self.told


@asynccontextmanager
async def serving(process: Process) -> AsyncIterator[AdminServer]:
    server = AdminServer(AdminOptions(listening_addr="127.0.0.1:0"), process)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def get(server: AdminServer, page: str, method: str = "GET") -> httpx.Response:
    host, port = server.address
    async with httpx.AsyncClient() as client:
        return await client.request(method, f"http://{host}:{port}{page}")


async def talk(server: AdminServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(data)
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def test_alive_ready_and_figures() -> None:
    async def run() -> None:
        process = Process("starting")
        async with serving(process) as server:
            assert (await get(server, "/livez")).status_code == 200
            starting = await get(server, "/readyz")
            assert (starting.status_code, starting.text) == (503, "starting\n")
            process.reason = None
            assert (await get(server, "/readyz")).status_code == 200
            metrics = await get(server, "/metrics?name=x")
            assert metrics.headers["content-type"] == CONTENT_TYPE
            assert metrics.text == "# TYPE a_b counter\na_b_total 1.0\n# EOF\n"

    asyncio.run(run())


def test_other_pages_and_methods() -> None:
    async def run() -> None:
        async with serving(Process()) as server:
            nothing = await get(server, "/")
            assert nothing.status_code == 404
            assert "/readyz" in nothing.text
            wrong = await get(server, "/livez", "POST")
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
            head = await get(server, "/livez", "HEAD")
            assert (head.status_code, head.text) == (200, "")
            assert head.headers["content-length"] == "6"

    asyncio.run(run())


def test_figures_that_fail_do_not_take_the_port_with_them() -> None:
    async def run() -> None:
        process = Process(is_broken=True)
        async with serving(process) as server:
            assert (await get(server, "/metrics")).status_code == 500
            assert (await get(server, "/livez")).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("data", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x" * 20_000, b"\x16"])
def test_what_is_not_http_is_let_go(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "_TIMEOUT", 0.3)

    async def run() -> None:
        async with serving(Process()) as server:
            answer = await talk(server, data)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
            assert (await get(server, "/livez")).status_code == 200

    asyncio.run(run())


def test_too_many_callers_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(admin_module, "_TIMEOUT", 60)

    async def run() -> None:
        async with serving(Process()) as server:
            idle = [await asyncio.open_connection(*server.address) for _ in range(2)]
            reader, writer = await asyncio.open_connection(*server.address)
            async with asyncio.timeout(30):
                assert await reader.read() == b""
            for _, other in [*idle, (reader, writer)]:
                other.close()

    asyncio.run(run())


def test_a_port_that_is_taken_is_named() -> None:
    async def run() -> None:
        async with serving(Process()) as server:
            where = "{}:{}".format(*server.address)
            other = AdminServer(AdminOptions(listening_addr=where), Process())
            with pytest.raises(InvalidConfig, match=f"admin cannot listen on {where}"):
                await other.start()

    asyncio.run(run())
    with pytest.raises(InvalidConfig, match="must be host:port"):
        AdminServer(AdminOptions(listening_addr="nowhere"), Process())
