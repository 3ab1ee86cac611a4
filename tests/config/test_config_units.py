"""Sizes, durations, rates and listen addresses as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowsup.supervisor.config import units
from shadowsup.supervisor.config.listen import ListenAddress, parse_listen


@pytest.mark.parametrize(
    ("text", "size"),
    [("0B", 0), ("512B", 512), ("1KiB", 1024), ("256MiB", 256 * 2**20), ("1.5GiB", 3 * 2**29), ("2 GB", 2 * 10**9), ("1TiB", 2**40)],
)
def test_a_size_is_bytes(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("256", "write 256MiB"),
        ("256m", "write 256MiB"),
        ("4G", "write 4GiB"),
        ("4gb", "write 4GiB"),
        ("1MIB", "write 1MiB"),
        ("10s", "not a unit of size"),
        ("big", "is not a size"),
        ("-1MiB", "is not a size"),
        ("0.3B", "whole number"),
        ("", "is not a size"),
    ],
)
def test_a_size_with_another_unit_or_none_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0.0), ("200ms", 0.2), ("30s", 30.0), ("10m", 600.0), ("1.5h", 5400.0), ("1m30s", 90.0), ("1d", 86400.0)]
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("30", "no unit; write 30s"),
        ("5min", "write 5m"),
        ("5sec", "write 5s"),
        ("5S", "write 5s"),
        ("5MiB", "not a unit of time"),
        ("1:30", "no unit"),
        ("soon", "is not a duration"),
        ("-1s", "is not a duration"),
        ("1s!", "is not a duration"),
        ("", "is not a duration"),
    ],
)
def test_a_duration_with_another_unit_or_none_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        units.parse_duration(text)


def test_a_rate_is_a_count_and_a_window() -> None:
    assert units.parse_rate("10 in 10m") == (10, 600.0)
    for text in ("10", "10/10m", "0 in 10m", "10 in 0s", "10 in 10"):
        with pytest.raises(ValueError, match=r"in|unit"):
            units.parse_rate(text)


@given(st.integers(0, 2**50))
def test_every_size_survives_being_written_and_read(size: int) -> None:
    assert units.parse_size(units.format_size(size)) == size


@given(st.integers(0, 10**9))
def test_every_duration_in_whole_milliseconds_survives_being_written_and_read(milliseconds: int) -> None:
    assert units.parse_duration(units.format_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.text(max_size=12))
def test_no_text_makes_a_parser_fail_in_another_way(text: str) -> None:
    for parse in (units.parse_size, units.parse_duration, units.parse_rate, parse_listen):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("text", "address", "url"),
    [
        ("127.0.0.1:8000", ListenAddress("127.0.0.1", 8000), "http://127.0.0.1:8000"),
        ("localhost:0", ListenAddress("localhost", 0), "http://localhost:0"),
        ("[::1]:8000", ListenAddress("::1", 8000), "http://[::1]:8000"),
        ("unix:/run/x/http.sock", ListenAddress(path="/run/x/http.sock"), "unix:/run/x/http.sock"),
    ],
)
def test_a_listen_address_is_taken_apart(text: str, address: ListenAddress, url: str) -> None:
    assert parse_listen(text) == address
    assert address.url == url
    assert address.is_loopback


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("8000", "127.0.0.1:8000"),
        (":8000", "0.0.0.0:8000"),
        ("127.0.0.1", "no port"),
        ("127.0.0.1:http", "not a port"),
        ("127.0.0.1:65536", "not a port"),
        ("::1:8000", "brackets"),
        ("[::g]:1", "not an IPv6 address"),
        ("http://127.0.0.1:8000", "is a URL"),
        ("example.com:80", "IP address"),
        ("256.0.0.1:80", "not an IP address"),
        ("unix:http.sock", "absolute"),
        ("unix:/" + "x" * 107, "107"),
    ],
)
def test_a_wrong_listen_address_is_refused_with_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_listen(text)


def test_an_open_address_is_not_loopback() -> None:
    assert not parse_listen("0.0.0.0:80").is_loopback
    assert not parse_listen("[::]:80").is_loopback
