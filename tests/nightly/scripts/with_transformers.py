"""transformers' Trainer on a tiny model, resumed from its newest checkpoint; on GPUs with TEST_DEVICE=cuda."""

import os
import sys

import report
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

DEVICE = os.environ.get("TEST_DEVICE", "cpu")


class Steps(TrainerCallback):
    def on_train_begin(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        device = next(model.parameters()).device
        report.say(f"DEVICE {device} {torch.distributed.get_backend()}")
        assert device.type == DEVICE, device

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        report.step(state.global_step)  # type: ignore[attr-defined]


class Words(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.arange(index, index + 8) % 32
        return {"input_ids": words, "labels": words}


config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
folder = sys.argv[1] + "/trainer"
arguments = TrainingArguments(
    folder,
    max_steps=report.STEPS,
    save_steps=5,
    use_cpu=DEVICE == "cpu",
    report_to=[],
    disable_tqdm=True,
    logging_steps=20,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Words(), callbacks=[Steps()])
last = None
try:
    last = get_last_checkpoint(folder)
except FileNotFoundError:
    pass
trainer.train(resume_from_checkpoint=last)
report.done()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
