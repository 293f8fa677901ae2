"""The transformer layer in float64, written from the equations of the header's chapter 12 and their derivatives, with
whole S x S matrices; the reference of the tests. Shapes: x [B, S, H], masks of dropout as multipliers."""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Tuple

import numpy as np

K = 0.7978845608
_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: np.ndarray, form: str) -> np.ndarray:
    if form == "erf":
        return 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(K * (x + 0.044715 * x**3)))


def gelu_slope(x: np.ndarray, form: str) -> np.ndarray:
    if form == "erf":
        return 0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    t = np.tanh(K * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * K * (1 + 3 * 0.044715 * x * x)


def norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    difference = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((difference**2).mean(-1, keepdims=True) + eps)
    return difference * rstd * gamma + beta, difference * rstd, rstd


def norm_back(dy: np.ndarray, xhat: np.ndarray, rstd: np.ndarray, gamma: np.ndarray) -> Tuple[np.ndarray, ...]:
    g = dy * gamma
    dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    return dx, (dy * xhat).sum((0, 1)), dy.sum((0, 1))


class Reference:
    """forward() keeps what backward() needs. weights: a dict by the names of libdc.transformer.WEIGHTS."""

    def __init__(self, heads: int, pre: bool, form: str = "tanh", eps: float = 1e-12) -> None:
        self.heads, self.pre, self.form, self.eps = heads, pre, form, eps

    def _split(self, x: np.ndarray) -> np.ndarray:
        b, s, h = x.shape
        return x.reshape(b, s, self.heads, h // self.heads).transpose(0, 2, 1, 3)

    @staticmethod
    def _join(x: np.ndarray) -> np.ndarray:
        b, a, s, d = x.shape
        return x.transpose(0, 2, 1, 3).reshape(b, s, a * d)

    def forward(self, w: Dict[str, np.ndarray], x: np.ndarray, mask: Optional[np.ndarray] = None,
                drops: Tuple[Any, Any, Any] = (1.0, 1.0, 1.0)) -> np.ndarray:
        self.w, self.x, self.drops = w, x, drops
        y0, self.xhat0, self.rstd0 = norm(x, w["norm_w"], w["norm_b"], self.eps) if self.pre else (x, None, None)
        self.y0 = y0
        qkv = y0 @ w["attn_qkvw"].T + w["attn_qkvb"]
        self.q, self.k, self.v = (self._split(part) for part in np.split(qkv, 3, -1))
        self.scale = 1 / math.sqrt(self.q.shape[-1])
        scores = self.q @ self.k.transpose(0, 1, 3, 2) * self.scale
        if mask is not None:
            mask = mask[:, None, None]
            # A large mask is added in float32, as everywhere: what that rounds away is lost.
            large = np.isfinite(mask) & (np.abs(mask) >= 1e4)
            rounded = scores.astype(np.float32) + mask.astype(np.float32)
            scores = np.where(large, rounded.astype(np.float64), scores + mask)
        top = scores.max(-1, keepdims=True)
        e = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True)
        self.p = np.where(total > 0, e / np.where(total > 0, total, 1), 0)
        self.c = self._join((self.p * drops[0]) @ self.v)
        self.z = x + (self.c @ w["attn_ow"].T + w["attn_ob"]) * drops[1]
        self.y1, self.xhat1, self.rstd1 = norm(self.z, w["attn_nw"], w["attn_nb"], self.eps)
        self.h = self.y1 @ w["inter_w"].T + w["inter_b"]
        self.f = gelu(self.h, self.form)
        last = (self.f @ w["output_w"].T + w["output_b"]) * drops[2]
        if self.pre:
            return self.z + last
        out, self.xhat0, self.rstd0 = norm(self.y1 + last, w["norm_w"], w["norm_b"], self.eps)
        return out

    def backward(self, dout: np.ndarray) -> Tuple[np.ndarray, Dict[str, np.ndarray]]:
        w, g = self.w, {}

        def linear(dy: np.ndarray, x: np.ndarray, name: str, bias: str) -> np.ndarray:
            g[name] = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
            g[bias] = dy.sum((0, 1))
            return dy @ w[name]

        dt = dout
        if not self.pre:
            dt, g["norm_w"], g["norm_b"] = norm_back(dout, self.xhat0, self.rstd0, w["norm_w"])
        df = linear(dt * self.drops[2], self.f, "output_w", "output_b")
        dy1 = linear(df * gelu_slope(self.h, self.form), self.y1, "inter_w", "inter_b")
        dy1 = dy1 if self.pre else dy1 + dt
        dz, g["attn_nw"], g["attn_nb"] = norm_back(dy1, self.xhat1, self.rstd1, w["attn_nw"])
        dz = dz + dout if self.pre else dz
        dc = self._split(linear(dz * self.drops[1], self.c, "attn_ow", "attn_ob"))
        dv = (self.p * self.drops[0]).transpose(0, 1, 3, 2) @ dc
        dp = dc @ self.v.transpose(0, 1, 3, 2) * self.drops[0]
        ds = self.p * (dp - (dp * self.p).sum(-1, keepdims=True))
        dq, dk = ds @ self.k * self.scale, ds.transpose(0, 1, 3, 2) @ self.q * self.scale
        dqkv = np.concatenate([self._join(part) for part in (dq, dk, dv)], -1)
        dy0 = linear(dqkv, self.y0, "attn_qkvw", "attn_qkvb")
        if not self.pre:
            return dy0 + dz, g
        dx, g["norm_w"], g["norm_b"] = norm_back(dy0, self.xhat0, self.rstd0, w["norm_w"])
        return dx + dz, g
