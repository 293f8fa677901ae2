"""The secret of a run, which its ranks prove to each other over TCP, and whether they encrypt what they send."""

from __future__ import annotations

import os
import secrets
import stat
from typing import Optional, Tuple


def check_secret(source: str, secret: str) -> str:
    """Checks a secret's length and characters. An empty secret would be none: every user of this machine could join."""
    if not 16 <= len(secret) <= 1024 or not secret.isascii() or not secret.isprintable():
        raise ValueError(f"{source}: the secret has {len(secret)} characters, must have 16 to 1024, of ASCII and "
                         "printable")
    return secret


def read_secret(path: str) -> str:
    """Reads a secret from a file, which other users must not be able to read."""
    with open(path, encoding="latin-1") as file:  # decodes any bytes; check_secret() refuses bad ones
        of = os.fstat(file.fileno())
        if of.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path}: user {of.st_uid} owns the file and knows the secret; must be user "
                                  f"{os.geteuid()}, or root")
        if of.st_mode & 0o077:
            raise PermissionError(f"{path}: mode {stat.S_IMODE(of.st_mode):04o} lets other users read the secret; "
                                  "must be 0600")
        return check_secret(path, file.read().strip())


def make_secret(path: str) -> bool:
    """Makes the file with a new random secret, whole or not at all. Returns False if the file exists."""
    part = f"{path}.{secrets.token_hex(8)}.part"  # launchers on several machines may have equal process ids
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, secrets.token_hex(32).encode() + b"\n")
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        os.close(file)
        os.unlink(part)
    return True


def run_secret(path: Optional[str]) -> Tuple[str, bool]:
    """A launcher's secret, and whether this launcher made the file."""
    if path is not None:
        made = not os.path.exists(path) and make_secret(path)
        return read_secret(path), made
    secret = environment_secret()
    if secret is None:
        raise ValueError("several machines need a secret, or any machine could join: --secret-file FILE, LIBDC_SECRET "
                         "or LIBDC_SECRET_FILE, the same on all")
    return secret, False


def environment_secret() -> Optional[str]:
    """LIBDC_SECRET, or the content of the file LIBDC_SECRET_FILE."""
    secret, path = os.environ.get("LIBDC_SECRET"), os.environ.get("LIBDC_SECRET_FILE")
    if secret:
        return check_secret("LIBDC_SECRET", secret)
    return read_secret(path) if path else None


def environment_tls() -> bool:
    """LIBDC_TLS."""
    value = os.environ.get("LIBDC_TLS") or "0"
    if value not in ("0", "1"):
        raise RuntimeError(f"LIBDC_TLS={value}: must be 0 or 1")
    return value == "1"
