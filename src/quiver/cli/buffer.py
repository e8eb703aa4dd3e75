"""``quiver buffer``: look into a queue in object storage, clean it up, and serve its producers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from quiver.cli.inspect import DAMAGE_FOUND, DEFAULT_TABLE_LIMIT, OutputFormat
from quiver.config import QueueConfig
from quiver.errors import FormatError, InvalidConfig, LimitExceeded, ObjectNotFound

if TYPE_CHECKING:  # what talks to object stores is loaded when a command runs
    from quiver.buffer.objects import Objects

_QUEUE: Final = QueueConfig()

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="file:///directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.",
        show_default=False,
    ),
]
ManifestPath = Annotated[
    str, typer.Option("--manifest-path", help="The object that lists the batches.")
]
DataPrefix = Annotated[str, typer.Option("--data-prefix", help="What the batches are below.")]
Endpoint = Annotated[
    str | None, typer.Option(help="Of a server that is not the vendor's: http://host:port.")
]
Region = Annotated[str | None, typer.Option(help="Of an S3 bucket.")]
GracePeriod = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", help="As gc_grace_period of all who work on this queue."
    ),
]


def inspect(
    url: Url,
    *,
    manifest_path: ManifestPath = _QUEUE.manifest_path,
    data_prefix: DataPrefix = _QUEUE.data_path_prefix,
    endpoint: Endpoint = None,
    region: Region = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Tables, or one JSON document.")
    ] = OutputFormat.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="List at most N of each kind; counts stay exact. "
            f"Default: {DEFAULT_TABLE_LIMIT} in tables, everything in JSON.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what waits in a queue, its dead letters, and what is missing.

    Nothing is written, and a running consumer is not disturbed.

    Exit codes: 0 all is well, 1 something is damaged, 2 wrong usage or unreadable.
    """
    import asyncio

    from quiver.buffer.looking import look
    from quiver.cli.buffer_reports import damaged_report, limited, queue_document, queue_report
    from quiver.cli.output import ConsoleOutput, JsonOutput, Output

    queue = _queue(manifest_path, data_prefix)
    is_json = as_json or output is OutputFormat.JSON
    out: Output = JsonOutput() if is_json else ConsoleOutput()
    if limit is None and not is_json:
        limit = DEFAULT_TABLE_LIMIT
    try:
        view = asyncio.run(look(_open(url, endpoint, region), queue))
    except LimitExceeded:
        raise
    except FormatError as error:
        out.show({"damage": [str(error)]}, damaged_report(url, queue, str(error)))
        raise typer.Exit(DAMAGE_FOUND) from error
    document = queue_document(view, time.time_ns() // 1_000_000)
    out.show(limited(document, limit), queue_report(url, queue, view, document, limit))
    if view.damage:
        raise typer.Exit(DAMAGE_FOUND)


def dump(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]", help="Of the store; not with --manifest.", show_default=False
        ),
    ] = None,
    *,
    sequence: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="The batch of this entry.", show_default=False),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="PATH", help="The batch at this path in the store.")
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A manifest in a local file.", show_default=False),
    ] = None,
    manifest_path: ManifestPath = _QUEUE.manifest_path,
    data_prefix: DataPrefix = _QUEUE.data_path_prefix,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Print a manifest, or the records of a batch, as one JSON document. Bytes are in base64."""
    import asyncio

    from quiver.cli.output import write

    queue = _queue(manifest_path, data_prefix)
    given = [option for option in (sequence, batch, manifest) if option is not None]
    if len(given) > 1:
        raise typer.BadParameter("use one of --sequence, --batch and --manifest")
    if (manifest is None) == (url is None):
        raise typer.BadParameter("it takes a URL, or --manifest FILE", param_hint="URL")
    if manifest is not None:
        document = _local_manifest(manifest)
    else:
        objects = _open(url or "", endpoint, region)
        document = asyncio.run(_stored(objects, queue, sequence, batch))
    write(json.dumps(document, indent=2) + "\n")


def collect(
    url: Url,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what may go.")] = False,
    grace_period: GracePeriod = _QUEUE.gc_grace_period,
    manifest_path: ManifestPath = _QUEUE.manifest_path,
    data_prefix: DataPrefix = _QUEUE.data_path_prefix,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Delete the batches that nobody will read any more.

    What is garbage now is looked at again after half of the grace period, and deleted if it still
    is: so this takes that long. It ends when another consumer takes the queue over.
    """
    import asyncio

    from quiver.cli.output import write

    queue = _queue(manifest_path, data_prefix, grace_period)
    objects = _open(url, endpoint, region)
    paths = asyncio.run(_collect(objects, queue, dry_run=dry_run))
    write("".join(f"{path}\n" for path in paths))
    typer.echo(f"{len(paths)} batches {'may go' if dry_run else 'deleted'}.", err=True)


def requeue(
    url: Url,
    sequence: Annotated[
        int,
        typer.Argument(
            min=0, metavar="SEQUENCE", help="As quiver buffer inspect shows it.", show_default=False
        ),
    ],
    *,
    manifest_path: ManifestPath = _QUEUE.manifest_path,
    data_prefix: DataPrefix = _QUEUE.data_path_prefix,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Put the batch of a dead letter at the end of the queue, under a new name.

    A running consumer is not disturbed.
    """
    import asyncio

    from quiver.buffer.requeueing import requeue_letter
    from quiver.cli.output import write

    queue = _queue(manifest_path, data_prefix)
    place = asyncio.run(requeue_letter(_open(url, endpoint, region), queue, sequence))
    write(f"Batch {sequence} is back in the queue as {place.sequence}, at {place.location}.\n")


def committer(
    url: Url,
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where producers find it; port 0: any.")
    ] = "127.0.0.1:4390",
    grace_period: GracePeriod = _QUEUE.gc_grace_period,
    manifest_path: ManifestPath = _QUEUE.manifest_path,
    data_prefix: DataPrefix = _QUEUE.data_path_prefix,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Write the manifest for many producers, until it is interrupted.

    Whoever can connect can append to this queue, and to no other: keep it in a network of trust.
    Producers go on without it when it ends.
    """
    import asyncio

    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise InvalidConfig(f"--listen is {listen!r}; it must be host:port")
    queue = _queue(manifest_path, data_prefix, grace_period)
    asyncio.run(_serve(_open(url, endpoint, region), queue, host, int(port)))


COMMANDS: Final[Mapping[str, Callable[..., None]]] = {
    "inspect": inspect,
    "dump": dump,
    "gc": collect,
    "requeue": requeue,
    "committer": committer,
}


def _queue(
    manifest_path: str, data_prefix: str, grace_period: float = _QUEUE.gc_grace_period
) -> QueueConfig:
    # Below a minute of grace, the time for one attempt has to be shorter than usual.
    timeout = min(_QUEUE.attempt_timeout, grace_period / 4)
    return QueueConfig(
        manifest_path=manifest_path,
        data_path_prefix=data_prefix,
        gc_grace_period=grace_period,
        attempt_timeout=timeout,
    )


def _open(url: str, endpoint: str | None, region: str | None) -> Objects:
    from quiver.buffer.obstore_objects import open_objects

    given = {"endpoint": endpoint, "region": region}
    return open_objects(url, **{name: value for name, value in given.items() if value is not None})


# --- What commands do -----------------------------------------------------------------------------


def _local_manifest(path: Path) -> dict[str, Any]:
    from quiver.buffer import manifest
    from quiver.buffer.looking import manifest_document
    from quiver.disk import RealDisk

    data = RealDisk().read(path).to_pybytes()
    footer = manifest.check(data, source=str(path))
    return manifest_document(footer, manifest.entries(data, source=str(path)))


async def _stored(
    objects: Objects, queue: QueueConfig, sequence: int | None, batch: str | None
) -> dict[str, Any]:
    import base64

    from quiver.buffer.fetching import fetch_batch
    from quiver.buffer.looking import entry_document, manifest_document, read_manifest
    from quiver.buffer.types import QueueEntry

    if batch is not None:
        entry = QueueEntry(0, batch, ())
        document: dict[str, Any] = {"location": batch}
    else:
        read = await read_manifest(objects, queue)
        if sequence is None:
            return manifest_document(read.footer, read.entries)
        found = [one for one in read.entries if one.sequence == sequence]
        if not found:
            first = read.footer.next_sequence - read.footer.entry_count
            raise ObjectNotFound(
                f"{queue.manifest_path} has no entry {sequence}: it has {first} to "
                f"{read.footer.next_sequence - 1}"
            )
        entry = found[0]
        document = entry_document(entry)
    records = (await fetch_batch(objects, entry, queue.max_batch_bytes)).records
    return {
        **document,
        "records_base64": [base64.b64encode(record).decode() for record in records],
    }


async def _collect(objects: Objects, queue: QueueConfig, *, dry_run: bool) -> tuple[str, ...]:
    import asyncio

    from quiver.buffer.appender import wall_clock_ms
    from quiver.buffer.collector import Collector
    from quiver.buffer.looking import read_manifest
    from quiver.config import ConsumerConfig
    from quiver.metrics import Metrics

    config = ConsumerConfig(queue=queue)
    collector = Collector(objects, config, metrics=Metrics(), now_ms=wall_clock_ms)
    epoch = (await read_manifest(objects, queue)).footer.epoch
    if dry_run:
        return await collector.candidates(epoch)
    found = await collector.collect(epoch)
    deleted: list[str] = []
    if found.marked:
        typer.echo(
            f"{found.marked} batches may go; looking again in {queue.max_upload_age:g} s.", err=True
        )
        await asyncio.sleep(queue.max_upload_age)
        found = await collector.collect(epoch)
        deleted += found.deleted
        while len(found.deleted) == config.gc_max_deletes:
            found = await collector.collect(epoch)
            deleted += found.deleted
    return tuple(deleted)


async def _serve(objects: Objects, queue: QueueConfig, host: str, port: int) -> None:
    import asyncio
    import contextlib
    import signal

    from quiver.buffer.committer import Committer
    from quiver.buffer.looking import read_manifest

    with contextlib.suppress(ObjectNotFound):  # the first producer makes it
        await read_manifest(objects, queue)
    async with Committer(objects, queue) as serving:
        address = await serving.start(host, port)
        typer.echo(f"Listening on {address[0]}:{address[1]}, for {queue.manifest_path}.", err=True)
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()
    typer.echo(f"Ended; {serving.conflict_rate:.1f} % of its writes were conflicts.", err=True)
