"""The secret in ``--token-file``."""

from __future__ import annotations

from elastirun.cli.given_options import GivenOptions
from elastirun.cli.parse import quote
from elastirun.errors import UsageError
from elastirun.secret_files import read_secret_file

TOKEN_BYTES = range(16, 4097)  # length of a secret, in bytes: short enough to read whole, too long to guess


def read_token(options: GivenOptions) -> bytes | None:
    """Return the secret in ``--token-file``, without the white space around it. It is never shown."""
    path, label = options.text("token_file"), options.label("token_file")
    if path is None:
        return None
    try:
        file = read_secret_file(path, TOKEN_BYTES.stop + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise UsageError(f"{label}: {quote(path)} cannot be read ({reason}); give a file with a secret") from None
    token = file.content.strip()
    if len(token) not in TOKEN_BYTES:
        size = "too short" if len(token) < TOKEN_BYTES.start else "too long"
        limits = f"{TOKEN_BYTES.start} to {TOKEN_BYTES.stop - 1} bytes"
        raise UsageError(f"{label}: the secret in {quote(path)} is {size}; give one of {limits}, such as openssl rand -hex 32 makes")
    if file.advice:
        options.warn(f"{label}: {quote(path)}: {file.advice}")
    return token
