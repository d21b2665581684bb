"""What a server must be for rollouts, found out before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.store.file import read_header
from preft_cli.console import warn
from preft_cli.errors import UserError
from preft_cli.rl.rollouts.api import Api

if TYPE_CHECKING:
    from preft_cli.serving.status import ServerStatus

LOGPROBS_MODE = "processed_logprobs"
"""Of the distribution that tokens are drawn from: after temperature and truncation."""

SOURCE = "rollouts"
"""`meta.source` of the files that are ours to replace."""


def require_fit(url: str, status: ServerStatus, base: BaseFingerprint, trained_in: str) -> None:
    """Refuse a server whose answers would not be of the model that is trained; say what makes them less like it.

    Args:
        url: of the server.
        status: what it says of itself.
        base: the base model that is trained.
        trained_in: what the trainer computes in, such as `float32`.

    Raises:
        UserError: names what differs, and how to start the server.
    """
    if not status.live:
        raise UserError(
            f"the server at {url} is not live: some process runs without the prompt rule (see preft status --url {url})"
        )
    if difference := base.mismatch(BaseFingerprint.from_dict(status.engine.base)):
        difference = difference.replace("in the adapter", "here").replace("in the base model", "there")
        raise UserError(f"the server at {url} serves another base model than model.base: {difference}")
    wanted = {"logprobs-mode": LOGPROBS_MODE, "enable-scale-out": "true"}
    found = {"logprobs-mode": status.engine.logprobs_mode, "enable-scale-out": str(status.engine.tokens_route).lower()}
    if wrong := [f"{key} is {found[key]}" for key in wanted if found[key] != wanted[key]]:
        options = " ".join(f"--set serve.vllm_args.{key}={value}" for key, value in wanted.items())
        raise UserError(
            f"the server at {url} cannot give token ids with the log-probabilities that they were drawn with"
            f" ({', '.join(wrong)}); start it with: preft serve {options}"
        )
    if status.engine.dtype != trained_in:
        warn(
            f"the server at {url} computes in {status.engine.dtype} and the trainer in {trained_in}, so that log-probabilities "
            f"differ by far more than they must: start it with preft serve --set serve.dtype={trained_in}, or set "
            f"train.dtype={status.engine.dtype} here"
        )
    if not status.prefix_caching:
        warn(f"the server at {url} caches no prefixes: each of the answers to a prompt computes the prompt anew")


def base_name(api: Api) -> str:
    """The name under which the server answers with the base model alone.

    Raises:
        UserError: it does not say.
    """
    answer = api.get("/v1/models")
    try:
        return next(str(card["id"]) for card in answer.document["data"] if card.get("parent") is None)
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(f"{api.url}/v1/models names no base model: {answer.error}") from error


def require_ours(file: Path) -> None:
    """Refuse to write over somebody's adapter.

    Raises:
        UserError: no such folder, or a file of this name that was not written for rollouts.
    """
    if not file.parent.is_dir():
        raise UserError(
            f"train.grpo.rollout_store: {file.parent}: no such folder; it is the server's --adapters DIR", 2
        )
    if not file.exists():
        return
    try:
        source = read_header(file).meta.get("source")
    except PreftError:
        source = None
    if source != SOURCE:
        raise UserError(
            f"{file} is an adapter that was not written for rollouts, and would be replaced; choose another adapter.name,"
            " or move the file away"
        )
