"""All checks in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from preft_cli import __version__
from preft_cli.config.schema import PreftConfig
from preft_cli.doctor import checks, facts
from preft_cli.doctor.base_model import check_base_model
from preft_cli.doctor.checks import Check


class Diagnosis(BaseModel):
    """What `preft doctor --json` prints."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    preft: str = __version__
    checks: list[Check]

    @property
    def failed(self) -> list[Check]:
        """The checks without which preft does not work."""
        return [check for check in self.checks if check.status == "failed"]


def diagnose(config: PreftConfig, root: Path) -> Iterator[Check]:
    """Yield each check as it is done; importing torch takes a few seconds."""
    from preft_cli.models.cache import cache_dir

    yield checks.check_python()
    torch = facts.torch()
    yield checks.check_torch(torch)
    yield checks.check_torch_companions()
    yield checks.check_training()
    yield checks.check_vllm()
    yield checks.check_plugin()
    yield checks.check_gpu(torch)
    yield checks.check_memory()
    yield checks.check_disk("disk, project", root)
    yield checks.check_disk("disk, model cache", cache_dir())
    yield check_base_model(config.model.base, root)
