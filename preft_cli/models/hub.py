"""Models from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from preft_cli.errors import UserError

# Weights in other forms would be downloaded for nothing, and pickles are never loaded.
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


def hub_folder(repo_id: str, hint: str = "") -> Path:
    """The local snapshot of `repo_id`, downloaded if need be. `hint` ends the error when there is no such model.

    Raises:
        UserError: unknown or gated model, or no connection and no copy in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=PATTERNS))
    except GatedRepoError as error:
        raise UserError(
            f"model.base: {repo_id} is gated on the Hub. Accept its terms on https://huggingface.co/{repo_id} and "
            "log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(f"model.base: there is no model {repo_id} on the Hub, or it is private.{hint}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"model.base: {repo_id} is no local folder and not in the Hub's cache, and the Hub cannot be reached. "
            f"Connect to the network, or give a folder that holds the model.{hint}"
        ) from error
