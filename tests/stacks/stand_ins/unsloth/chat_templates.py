"""Masks prompts in the data of a built trainer, and gives it a collator that pads labels."""

from transformers import DataCollatorForSeq2Seq


def train_on_responses_only(
    trainer,
    instruction_part=None,
    response_part=None,
    force_match=True,
    tokenizer=None,
    return_function=False,
    num_proc=None,
    last_response_only=False,
    mask_out_tokens=None,
):
    tokenizer = tokenizer or trainer.processing_class
    marks = [tokenizer(part, add_special_tokens=False).input_ids for part in (instruction_part, response_part)]

    def masked(examples):
        return {"labels": [_labels(tokens, *marks, tokenizer.eos_token_id) for tokens in examples["input_ids"]]}

    trainer.train_dataset = trainer.train_dataset.map(masked, batched=True)
    if not (trainer.args.packing or trainer.args.padding_free):
        trainer.data_collator = DataCollatorForSeq2Seq(tokenizer=tokenizer)
    return trainer


def _labels(tokens, instruction, response, end):
    labels, trained = [], False
    for place, token in enumerate(tokens):
        trained = trained and tokens[place : place + len(instruction)] != instruction
        labels.append(token if trained else -100)
        before = tokens[max(place + 1 - len(response), 0) : place + 1]
        trained = (trained or before == response) and token != end
    return labels
