"""OTAP batches with bytes changed by chance: refused, or harmless."""

from __future__ import annotations

import random

import pytest
from otap_peers import SIGNALS, tables_of, telemetry

from quiver.bundle import Signal
from quiver.errors import InvalidRequest
from quiver.pipeline.otap_streams import OtapDecoder, OtapEncoder, StreamBroken
from quiver.pipeline.otap_wire import BatchArrowRecords, read_records, write_records

MIB = 2**20


def mutated(data: bytes, chance: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(made))
        match chance.choice("bbbvvcdi"):
            case "b":
                made[at] ^= 1 << chance.randrange(8)
            case "v":
                made[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case "c":
                other = chance.randrange(len(made))
                made[at : at + 8] = made[other : other + 8]
            case "d":
                del made[at : at + chance.randint(1, 16)]
            case _:
                made[at:at] = made[at : at + chance.randint(1, 16)]
        made = made or bytearray(1)
    return bytes(made)


def mutated_batch(data: bytes, chance: random.Random) -> bytes:
    """The message changed anywhere, or the Arrow data of one payload."""
    if chance.random() < 0.3:
        return mutated(data, chance)
    batch = read_records(data)
    payloads = list(batch.payloads)
    one = chance.randrange(len(payloads))
    payloads[one] = payloads[one]._replace(record=mutated(payloads[one].record, chance))
    return write_records(BatchArrowRecords(batch.batch_id, payloads))


@SIGNALS
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_mutated_batches_are_refused_and_do_no_harm(signal: Signal, compression: str) -> None:
    chance = random.Random(f"{signal} {compression}")
    encoder = OtapEncoder(compression)
    requests = telemetry(signal, 2, items=3)
    first, second = (
        write_records(BatchArrowRecords(n, encoder.encode(tables_of(signal, request))))
        for n, request in enumerate(requests)
    )
    refused = taken = 0
    for round_ in range(350):
        reading = OtapDecoder(signal, max_batch_bytes=MIB, max_stream_bytes=MIB)
        data = first
        if round_ % 3 == 0:
            reading.decode(read_records(first))
            data = second
        try:
            tables = reading.decode(read_records(mutated_batch(data, chance)))
        except (InvalidRequest, StreamBroken):
            refused += 1
        else:
            taken += 1
            for table in tables.values():
                table.validate(full=True)
    assert refused > 50
    assert taken > 10
