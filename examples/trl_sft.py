"""TRL's SFTTrainer with LoRA on completions: the rows that TRL packs, trained without contamination by one line.

Run it: python examples/trl_sft.py
Needs: pip install 'crosspack[hf]'
"""

from tempfile import TemporaryDirectory

try:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    import crosspack
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'crosspack[hf]'") from None

words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(100))])}
inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
counting = [
    {"prompt": f"{n} {n + 1} ", "completion": " ".join(map(str, range(n + 2, n + 3 + n % 9)))} for n in range(64)
]
model = GptOssForCausalLM(  # a family that TRL's packing trains contaminated without an error
    GptOssConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
    )
)

with TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, packing=True, max_length=64, max_steps=12, per_device_train_batch_size=4, learning_rate=0.05,
        router_aux_loss_coef=0.0, gradient_checkpointing=False, logging_steps=3, report_to=[], save_strategy="no",
        use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj"])
    data = Dataset.from_list(counting)
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    print(f"as it is: {crosspack.audit(trainer).verdict}")

    crosspack.enable_packing(trainer)  # the line
    print(f"packed:   {crosspack.audit(trainer).verdict}")
    trainer.train()
    print(crosspack.explain(trainer))  # what of the step is fast here, and which metrics are left out
