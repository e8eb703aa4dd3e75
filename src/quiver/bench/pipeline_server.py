"""The process that ``quiver bench pipeline`` sends to: a pipeline, and what it costs.

It is told what to be by its arguments, says where it listens in a line of JSON, and answers every
line it reads with another: CPU seconds so far, resident bytes. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from pathlib import Path

from quiver.bench.rig import FlatDisk
from quiver.disk import RealDisk
from quiver.pipeline.settings.load import Settings, load_settings
from quiver.pipeline.worker import Pipeline, run_loop

_NODES = """
nodes:
  grpc:
    kind: receiver
    plugin_urn: "urn:otel:receiver:otlp_grpc"
    out_ports: {{out: {{destinations: [{first}]}}}}
    config: {{listening_addr: "127.0.0.1:0"}}
  http:
    kind: receiver
    plugin_urn: "urn:otel:receiver:otlp_http"
    out_ports: {{out: {{destinations: [{first}]}}}}
    config: {{listening_addr: "127.0.0.1:0"}}
  {last}
"""
_STORE = """persistence:
    kind: processor
    plugin_urn: "urn:otap:processor:persistence"
    out_ports: {{out: {{destinations: [nobody]}}}}
    config: {{path: "{path}", retention: {{size_cap: 100GB}}}}
  nobody: {nobody}
"""
_SILENT = '{kind: exporter, plugin_urn: "urn:quiver:exporter:debug", config: {verbosity: none}}'
_DEAD = (
    '{kind: exporter, plugin_urn: "urn:otel:exporter:otlp_http", '
    'config: {http_endpoint: "http://127.0.0.1:9", timeout: 1s}}'
)


def settings(variant: str, path: Path) -> Settings:
    """``plain``: no store; ``durable``: with one; ``outage``: and a destination that is dead."""
    if variant == "plain":
        text = _NODES.format(first="nobody", last=f"nobody: {_SILENT}")
    else:
        nobody = _DEAD if variant == "outage" else _SILENT
        last = _STORE.format(path=path, nobody=nobody)
        text = _NODES.format(first="persistence", last=last)
    return load_settings(text, source="bench", environment={}, variables={})


async def serve(variant: str, path: Path) -> None:
    """Until the end of the input."""
    loop = asyncio.get_running_loop()
    disk = FlatDisk(RealDisk(), path.parent)
    async with Pipeline(settings(variant, path), disk=disk) as pipeline:
        places = {name: pipeline[name].address for name in ("grpc", "http")}
        _tell({name: list(place) for name, place in places.items()})
        while await loop.run_in_executor(None, sys.stdin.readline):
            used = resource.getrusage(resource.RUSAGE_SELF)
            _tell({"cpu": used.ru_utime + used.ru_stime, "resident": _resident_bytes()})


def _resident_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _tell(facts: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_loop(serve(sys.argv[1], Path(sys.argv[2])))
