"""Clients that send OTLP over HTTP, with a library and by hand."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable

import httpx
import zstandard
from receiving import Rig, request_of

from quiver.bundle import Signal

PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
TRACES = request_of(Signal.TRACES)


async def in_pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def post(
    rig: Rig, body: bytes = TRACES, path: str = "/v1/traces", **headers: str
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(base_url=f"http://{rig.where}") as client:
        return await client.post(path, content=body, headers={**PROTOBUF, **named})


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


def zstd_without_size(data: bytes) -> bytes:
    made = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return made.compress(data) + made.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "plain": ("identity", bytes),
    "gzip": ("gzip", gzip.compress),
    "gzip members": ("GZIP", lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:])),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "zstd without size": ("zstd", zstd_without_size),
    "zstd frames": ("zstd", lambda d: zstandard.compress(d[:5]) + zstandard.compress(d[5:])),
    "zstd frames without size": (
        "zstd",
        lambda d: zstd_without_size(d[:5]) + zstd_without_size(d[5:]),
    ),
}


def raw(
    path: str = "/v1/traces", body: bytes = TRACES, more: str = "", version: str = "1.1"
) -> bytes:
    head = (
        f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
        f"content-length: {len(body)}\r\n{more}\r\n"
    )
    return head.encode() + body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(30):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return int(lines[0].split()[1]), headers, body
