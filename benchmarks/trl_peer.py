"""TRL's `GRPOTrainer` set up as the other side of a benchmark, and its step in seconds.

`bf16=True` over float32 weights: accelerate runs every forward under bfloat16 autocast, generation included; AdamW (fused) holds float32 moments. All
weights are trained, KL off, no second forward (`num_iterations=1`), gradient checkpointing off unless asked for, since it costs time.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import ATTEMPTS, installed

WHY_NOT = None if installed("trl") else "TRL is not installed: pip install -c constraints/cpu.txt trl==1.16.0, or make bench"


def trainer(
    module: Path,
    scratch: Path,
    rows: Sequence[dict[str, Any]],
    reward: Callable[..., list[float]],
    *,
    prompts_per_step: int,
    max_new_tokens: int,
    max_steps: int,
    rows_per_forward: int,
    learning_rate: float = 1e-6,
    seed: int = 0,
    checkpointing: bool = False,
    shuffle: bool = False,
    rollout: Callable[..., dict[str, Any]] | None = None,
    stop_ids: Sequence[int] = (),
) -> Any:
    """A trainer whose step takes `prompts_per_step` of `rows` with `ATTEMPTS` completions each; `rollout` gives fixed completions instead of sampled ones."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "TRL currently supports vLLM")  # which it does not use here
    warnings.filterwarnings("ignore", "You are using 'rollout_func'")
    model = AutoModelForCausalLM.from_pretrained(module, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(module, local_files_only=True, padding_side="left")
    if stop_ids:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stop_ids]
    config = _config(
        output_dir=str(scratch),
        max_completion_length=max_new_tokens,
        per_device_train_batch_size=rows_per_forward,
        gradient_accumulation_steps=prompts_per_step * ATTEMPTS // rows_per_forward,
        gradient_checkpointing=checkpointing,
        learning_rate=learning_rate,
        max_steps=max_steps,
        shuffle_dataset=shuffle,
        seed=seed,
    )
    return _timed_trainer()(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(list(rows)), processing_class=tokenizer, rollout_func=rollout
    )


def _config(**settings: Any) -> Any:
    """What every comparison has in common: all weights in bfloat16 autocast, plain GRPO, nothing written."""
    import torch
    from trl import GRPOConfig

    return GRPOConfig(
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        beta=0.0,
        num_generations=ATTEMPTS,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        temperature=1.0,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )


def _timed_trainer() -> type:
    from trl import GRPOTrainer

    class Timed(GRPOTrainer):
        """Adds up the seconds inside the trainer's own generation."""

        generating = 0.0

        def _generate(self, prompts: list) -> Any:
            began = time.perf_counter()
            try:
                return super()._generate(prompts)
            finally:
                self.generating += time.perf_counter() - began

    return Timed


def train(made: Any, after_step: Callable[[float, float], bool]) -> None:
    """Run `made.train()`; `after_step(seconds, of them generating)` is called between two steps, outside their time, and says whether to stop."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            made.generating, self.began = 0.0, time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= after_step(time.perf_counter() - self.began, made.generating)

    made.add_callback(Clock())
    made.train()
