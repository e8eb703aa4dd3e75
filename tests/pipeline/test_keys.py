"""API keys: only hashes are kept, changes are seen, and a lost file is not the client's fault."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from receiving import eventually, grpc_receiver, http_receiver, request_of

from quiver.bundle import Signal
from quiver.disk import RealDisk
from quiver.errors import InvalidConfig, InvalidName
from quiver.metrics import Metrics
from quiver.pipeline.security.keys import (
    MIN_GRACE,
    KeyRing,
    KeysUnavailable,
    WrongKey,
    add_key,
    hash_of,
    read_keys,
    revoke_key,
)
from quiver.pipeline.settings.options import AuthOptions

DISK = RealDisk()
TRACES = request_of(Signal.TRACES)
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def ring(
    path: Path, clock: Callable[[], float] = lambda: 0.0, header: str = "x-api-key"
) -> KeyRing:
    made = KeyRing(AuthOptions(keys_file=path, header=header), metrics=Metrics(), clock=clock)
    made.load()
    return made


def test_a_key_is_shown_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.json"
    key, text = add_key(DISK, path, "checkout")
    other, _ = add_key(DISK, path, "checkout")
    stored = path.read_text()
    secret = text.rpartition("_")[2]
    assert len(secret) == 64
    assert secret not in stored
    assert hash_of(text) in stored
    assert read_keys(DISK, path) == {key.id: key, other.id: other}
    assert path.stat().st_mode & 0o007 == 0


@pytest.mark.parametrize("name", ["", "x" * 101, "two\nlines", "\x1b[31m"])
def test_a_key_needs_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidName):
        add_key(DISK, tmp_path / "keys", name)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("header", "form"),
    [
        ("x-api-key", "{}"),
        ("x-junjo-api-key", " {} "),
        ("authorization", "Bearer {}"),
        ("authorization", "bEARER  {}"),
    ],
)
def test_a_key_is_found_in_every_header(tmp_path: Path, header: str, form: str) -> None:
    key, text = add_key(DISK, tmp_path / "keys", "a")
    keys = ring(tmp_path / "keys")
    assert keys.identify({header: form.format(text)}.get) == key.id
    assert ring(tmp_path / "keys", header="X-Mine").identify({"x-mine": text}.get) == key.id


def test_what_is_no_key_in_force_is_refused(tmp_path: Path) -> None:
    key, text = add_key(DISK, tmp_path / "keys", "a")
    other, other_text = add_key(DISK, tmp_path / "keys", "b")
    revoke_key(DISK, tmp_path / "keys", other.id)
    keys = ring(tmp_path / "keys")
    wrong = [
        "",
        "x",
        text[:-1],
        text + "0",
        text[:-1] + ("0" if text[-1] != "0" else "1"),
        text.upper(),
        f"qk_{'0' * 16}_{text.rpartition('_')[2]}",
        f"qk_{other.id}_{text.rpartition('_')[2]}",
        other_text,
        key.hash,
        "\u00e9" * 20,
        "q" * 100_000,
    ]
    for presented in wrong:
        with pytest.raises(WrongKey):
            keys.identify({"x-api-key": presented}.get)
    for headers in (
        {},
        {"authorization": f"Basic {text}"},
        {"authorization": text},
        {"x-key": text},
    ):
        with pytest.raises(WrongKey):
            keys.identify(headers.get)


def test_changes_are_seen_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key, text = add_key(DISK, path, "a")
    keys = ring(path)
    _, second = add_key(DISK, path, "b")
    with pytest.raises(WrongKey):
        keys.identify({"x-api-key": second}.get)
    keys.reload()
    assert keys.identify({"x-api-key": second}.get)
    revoke_key(DISK, path, key.id)
    keys.reload()
    with pytest.raises(WrongKey):
        keys.identify({"x-api-key": text}.get)


def one_key(**changes: object) -> dict[str, object]:
    return {"id": "0" * 16, "name": "a", "hash": "0" * 64, "created": "", **changes}


NO_KEYS = {
    "empty": "",
    "a list": "[]",
    "no version": "{}",
    "another version": '{"version": 2, "keys": []}',
    "no list": '{"version": 1, "keys": 5}',
    "half a key": '{"version": 1, "keys": [{"id": "x"}]}',
    "a name that is none": json.dumps({"version": 1, "keys": [one_key(name=1)]}),
    "a short id": json.dumps({"version": 1, "keys": [one_key(id="0")]}),
    "the same twice": json.dumps({"version": 1, "keys": [one_key(), one_key()]}),
    "very deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", NO_KEYS.values(), ids=NO_KEYS.keys())
def test_a_file_that_is_none_of_keys_is_refused_at_start_and_later_the_last_one_stays(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(InvalidConfig):
        ring(path)
    path.unlink()
    with pytest.raises(InvalidConfig, match="quiver keys add"):
        ring(path)
    key, text = add_key(DISK, path, "a")
    now = 0.0
    keys = ring(path, lambda: now)
    good = path.read_bytes()
    path.write_text(content)
    keys.reload()
    now = MIN_GRACE - 1
    assert keys.identify({"x-api-key": text}.get) == key.id
    now = MIN_GRACE + 1
    keys.reload()
    with pytest.raises(KeysUnavailable):
        keys.identify({"x-api-key": text}.get)
    path.write_bytes(good)
    keys.reload()
    assert keys.identify({"x-api-key": text}.get) == key.id


def test_a_file_that_does_not_change_stays_known(tmp_path: Path) -> None:
    add_key(DISK, tmp_path / "keys", "a")
    now = 0.0
    keys = ring(tmp_path / "keys", lambda: now)
    for _ in range(10):
        now += MIN_GRACE - 1
        keys.reload()
        assert keys.is_known


def test_two_commands_at_once_do_not_lose_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    lock = DISK.lock(tmp_path / "keys.lock", "somebody")
    with pytest.raises(InvalidConfig, match="try again"):
        add_key(DISK, path, "a")
    lock.release()
    assert add_key(DISK, path, "a")


def test_revoking_needs_a_key_and_happens_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key, _ = add_key(DISK, path, "a")
    with pytest.raises(InvalidName):
        revoke_key(DISK, path, "unknown")
    first = revoke_key(DISK, path, key.id)
    before = path.stat().st_ino
    assert revoke_key(DISK, path, key.id) == first
    assert path.stat().st_ino == before


# --- with receivers ---------------------------------------------------------------------------


async def over_http(where: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {"content-type": "application/x-protobuf", **named}
    async with httpx.AsyncClient() as client:
        return await client.post(f"http://{where}/v1/traces", content=TRACES, headers=sent)


async def over_grpc(where: str, **headers: str) -> grpc.StatusCode:
    metadata = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    async with grpc.aio.insecure_channel(where) as channel:
        try:
            call: Any = channel.unary_unary(EXPORT)
            await call(TRACES, metadata=metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_http_asks_for_keys(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "keys"
        key, text = add_key(DISK, path, "a")
        auth = AuthOptions(keys_file=path, reload_interval=0.01)
        async with http_receiver(auth=auth) as rig:
            refused = await over_http(rig.where)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert (await over_http(rig.where, x_api_key="no")).status_code == 401
            assert (await over_http(rig.where, authorization=f"Bearer {text}")).status_code == 200
            assert rig.taker.items[0].context["api_key_id"] == key.id
            assert text not in str(rig.taker.items)
            revoke_key(DISK, path, key.id)
            await eventually(lambda: rig.metrics.get("quiver.keys.active") == 0)
            assert (await over_http(rig.where, x_api_key=text)).status_code == 401
            rig.receiver._admission._keys._good_at = -1e9
            path.unlink()
            await eventually(lambda: rig.metrics.get("quiver.keys.reload_failures_total"))
            rig.receiver._admission._keys._good_at = -1e9
            lost = await over_http(rig.where, x_api_key=text)
            assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")

    asyncio.run(test())


def test_grpc_asks_for_keys(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "keys"
        key, text = add_key(DISK, path, "a")
        auth = AuthOptions(keys_file=path, reload_interval=0.01)
        async with grpc_receiver(auth=auth) as rig:
            assert await over_grpc(rig.where) is grpc.StatusCode.UNAUTHENTICATED
            assert await over_grpc(rig.where, x_api_key="no") is grpc.StatusCode.UNAUTHENTICATED
            assert await over_grpc(rig.where, x_junjo_api_key=text) is grpc.StatusCode.OK
            assert rig.taker.items[0].context["api_key_id"] == key.id
            path.unlink()
            await eventually(lambda: rig.metrics.get("quiver.keys.reload_failures_total"))
            rig.receiver._admission._keys._good_at = -1e9
            assert await over_grpc(rig.where, x_api_key=text) is grpc.StatusCode.UNAVAILABLE

    asyncio.run(test())


def test_without_keys_nobody_starts(tmp_path: Path) -> None:
    async def test(receiver: Callable[..., Any]) -> None:
        with pytest.raises(InvalidConfig, match="keys_file"):
            async with receiver(auth=AuthOptions(keys_file=tmp_path / "absent")):
                pass

    asyncio.run(test(http_receiver))
    asyncio.run(test(grpc_receiver))


@pytest.mark.parametrize("header", ["Authorization", "x-junjo-api-key", "X-Mine"])
def test_headers_with_keys_are_not_kept(tmp_path: Path, header: str) -> None:
    add_key(DISK, tmp_path / "keys", "a")
    auth = AuthOptions(keys_file=tmp_path / "keys", header="x-mine")

    async def test() -> None:
        with pytest.raises(InvalidConfig, match="secret"):
            async with http_receiver(auth=auth, keep_headers=(header,)):
                pass

    asyncio.run(test())


def test_kept_headers_fit_into_the_store() -> None:
    async def test() -> None:
        async with http_receiver(keep_headers=("x-a", "x-b", "x-c")) as rig:
            huge = await over_http(rig.where, x_a="a", x_b="b" * 30_000, x_c="c")
            assert huge.status_code == 200
            context = rig.taker.items[0].context
            assert context["header.x-a"] == "a"
            assert "header.x-b" not in context
            assert len(json.dumps(dict(context))) < 16 * 1024
            assert rig.metrics.get("quiver.receiver.headers_left_out_total", node="in") == 1

    asyncio.run(test())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused_at_start(tmp_path: Path) -> None:
    add_key(DISK, tmp_path / "keys", "a")
    (tmp_path / "keys").chmod(0)
    with pytest.raises(InvalidConfig):
        ring(tmp_path / "keys")
