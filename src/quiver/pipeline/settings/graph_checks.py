"""What can be wrong with a graph of nodes whose parts are all right.

Mistakes: a destination that is not there, or takes nothing; a cycle; a node with items to hand on
and nobody to take them, which would be lost; an exporter with a way out; more than one way out; two
receivers on one address; an address open to the network without TLS and keys; a store that would
not open with its settings; two stores in one directory; a destination of a store whose name cannot
be that of a subscriber.

Warnings: a node that nothing reaches, a store that nobody reads, a graph that receives nothing.
"""

from __future__ import annotations

import ipaddress
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Final

from quiver.errors import InvalidConfig, InvalidName
from quiver.pipeline.node import Dispatch
from quiver.pipeline.persistence import store_config
from quiver.pipeline.settings.mistakes import Mistakes, Place, quoted, suggestion
from quiver.pipeline.settings.options import (
    AdminOptions,
    LakeOptions,
    PersistenceOptions,
    ReceiverOptions,
)
from quiver.pipeline.settings.plugin_names import LAKE, PERSISTENCE, Kind, Plugin
from quiver.pipeline.settings.yaml_text import Fields, Value
from quiver.subscriber.progress import check_subscriber_id

_ANY_HOST: Final = {"0.0.0.0", "::", "*"}  # noqa: S104 - it is looked for, not listened on


@dataclass(frozen=True, slots=True)
class Part:
    """What a node of a file becomes: one node, or two when it names two protocols."""

    suffix: str
    plugin: Plugin
    options: object | None
    place: Place
    config: Value | None = None


@dataclass(slots=True)
class DraftPort:
    """A way out, with the place of each destination."""

    place: Place
    destinations: dict[str, Place] = field(default_factory=dict)
    dispatch: Dispatch | None = None


@dataclass(slots=True)
class Draft:
    """A node as far as it could be read. Without parts nothing is known about what it is."""

    name: str
    place: Place
    parts: tuple[Part, ...] = ()
    ports: dict[str, DraftPort] = field(default_factory=dict)

    @property
    def plugin(self) -> Plugin | None:
        """What it is."""
        return self.parts[0].plugin if self.parts else None

    @property
    def kind(self) -> Kind | None:
        """What it does."""
        return self.plugin.kind if self.plugin else None

    @property
    def destinations(self) -> Mapping[str, Place]:
        """Of all ports."""
        return {
            name: place for port in self.ports.values() for name, place in port.destinations.items()
        }

    @property
    def takes_items(self) -> bool:
        """Receivers do not."""
        return self.kind is not Kind.RECEIVER


def check_graph(drafts: Mapping[str, Draft], admin: AdminOptions, mistakes: Mistakes) -> None:
    """Tell everything that is wrong with a graph."""
    check = _Check(drafts, mistakes)
    check.destinations()
    check.ways_out()
    check.cycles()
    check.reached()
    check.addresses(admin)
    check.stores()
    check.subscribers()


class _Check:
    def __init__(self, drafts: Mapping[str, Draft], mistakes: Mistakes) -> None:
        self._drafts = drafts
        self._mistakes = mistakes

    def destinations(self) -> None:
        takers = [name for name, draft in self._drafts.items() if draft.takes_items]
        for draft in self._drafts.values():
            for name, place in draft.destinations.items():
                if name not in self._drafts:
                    self._mistakes.add(
                        place, f"there is no node {quoted(name)}", suggestion(name, takers)
                    )
                elif not self._drafts[name].takes_items:
                    self._mistakes.add(
                        place, f"{quoted(name)} is a receiver: it takes items from nobody"
                    )

    def ways_out(self) -> None:
        for draft in self._drafts.values():
            if draft.kind is Kind.EXPORTER:
                for port in draft.ports.values():
                    self._mistakes.add(
                        port.place, f"{quoted(draft.name)} is an exporter: it hands nothing on"
                    )
            elif len(draft.ports) > 1:
                self._mistakes.add(
                    [*draft.ports.values()][1].place,
                    f"{quoted(draft.name)} has one way out, not {len(draft.ports)}",
                    "put all destinations into one port",
                )
            elif draft.plugin is PERSISTENCE and not draft.destinations:
                self._mistakes.warn(
                    draft.place,
                    f"nobody takes what {quoted(draft.name)} stores: it fills up to its size_cap",
                )
            elif draft.kind is not None and not draft.destinations:
                self._mistakes.add(
                    draft.place,
                    f"{quoted(draft.name)} has no destination: what it gets would be lost",
                    suggestion("", (n for n, d in self._drafts.items() if d.takes_items)),
                )

    def cycles(self) -> None:
        """One mistake for each cycle that a walk along the edges comes back to."""
        done: set[str] = set()
        for start in self._drafts:
            path: list[str] = []
            waiting: list[tuple[str, Iterator[str]]] = []
            self._enter(start, path, waiting, done)
            while waiting:
                name, rest = waiting[-1]
                following = next(rest, None)
                if following is None:
                    waiting.pop()
                    path.pop()
                    done.add(name)
                elif following in path:
                    circle = [*path[path.index(following) :], following]
                    self._mistakes.add(
                        self._drafts[name].destinations[following],
                        f"items would go round for ever: {' -> '.join(circle)}",
                    )
                else:
                    self._enter(following, path, waiting, done)

    def _enter(
        self, name: str, path: list[str], waiting: list[tuple[str, Iterator[str]]], done: set[str]
    ) -> None:
        if name in self._drafts and name not in done:
            path.append(name)
            waiting.append((name, iter(self._drafts[name].destinations)))

    def reached(self) -> None:
        receivers = [name for name, draft in self._drafts.items() if not draft.takes_items]
        if not receivers and all(draft.parts for draft in self._drafts.values()):
            first = next(iter(self._drafts.values()))
            self._mistakes.warn(first.place, "there is no receiver: nothing comes in")
            return
        reached: set[str] = set()
        waiting = list(receivers)
        while waiting:
            name = waiting.pop()
            if name not in reached and name in self._drafts:
                reached.add(name)
                waiting.extend(self._drafts[name].destinations)
        for name, draft in self._drafts.items():
            if name not in reached and draft.parts:
                self._mistakes.warn(draft.place, f"no receiver leads to {quoted(name)}")

    # --- what nodes need of the machine -------------------------------------------------------

    def addresses(self, admin: AdminOptions) -> None:
        listening = [
            (draft.name, part.place, part.options)
            for draft in self._drafts.values()
            for part in draft.parts
            if isinstance(part.options, ReceiverOptions)
        ]
        for name, place, receiver in listening:
            self._check_exposure(name, place, receiver)
            if _same_address(receiver.listening_addr, admin.listening_addr):
                self._mistakes.add(
                    place, f"{quoted(name)} and admin both listen on {receiver.listening_addr}"
                )
        for (first, _, one), (second, place, other) in combinations(listening, 2):
            if _same_address(one.listening_addr, other.listening_addr):
                self._mistakes.add(
                    place,
                    f"{quoted(second)} listens on {other.listening_addr}, where {quoted(first)} "
                    "listens already",
                    "give it another port",
                )

    def _check_exposure(self, name: str, place: Place, receiver: ReceiverOptions) -> None:
        if receiver.tls or receiver.auth or receiver.insecure_ok or _is_loopback(receiver.host):
            return
        self._mistakes.add(
            place,
            f"{quoted(name)} listens on {receiver.listening_addr}, beyond this machine, without "
            "tls and auth",
            "add one of them, or insecure_ok: true",
        )

    def stores(self) -> None:
        stores = [
            (draft, _absolute(part.options.path))
            for draft in self._drafts.values()
            for part in draft.parts
            if isinstance(part.options, PersistenceOptions)
        ]
        for draft, _ in stores:
            self._check_store(draft.parts[0])
        for (first, one), (second, other) in combinations(stores, 2):
            if one.is_relative_to(other) or other.is_relative_to(one):
                self._mistakes.add(
                    second.parts[0].place,
                    f"{quoted(second.name)} and {quoted(first.name)} store in one directory: "
                    f"{one if one.is_relative_to(other) else other}",
                    "give each a path of its own",
                )

    def _check_store(self, part: Part) -> None:
        """What the store itself would refuse when it is opened."""
        try:
            if isinstance(part.options, PersistenceOptions):
                store_config(part.options)
        except InvalidConfig as error:
            self._mistakes.add(_named_in(str(error), part), str(error))

    def subscribers(self) -> None:
        """Each destination of a store is a subscriber by its name; a lake by what it is told."""
        for draft in self._drafts.values():
            if draft.plugin is PERSISTENCE:
                self._check_subscribers(draft)
        for name, draft in self._drafts.items():
            if draft.plugin is LAKE:
                self._check_lake(name, draft)

    def _check_lake(self, name: str, lake: Draft) -> None:
        senders = [draft for draft in self._drafts.values() if name in draft.destinations]
        for sender in senders:
            if sender.plugin not in {PERSISTENCE, None}:
                self._mistakes.add(
                    sender.destinations[name],
                    f"{quoted(name)} is a lake, which reads from a store: only a persistence node "
                    "leads to it",
                )
        if not senders:
            self._mistakes.add(
                lake.place,
                f"{quoted(name)} is a lake, which reads from a store: it must be a destination of "
                "a persistence node",
            )

    def _check_subscribers(self, store: Draft) -> None:
        names: dict[str, str] = {}
        for destination, place in store.destinations.items():
            if destination not in self._drafts:
                continue
            name = self._subscriber(self._drafts[destination])
            try:
                check_subscriber_id(name)
            except InvalidName as error:
                better = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:64].strip("_")
                hint = f"call it {better!r}" if better not in {"", name} else ""
                self._mistakes.add(place, str(error), hint)
            if name in names:
                self._mistakes.add(
                    place,
                    f"{quoted(destination)} and {quoted(names[name])} would be one subscriber, "
                    f"{quoted(name)}",
                )
            names[name] = destination

    @staticmethod
    def _subscriber(draft: Draft) -> str:
        settings: Sequence[object] = [part.options for part in draft.parts]
        lake = next((found for found in settings if isinstance(found, LakeOptions)), None)
        return draft.name if lake is None else lake.subscriber


def _named_in(message: str, part: Part) -> Place:
    """Where the option stands that a message names by its path, as ``retention.max_age``."""
    for path in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", message):
        value = part.config
        for name in path.split("."):
            found = value.fields.get(name) if isinstance(value, Fields) else None
            value = found.value if found else None
        if value is not None:
            return value.place
    return part.place


def _same_address(one: str, other: str) -> bool:
    host, _, port = one.rpartition(":")
    other_host, _, other_port = other.rpartition(":")
    if port != other_port or port.strip("0") == "":
        return False
    hosts = {_plain_host(host), _plain_host(other_host)}
    return len(hosts) == 1 or bool(hosts & _ANY_HOST)


def _plain_host(host: str) -> str:
    host = host.strip("[]").lower()
    return "127.0.0.1" if host == "localhost" else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(_plain_host(host)).is_loopback
    except ValueError:
        return False  # a name: nobody knows what it means elsewhere


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(Path.cwd() / path))
