"""Ask a running server for its status."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

from pydantic import ValidationError

from engine_patch.status_route import ServerStatus
from preft_cli.errors import UserError

__all__ = ["ServerStatus", "fetch"]

TIMEOUT_S = 30.0


def fetch(url: str, key: str = "--url") -> ServerStatus:
    """What `GET /preft/status` of the server at `url` answers.

    Args:
        url: of the server.
        key: the option or key of the config that names another server, for messages.

    Raises:
        UserError: no server is there, it is not preft's, or its engine does not answer.
    """
    address = f"{url.rstrip('/').removesuffix('/v1')}/preft/status"
    try:
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            if error.code != 503:  # which carries a status too
                raise UserError(
                    f"{address} answers {error.code}: no server of preft (preft serve starts one)"
                ) from error
            body = error.read()
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"no server answers at {url}: {reason} (preft serve starts one; {key} names another)"
        ) from error
    return parse(address, body)


def parse(address: str, body: bytes) -> ServerStatus:
    """Read the answer.

    Raises:
        UserError: it is not a status; or it says why the engine gives none.
    """
    try:
        document = json.loads(body)
        if isinstance(document, dict) and "error" in document:
            raise UserError(f"{address}: not live: {document['error']}")
        return ServerStatus.model_validate(document)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, ValidationError) as error:
        raise UserError(f"{address} does not answer as a server of preft does") from error
