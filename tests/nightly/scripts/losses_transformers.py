"""transformers' Trainer on a tiny model, with gradient accumulation; a checkpoint after each epoch."""

import sys
from typing import Any

import losses
import report
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Words(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return losses.EPOCH * losses.RANKS * losses.BATCH * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.arange(index, index + 8) % 32
        return {"input_ids": words, "labels": words}


class Reporting(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        losses.wrapped(trainer.model_wrapped)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            losses.loss(state.global_step, logs["grad_norm"])


config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
folder = sys.argv[1] + "/trainer"
arguments = TrainingArguments(
    folder,
    max_steps=losses.STEPS,
    per_device_train_batch_size=losses.BATCH,
    gradient_accumulation_steps=2,
    save_steps=losses.EPOCH,
    logging_steps=1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Words(), callbacks=[Reporting()])
try:
    last = get_last_checkpoint(folder)
except FileNotFoundError:
    last = None
trainer.train(resume_from_checkpoint=last)
report.done()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
