"""A Trainer of the Hugging Face kind over a tiny Llama."""

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from support.models import build


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def make_trainer(folder, callback, **arguments):
    settings = dict(max_steps=6, logging_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True)
    settings |= dict(save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, learning_rate=1e-3)
    return Trainer(
        model=build("llama", "sdpa"),
        args=TrainingArguments(output_dir=str(folder), **{**settings, **arguments}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[callback],
    )


def arguments_of_rank_one(**arguments):
    """Those of the second process, the first of its node."""
    made = TrainingArguments(report_to=[], use_cpu=True, **arguments)
    made.__class__ = type("OnRankOne", (TrainingArguments,), {"process_index": 1, "local_process_index": 0})
    return made
