"""Nested values: protobuf to CBOR and back, and CBOR that must be refused."""

from __future__ import annotations

import math

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValueList

from quiver.otlp.otap.cbor import (
    BadValue,
    array_to_cbor,
    cbor_to_array,
    cbor_to_kvlist,
    kvlist_to_cbor,
)

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(values=st.lists(VALUES, max_size=4))
def test_a_list_comes_back_in_the_same_bytes(values: list[object]) -> None:
    item = cbor2.dumps(values)
    message = cbor_to_array(item, 32)
    assert cbor2.loads(array_to_cbor(message, 32)) == values
    assert cbor_to_array(array_to_cbor(message, 32), 32) == message


@settings(max_examples=100, deadline=None)
@given(values=st.dictionaries(st.text(), VALUES, max_size=4))
def test_a_map_comes_back_in_the_same_order(values: dict[str, object]) -> None:
    message = cbor_to_kvlist(cbor2.dumps(values), 32)
    made = cbor2.loads(kvlist_to_cbor(message, 32))
    assert made == values
    assert list(made) == list(values)


def test_each_type_has_its_field() -> None:
    item = cbor2.dumps([None, True, -1, 1.5, "a", b"b", ["c"], {"d": 1}])
    made = ArrayValue.FromString(cbor_to_array(item, 32))
    assert [value.WhichOneof("value") for value in made.values] == [
        None,
        *("bool_value", "int_value", "double_value", "string_value"),
        *("bytes_value", "array_value", "kvlist_value"),
    ]


def test_what_python_makes_of_other_widths_is_read() -> None:
    halves = b"\x84\xf9\x3e\x00\xfa\x3f\xc0\x00\x00\x18\x05\xf9\x7e\x00"
    made = ArrayValue.FromString(cbor_to_array(halves, 32)).values
    assert (made[0].double_value, made[1].double_value, made[2].int_value) == (1.5, 1.5, 5)
    assert math.isnan(made[3].double_value)


def test_indefinite_lengths_are_read() -> None:
    made = ArrayValue.FromString(cbor_to_array(b"\x9f\x7f\x61a\x61b\xff\xff", 32))
    assert made.values[0].string_value == "ab"


def test_a_key_without_value_is_null_and_the_last_of_two_stays() -> None:
    message = KeyValueList()
    message.values.add(key="a")
    message.values.add(key="b", value=AnyValue(int_value=1))
    message.values.add(key="b", value=AnyValue(int_value=2))
    made = cbor2.loads(kvlist_to_cbor(message.SerializeToString(), 32))
    assert made == {"a": None, "b": 2}


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        pytest.param(b"", "not CBOR", id="nothing"),
        pytest.param(b"\x82\x01", "not CBOR", id="cut off"),
        pytest.param(b"\x9b" + b"\xff" * 8, "not CBOR", id="a length that cannot be"),
        pytest.param(b"\x81\x5b\x7f" + b"\xff" * 7, "not CBOR", id="a string longer than all"),
        pytest.param(b"\x81\x01\x00", "bytes after", id="a second item"),
        pytest.param(b"\x80\xff", "bytes after", id="a break after the item"),
        pytest.param(b"\x81\xc1\x01", "tag", id="a date"),
        pytest.param(b"\x81\xc2\x41\x01", "tag", id="a big number"),
        pytest.param(b"\x81\xc5\x82\x1a\x7f\xff\xff\xff\x01", "tag", id="a huge fraction"),
        pytest.param(b"\xd8\x1c\x81\xd8\x1d\x00", "tag", id="a list that holds itself"),
        pytest.param(b"\xd9\xd9\xf7\x80", "tag", id="the mark of CBOR files"),
        pytest.param(b"\x81\xd9\x01\x02\x80", "tag", id="a set"),
        pytest.param(b"\x81\x1b" + b"\xff" * 8, "no value", id="an integer of 65 bits"),
        pytest.param(b"\x81\xf7", "no value", id="undefined"),
        pytest.param(b"\x81\xe5", "no value", id="a simple value"),
        pytest.param(b"\x81\xa1\x01\x02", "key must be", id="a number as key"),
        pytest.param(b"\x81\xa1\x41a\x02", "key is not text", id="bytes as key"),
        pytest.param(b"\x81\x61\xff", "not CBOR", id="text that is not UTF-8"),
        pytest.param(b"\x81" * 5 + b"\x01", "depth", id="deeper than the limit"),
        pytest.param(b"\xa0", "no array", id="a map"),
        pytest.param(b"\x01", "no array", id="a number"),
    ],
)
def test_cbor_that_is_no_plain_list_is_refused(item: bytes, reason: str) -> None:
    with pytest.raises(BadValue, match=reason):
        cbor_to_array(item, 4)


def test_a_list_is_no_map() -> None:
    with pytest.raises(BadValue, match="no map"):
        cbor_to_kvlist(b"\x80", 4)


def test_the_limit_counts_levels() -> None:
    assert cbor_to_array(b"\x81" * 4 + b"\x01", 4)
    message = cbor_to_array(b"\x81" * 4 + b"\x01", 4)
    assert array_to_cbor(message, 4)
    with pytest.raises(BadValue, match="deeper"):
        array_to_cbor(message, 3)


def test_a_limit_of_none_refuses_every_list() -> None:
    with pytest.raises(BadValue, match="deeper"):
        cbor_to_array(b"\x80", 0)
    with pytest.raises(BadValue, match="deeper"):
        array_to_cbor(b"", 0)


@pytest.mark.parametrize("convert", [array_to_cbor, kvlist_to_cbor])
def test_bytes_that_are_no_message_are_refused(convert: object) -> None:
    assert callable(convert)
    with pytest.raises(BadValue, match="protobuf"):
        convert(b"\x0a\x05ab", 4)
