"""Times TRL on the workload of workload.py; prints one JSON line.

Run by grpo_step.py, in an environment of its own.
"""
# pyright: reportMissingImports=false

import os
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
import torch
import workload
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, __version__


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        padding_side="left",
    )


def make_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=workload.VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            pad_token_id=workload.PAD_ID,
            eos_token_id=workload.EOS_ID,
            bos_token_id=workload.BOS_ID,
            tie_word_embeddings=False,
        )
    )


def main() -> None:
    options = workload.arguments(__doc__ or "")
    steps = options.steps + workload.COLD_STEPS + 1
    clock = workload.Clock()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)

    def reward(completions, completion_ids, **_):
        values = [workload.share_of_target(text) for text in completions]
        clock.step(values, sum(map(len, completion_ids)))
        return values

    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GRPOTrainer(
            model=make_model(),
            reward_funcs=reward,
            processing_class=byte_tokenizer(),
            train_dataset=Dataset.from_dict(
                {"prompt": list(workload.PROMPTS) * (steps + 2)}
            ),
            args=GRPOConfig(
                output_dir=output_dir,
                per_device_train_batch_size=workload.GROUP_SIZE * workload.NUM_PROMPTS,
                num_generations=workload.GROUP_SIZE,
                max_completion_length=workload.MAX_NEW_TOKENS,
                max_steps=steps,
                learning_rate=workload.LEARNING_RATE,
                lr_scheduler_type="constant",
                warmup_steps=0,
                beta=0.0,
                temperature=1.0,
                logging_steps=10**6,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
                seed=0,
            ),
        )
        clock.begin()
        trainer.train()
    workload.report(clock.figures(f"trl {__version__}"), options.json)


if __name__ == "__main__":
    main()
