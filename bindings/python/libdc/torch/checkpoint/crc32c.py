"""CRC-32C of buffers, and that of two buffers behind each other from those of both."""

from __future__ import annotations

from functools import lru_cache
from typing import List

import libdc

_POLYNOMIAL = 0x82F63B78  # reflected: the highest bit is x^0
checksum = libdc.crc32c


def join(first: int, second: int, second_nbytes: int) -> int:
    """The checksum of bytes from those of their beginning and their end: the former times x^(8 second_nbytes)."""
    return _multiply(_power(second_nbytes), first) ^ second if first else second


def _multiply(a: int, b: int) -> int:
    """Of polynomials over GF(2), modulo CRC-32C's."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """x^(8 nbytes)."""
    power = 1 << 31
    for k in range(nbytes.bit_length()):
        if nbytes >> k & 1:
            power = _multiply(_SQUARES[k], power)
    return power


def _squares() -> List[int]:
    """x^(8 * 2^k)."""
    squares = [1 << 23]
    for _ in range(62):
        squares.append(_multiply(squares[-1], squares[-1]))
    return squares


_SQUARES = _squares()
