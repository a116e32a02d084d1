"""Texts of option values."""

from __future__ import annotations

import pytest

from sglang_lite.configuration import values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("-1", -1),
        ("25.6k", 25600),
        ("2k", 2000),
        ("1.5M", 1_500_000),
        ("3G", 3 * 10**9),
        ("1T", 10**12),
        ("4Ki", 4096),
        ("2Mi", 2**21),
        ("1Gi", 2**30),
        ("1Ti", 2**40),
    ],
)
def test_human_integers(text: str, expected: int) -> None:
    assert values.human_integer(text) == expected


@pytest.mark.parametrize("text", ["", "k", "4ki", "4K", "1.5", "0.0001k", "1.5Ki", "1e3", "0x10", "four"])
def test_bad_human_integers_name_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid int value|Decimals are not allowed") as caught:
        values.human_integer(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "x", ""])
def test_bad_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="invalid float value"):
        values.number(text)


@pytest.mark.parametrize("text", ["-1", "65536", "999999"])
def test_ports_are_16_bit(text: str) -> None:
    with pytest.raises(ValueError, match="0 to 65535"):
        values.port(text)


def test_port_ranges() -> None:
    assert list(values.ports_of(values.port_range("9000-9003"))) == [9000, 9001, 9002, 9003]
    assert list(values.ports_of(values.port_range("9000"))) == [9000]


@pytest.mark.parametrize("text", ["9-8", "0-3", "1-70000", "a-b", "", "1-2-3"])
def test_bad_port_ranges(text: str) -> None:
    with pytest.raises(ValueError, match="invalid port range"):
        values.port_range(text)


def test_device_index_is_dropped() -> None:
    assert values.device_name("CUDA:1") == "cuda"


@pytest.mark.parametrize("text", ["[1]", "3", "{bad", ""])
def test_json_objects_only(text: str) -> None:
    with pytest.raises(ValueError, match="invalid loads value"):
        values.json_object(text)
