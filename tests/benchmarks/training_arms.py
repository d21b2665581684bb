"""The trainers that `bench_training` compares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM

from preft_cli.adapters.base import BaseFacts
from preft_cli.config.schema import PreftConfig
from preft_cli.data import Row
from preft_cli.methods import parts_of
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.models import BaseModel, resolve
from preft_cli.training.arrange import pack_all, pair_cost
from preft_cli.training.collate import Collator
from preft_cli.training.device import Precision, choose_precision
from preft_cli.training.objective import Objective
from preft_cli.training.trainer import PromptTrainer, training_arguments


class Setting(NamedTuple):
    """What all arms have in common."""

    base: BaseModel
    precision: Precision
    batch_size: int
    rank: int
    limit: int
    targets: list[str]

    @classmethod
    def of(cls, model: str, dtype: str, batch_size: int, rank: int, limit: int) -> Setting:
        """Adapters on all linear layers of the model of that name."""
        base = resolve(model, Path.cwd())
        config = PreftConfig().adapter
        [lora] = parts_of("lora")
        targets = lora.targets(config, BaseFacts.of(base))
        return cls(base, choose_precision(dtype), batch_size, rank, limit, targets)

    @property
    def vocabulary(self) -> int:
        return int(self.base.hf_config.get_text_config().vocab_size)

    def load(self) -> Any:
        """The base model on its device; random weights for a shape."""
        options = {"dtype": self.precision.dtype, "attn_implementation": "sdpa"}
        if self.base.random:
            return AutoModelForCausalLM.from_config(self.base.hf_config, **options).to(self.precision.device)
        return AutoModelForCausalLM.from_pretrained(self.base.path, **options).to(self.precision.device)

    def config(self, method: str) -> PreftConfig:
        train = {"batch_size": self.batch_size, "max_length": self.limit, "log_every": 10**6, "learning_rate": 1e-4}
        return PreftConfig.model_validate(
            {"adapter": {"method": method, "rank": self.rank, "alpha": 2 * self.rank}, "train": train}
        )


def preft(method: str = "lorap", *, share: bool = True, packing: bool = False) -> Callable[..., Any]:
    """Our trainer, as `preft train` builds it."""

    def build(setting: Setting, rows: list[Row], folder: Path) -> Any:
        config = setting.config(method)
        adapted = AdaptedModel(setting.load(), config.adapter, {"lora": setting.targets})
        arguments = training_arguments(config, folder, setting.precision)
        arguments.save_strategy = "no"
        trainer = PromptTrainer(
            objective=Objective(adapted),
            share_prompts=share and not packing,
            model=adapted.model,
            args=arguments,
            data_collator=Collator(share_prompts=share, pair_cost=pair_cost(setting.base.hf_config)),
            train_dataset=pack_all(rows, setting.limit, share=share, seed=0) if packing else rows,
        )
        trainer.keep_by(lambda _: None, lambda _: None, lambda: False)
        return trainer

    return build


def trl(setting: Setting, rows: list[Row], folder: Path) -> Any:
    """TRL's trainer with PEFT's LoRA on all tokens."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    config = setting.config("lora")
    same = training_arguments(config, folder, setting.precision).to_dict()
    kept = (
        "per_device_train_batch_size", "optim", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay",
        "max_grad_norm", "seed", "bf16", "fp16", "use_cpu", "num_train_epochs", "logging_steps", "report_to",
        "disable_tqdm", "dataloader_pin_memory",
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir=str(folder),
        **{key: same[key] for key in kept},
        gradient_checkpointing=False,
        max_length=None,
        completion_only_loss=True,
        save_strategy="no",
    )
    data = Dataset.from_list(
        [
            {
                "input_ids": row.prompt_ids + row.completion_ids,
                "completion_mask": [0] * len(row.prompt_ids) + [1] * len(row.completion_ids),
            }
            for row in rows
        ]
    )
    return SFTTrainer(
        model=setting.load(),
        args=arguments,
        train_dataset=data,
        processing_class=_tokenizer(setting, PreTrainedTokenizerFast),
        peft_config=LoraConfig(
            r=setting.rank, lora_alpha=2 * setting.rank, target_modules=setting.targets, task_type="CAUSAL_LM"
        ),
    )


def _tokenizer(setting: Setting, kind: Any) -> Any:
    """The model's own, or for a random shape one that has a padding token and is never asked for more."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    if not setting.base.random:
        return AutoTokenizer.from_pretrained(setting.base.path)
    return kind(tokenizer_object=Tokenizer(models.WordLevel({"</s>": 0}, "</s>")), pad_token="</s>", eos_token="</s>")


ARMS: dict[str, Callable[..., Any]] = {
    "trl": trl,
    "preft": preft(),
    "preft-lora": preft("lora"),
    "preft-plain": preft(share=False),
    "preft-packing": preft(packing=True),
}
"""`preft-lora` acts on all tokens; `preft-plain` computes each row by itself; with packing a batch is of sequences."""
