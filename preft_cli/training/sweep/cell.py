"""One cell of a sweep, in this process: its run, and what is kept of it. Data are read once for the cells that share them."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.curve import curve_of
from preft_cli.rl.result import RlResult
from preft_cli.training.interrupt import InterruptedRunError
from preft_cli.training.metrics import Metrics
from preft_cli.training.result import TrainResult
from preft_cli.training.sweep.folders import folder_of
from preft_cli.training.sweep.grid import Cell
from preft_cli.training.sweep.result import CellResult

# What rows and base model do not depend on. Whatever is not named here counts as if they did.
_FREE = {
    "adapter": {
        "name",
        "method",
        "rank",
        "alpha",
        "dropout",
        "use_rslora",
        "target_modules",
        "layers",
        "direft_rank",
        "orthogonal",
    },
    "train": {
        "output_dir",
        "learning_rate",
        "warmup_ratio",
        "weight_decay",
        "max_grad_norm",
        "epochs",
        "max_steps",
        "dtype",
        "batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "packing",
        "share_prompts",
        "padding_side",
        "num_processes",
        "parallel",
        "quantize_base",
        "log_every",
        "save_every",
        "eval_every",
        "early_stopping",
        "keep",
        "report_to",
    },
}


class Preparer:
    """Prepares cells; rows are read and tokenised once for all that share them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._prepared: dict[str, Any] = {}

    def __call__(self, config: PreftConfig) -> Any:
        """As `prepare(config, root)` or, for `train.task: grpo`, as `prepare_rl(config, root)`."""
        if config.train.task == "grpo":
            from preft_cli.rl.prepare import prepare_rl

            # Problems are few and short: each cell reads its own, and nothing is held for hundreds of cells.
            return prepare_rl(config, self._root)
        from preft_cli.training.prepare import prepare, prepare_again

        key = rows_key(config)
        if key in self._prepared:
            return prepare_again(self._prepared[key], config)
        self._prepared[key] = prepare(config, self._root)
        return self._prepared[key]


def rows_key(config: PreftConfig) -> str:
    """Equal for configs with the same rows on the same base model."""
    dumped = config.model_dump(mode="json", include={"model", "adapter", "train", "eval"})
    kept = {
        section: {key: value for key, value in values.items() if key not in _FREE.get(section, ())}
        for section, values in dumped.items()
    }
    return json.dumps(kept, sort_keys=True)


def run_cell(cell: Cell, root: Path, prepare: Preparer, *, resume: bool) -> CellResult:
    """Train the cell, from its last checkpoint if `resume` and there is one; what fails becomes its `error`.

    Raises:
        InterruptedRunError: Ctrl-C; a checkpoint has been saved.
        ModuleNotFoundError: it concerns all cells, and the caller names the extra to install.
    """
    from preft_cli.training.run import train

    try:
        going_on = resume and folder_of(cell, root).in_use()
        return done(cell, train(cell.config, root, resume=going_on, prepared=prepare(cell.config)), root)
    except UserError as error:
        if isinstance(error.__cause__, InterruptedRunError):
            raise error.__cause__ from None
        return failed(cell, str(error))
    except ModuleNotFoundError:
        raise
    except Exception as bug:  # the machine's memory, a full disk: the other cells may still fit
        return failed(cell, _reason(bug))
    finally:
        _free_memory()


def _reason(error: Exception) -> str:
    """What a person can do about an error that is no `UserError`."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return "there was not enough memory; lower --jobs or train.batch_size"
    if isinstance(error, OSError):
        return str(error)
    return f"internal error: {type(error).__name__}: {error}; please report it"


def _free_memory() -> None:
    """Before the next cell loads its model: the trainer and its hooks refer to each other."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def done(cell: Cell, result: TrainResult | RlResult, root: Path) -> CellResult:
    """What is kept of a finished run."""
    known: dict[str, object] = {}
    if isinstance(result, RlResult):
        known["curve"] = curve_of(Metrics(folder_of(cell, root).metrics).rows())
    else:
        known |= {"validation": result.validation, "train_loss": result.train_loss}
        losses = [loss.adapter for loss in (result.held_out, result.validation) if loss]
        if not all(map(math.isfinite, losses)):
            return failed(cell, "its loss on held-out rows is not a finite number")
    return _new(
        cell,
        held_out=result.held_out,
        trainable_parameters=result.trainable_parameters,
        steps=result.steps,
        seconds=result.seconds,
        tokens_per_s=result.tokens_per_s,
        device=result.device,
        dtype=result.dtype,
        git_commit=result.git_commit,
        **known,
    )


def failed(cell: Cell, error: str) -> CellResult:
    """A run that was not measured, and why."""
    return _new(cell, error=error)


def _new(cell: Cell, **known: object) -> CellResult:
    config = cell.config
    about = {"method": config.adapter.method, "rank": config.adapter.rank, "seed": config.project.seed}
    return CellResult.model_validate({"name": cell.name, "settings": cell.settings, **about, **known})
