"""Do extra tokens at the end of the prompt help a prefill-only adapter? `python -m tests.benchmarks.bench_extra_tokens`.

They cost one longer prompt and nothing in decode, and the adapter acts on them as on all of the prompt. `fixed`: tokens that the
data never uses, with the embeddings of the base model. `trained`: their embeddings are trained with the adapter. They follow
the generation prompt, right before the completion.

For each kind and number the learning rate with the lowest mean validation loss over the seeds counts, as in a sweep with
`--choose train.learning_rate`. The serving side does not exist: this tells whether it would be worth it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from preft_cli.config.load import load
from preft_cli.config.schema import PreftConfig
from preft_cli.data.tokenise import TokenisedRows
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training import session
from preft_cli.training.prepare import Prepared, prepare
from preft_cli.training.run import train
from tests.benchmarks.common import about, say, spread, write

KINDS = ("fixed", "trained")


def unused_ids(prepared: Prepared, count: int) -> list[int]:
    """Ids of special tokens that no row has."""
    splits = [prepared.train, prepared.validation, prepared.held_out]
    used = {token for split in splits if split for row in split.rows for token in row.prompt_ids + row.completion_ids}
    free = [token for token in sorted(prepared.tokenizer.added_tokens_decoder) if token not in used]
    if len(free) < count:
        raise SystemExit(f"the tokenizer has {len(free)} special tokens that the data does not use; {count} are wanted")
    return free[:count]


def with_extra(prepared: Prepared, extra: list[int]) -> Prepared:
    """The same rows, each prompt with `extra` at its end."""

    def longer(split: TokenisedRows) -> TokenisedRows:
        return replace(split, rows=[replace(row, prompt_ids=row.prompt_ids + extra) for row in split.rows])

    return replace(
        prepared,
        train=longer(prepared.train),
        validation=prepared.validation and longer(prepared.validation),
        held_out=prepared.held_out and longer(prepared.held_out),
    )


@contextmanager
def trained_embeddings(extra: list[int]) -> Iterator[None]:
    """Sessions begun inside of this block train the embeddings of `extra` too, from what they are on."""

    class WithEmbeddings(AdaptedModel):
        def __init__(self, base: Any, *rest: Any) -> None:
            super().__init__(base, *rest)
            embedding = base.get_input_embeddings()
            vectors = nn.Parameter(embedding.weight.detach()[extra].float().clone())  # [extra, hidden]
            self.model.register_parameter("extra_prompt_tokens", vectors)

            def put(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
                ids_BT = args[0]
                for token, vector in zip(extra, vectors.to(output.dtype), strict=True):
                    output = torch.where((ids_BT == token)[..., None], vector, output)
                return output

            embedding.register_forward_hook(put)

    with mock.patch.object(session, "AdaptedModel", WithEmbeddings):
        yield


def measure(
    config: PreftConfig, root: Path, kind: str, count: int, seeds: list[int], rates: list[float]
) -> dict[str, Any]:
    """Mean losses of one kind and number, at the learning rate that the validation rows choose."""
    prepared = prepare(config, root)
    extra = unused_ids(prepared, count)
    prepared = with_extra(prepared, extra)
    tried = {}
    for rate in rates:
        losses = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder, trained_embeddings(extra if kind == "trained" else []):
                section = config.train.model_copy(update={"learning_rate": rate, "output_dir": Path(folder) / "run"})
                project = config.project.model_copy(update={"seed": seed})
                result = train(
                    config.model_copy(update={"train": section, "project": project}), root, prepared=prepared
                )
            if result.validation is None or result.held_out is None:
                raise SystemExit("set train.validation_file and eval.file")
            losses.append((result.validation.adapter, result.held_out.adapter))
            say(f"{kind} {count}, learning rate {rate:g}, seed {seed}: held-out {losses[-1][1]:.4f}")
        tried[rate] = losses
    best = min(tried, key=lambda rate: statistics.mean(validation for validation, _ in tried[rate]))
    return {
        "kind": kind,
        "extra_tokens": count,
        "learning_rate": best,
        "held_out": spread([held_out for _, held_out in tried[best]])
        | {"mean": statistics.mean(held_out for _, held_out in tried[best])},
        "tried": {f"{rate:g}": losses for rate, losses in tried.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/sweeps/wordnet.yaml"))
    parser.add_argument("--set", action="append", default=[], help="as of preft train")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[0, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 3e-3])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    loaded = load(arguments.config, arguments.set)
    cases = [
        (kind, count) for kind in arguments.kinds for count in arguments.tokens if count or kind == arguments.kinds[0]
    ]
    found = [measure(loaded.config, loaded.root, *case, arguments.seeds, arguments.rates) for case in cases]
    settings = {name: str(value) for name, value in vars(arguments).items() if name != "out"}
    write(arguments.out, about("extra_tokens", **settings) | {"results": found})


if __name__ == "__main__":
    main()
