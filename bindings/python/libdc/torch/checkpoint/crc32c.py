"""CRC-32C of buffers, and the checksum of two concatenated buffers from those of both."""

from __future__ import annotations

from functools import lru_cache
from typing import List, Tuple

import libdc

_POLYNOMIAL = 0x82F63B78  # reflected: the highest bit is x^0
checksum = libdc.crc32c


def join(first: int, second: int, second_nbytes: int) -> int:
    """The checksum of concatenated bytes from those of both parts: first * x^(8 second_nbytes) + second."""
    if not first or not second_nbytes:
        return first ^ second
    product = second
    for row in _rows(second_nbytes):
        product ^= row[first & 15]
        first >>= 4
    return product


def _times_x(value: int) -> int:
    """The polynomial times x, over GF(2) and modulo CRC-32C's polynomial, as all products here."""
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a, b = a << 1 & 0xFFFFFFFF, _times_x(b)
    return product


@lru_cache(maxsize=512)
def _rows(nbytes: int) -> List[Tuple[int, ...]]:
    """Tables of the products of x^(8 nbytes) with each value of each group of four bits, lowest bits first. They are
    cached, since a file's tensors have few different lengths."""
    power = 1 << 31
    for k in range(nbytes.bit_length()):
        if nbytes >> k & 1:
            power = _multiply(_SQUARES[k], power)
    bits = [power]  # times x^0, which is the highest bit, x^1...
    for _ in range(31):
        bits.append(_times_x(bits[-1]))
    bits.reverse()
    rows = []
    for low in range(0, 32, 4):
        row = [0]
        for bit in bits[low:low + 4]:
            row += [value ^ bit for value in row]
        rows.append(tuple(row))
    return rows


def _squares() -> List[int]:
    """x^(8 * 2^k) for each k."""
    squares = [1 << 23]
    for _ in range(62):
        squares.append(_multiply(squares[-1], squares[-1]))
    return squares


_SQUARES = _squares()
