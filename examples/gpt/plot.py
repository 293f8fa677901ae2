"""Draws a line chart as a PNG file without a plotting library: anti-aliased lines, a 5x7 font, zlib."""
from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import List, Sequence, Tuple

import torch

Color = Tuple[int, int, int]

_INK: Color = (40, 44, 52)
_GRID: Color = (228, 231, 236)
_SCALE = 2  # size of the font's pixels

# The characters from space to '~': five columns (bytes) each, with the lowest bit on top.
_FONT = bytes.fromhex(
    "0000000000 00005f0000 0007000700 147f147f14 242a7f2a12 2313086462 3649562050 0008070300 001c224100 0041221c00"
    "2a1c7f1c2a 08083e0808 0080703000 0808080808 0000606000 2010080402 3e5149453e 00427f4000 7249494946 2141494d33"
    "1814127f10 2745454539 3c4a494931 4121110907 3649494936 464949291e 0000140000 0040340000 0008142241 1414141414"
    "0041221408 0201590906 3e415d594e 7c1211127c 7f49494936 3e41414122 7f4141413e 7f49494941 7f09090901 3e41415173"
    "7f0808087f 00417f4100 2040413f01 7f08142241 7f40404040 7f021c027f 7f0408107f 3e4141413e 7f09090906 3e4151215e"
    "7f09192946 2649494932 03017f0103 3f4040403f 1f2040201f 3f4038403f 6314081463 0304780403 6159494d43 007f414141"
    "0204081020 004141417f 0402010204 4040404040 0003070800 2054547840 7f28444438 3844444428 384444287f 3854545418"
    "00087e0902 18a4a49c78 7f08040478 00447d4000 2040403d00 7f10284400 00417f4000 7c04780478 7c08040478 3844444438"
    "fc18242418 18242418fc 7c08040408 4854545424 04043f4424 3c4040207c 1c2040201c 3c4030403c 4428102844 4c9090907c"
    "4464544c44 0008364100 0000770000 0041360800 0201020402")


@dataclass
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: Color
    width: float = 2.0


class Canvas:
    def __init__(self, width: int, height: int) -> None:
        self.pixels = torch.full((height, width, 3), 255.0)

    def _blend(self, top: int, left: int, coverage: torch.Tensor, color: Color) -> None:
        height, width = self.pixels.shape[:2]
        t, l = max(top, 0), max(left, 0)
        part = self.pixels[t:min(top + coverage.shape[0], height), l:min(left + coverage.shape[1], width)]
        cover = coverage[t - top:t - top + part.shape[0], l - left:l - left + part.shape[1], None]
        part.lerp_(torch.tensor(color, dtype=torch.float32).expand_as(part), cover.expand_as(part))

    def line(self, points: Sequence[Tuple[float, float]], color: Color, width: float) -> None:
        """Draws a connected line. The segments' coverages are merged before blending, so that joints show no dots."""
        left, top = (int(min(p[i] for p in points) - width - 1) for i in (0, 1))
        right, bottom = (int(max(p[i] for p in points) + width + 2) for i in (0, 1))
        cover = torch.zeros(bottom - top, right - left)
        for (x0, y0), (x1, y1) in zip(points, points[1:]):
            l, t = (int(min(a, b) - width - 1) for a, b in ((x0, x1), (y0, y1)))
            r, b = (int(max(a, b) + width + 2) for a, b in ((x0, x1), (y0, y1)))
            y, x = torch.meshgrid(torch.arange(t, b) + 0.5, torch.arange(l, r) + 0.5, indexing="ij")
            dx, dy = x1 - x0, y1 - y0
            along = (((x - x0) * dx + (y - y0) * dy) / max(dx * dx + dy * dy, 1e-9)).clamp(0, 1)
            distance = torch.hypot(x - x0 - along * dx, y - y0 - along * dy)
            part = cover[t - top:b - top, l - left:r - left]
            torch.maximum(part, (width / 2 + 0.5 - distance).clamp(0, 1), out=part)
        self._blend(top, left, cover, color)

    def text(self, x: float, y: float, text: str, color: Color = _INK, align: float = 0.0) -> None:
        """Draws text with its vertical middle at y. align: 0 begins at x, 0.5 is centred on it, 1 ends there."""
        columns = [0]
        for c in text:
            at = 5 * (ord(c) - 32)
            columns += [*(_FONT[at:at + 5] if 32 <= ord(c) < 127 else _FONT[155:160]), 0]
        bits = (torch.tensor(columns)[None, :] >> torch.arange(8)[:, None]) & 1
        cover = bits.float().repeat_interleave(_SCALE, 0).repeat_interleave(_SCALE, 1)
        self._blend(round(y - 3.5 * _SCALE), round(x - align * (cover.shape[1] - _SCALE)), cover, color)

    def png(self) -> bytes:
        height, width = self.pixels.shape[:2]
        rows = torch.zeros(height, 1 + 3 * width, dtype=torch.uint8)  # each row begins with its filter type: 0, none
        rows[:, 1:] = self.pixels.round().to(torch.uint8).view(height, -1)

        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        body = zlib.compress(bytes(rows.flatten().tolist()), 6)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def ticks(low: float, high: float, count: int) -> List[float]:
    """About `count` round numbers from low to high."""
    raw = (high - low) / max(count, 1)
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], width: int = 1000,
               height: int = 560) -> bytes:
    """The series as a PNG; values that are not finite are left out."""
    data = [(s, [(x, y) for x, y in zip(s.x, s.y) if math.isfinite(x) and math.isfinite(y)]) for s in series]
    points = [p for _, part in data for p in part] or [(0.0, 0.0)]
    x0, x1 = (f(p[0] for p in points) for f in (min, max))
    y0, y1 = (f(p[1] for p in points) for f in (min, max))
    x1 = x1 if x1 > x0 else x0 + 1
    pad = 0.06 * (y1 - y0) or 0.5
    y0, y1 = y0 - pad, y1 + pad
    left, right, top, bottom = 86.0, width - 28.0, 76.0, height - 74.0

    def at(x: float, y: float) -> Tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * (right - left), bottom - (y - y0) / (y1 - y0) * (bottom - top)

    canvas = Canvas(width, height)
    for x in ticks(x0, x1, 8):
        px = at(x, y0)[0]
        canvas.line([(px, top), (px, bottom)], _GRID, 1)
        canvas.line([(px, bottom), (px, bottom + 6)], _INK, 1)
        canvas.text(px, bottom + 20, f"{x:g}", align=0.5)
    for y in ticks(y0, y1, 7):
        py = at(x0, y)[1]
        canvas.line([(left, py), (right, py)], _GRID, 1)
        canvas.line([(left - 6, py), (left, py)], _INK, 1)
        canvas.text(left - 12, py, f"{y:g}", align=1)
    canvas.line([(left, top), (left, bottom), (right, bottom)], _INK, 1.5)
    canvas.text(left, 24, title)
    canvas.text((left + right) / 2, height - 22, x_label, align=0.5)
    canvas.text(left, top - 20, y_label)
    legend, entry = top + 16, right - 50 - 6 * _SCALE * max(len(s.label) for s in series)
    for s, part in data:
        if not part:
            continue
        drawn = [at(x, y) for x, y in part]
        canvas.line(drawn if len(drawn) > 1 else drawn * 2, s.color, s.width if len(drawn) > 1 else 6)
        canvas.line([(entry, legend), (entry + 30, legend)], s.color, max(s.width, 2))
        canvas.text(entry + 40, legend, s.label)
        legend += 24
    return canvas.png()
