"""A plugin for ms-swift: ``--packing true`` and ``--padding_free true`` keep documents apart in every model.

A file of ``--external_plugins`` calls :func:`configure` -> ms-swift packs its documents by itself and builds
:class:`PackedSeq2SeqTrainer` in place of its own trainer -> ``enable_packing`` patches the model, and carries the
boundaries of the rows, which ms-swift marks by positions alone.
"""

from __future__ import annotations

from typing import Any

from swift.arguments import SftArguments
from swift.trainers import Seq2SeqTrainer, TrainerFactory

from crosspack.integrations.options import pack_trainer, read_options, refuse
from packing_core.errors import UnsupportedError

_CUT = {"sequence_parallel_size": "cuts rows, and documents with them: leave it out"}
_REFUSED = {
    "use_logits_to_keep": "gives the model labels of some tokens alone, which tell no documents apart: leave it out",
    "predict_with_generate": "evaluates by generating, from other batches than it trains on: leave it out",
}
_options: dict[str, Any] = {}


class PackedSeq2SeqTrainer(Seq2SeqTrainer):
    """ms-swift's trainer for language models, packed when it is built."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        trainer: Any = self
        if not trainer.template.padding_free:
            raise UnsupportedError(
                "ms-swift pads each document of this run: pass --packing true, or --padding_free true to join the "
                "documents of each batch"
            )
        if getattr(trainer.args, "sequence_parallel_size", 1) > 1:
            refuse(_CUT, vars(trainer.args), "ms-swift")
        refuse(_REFUSED, vars(trainer.args), "ms-swift")
        trainer.args.use_logits_to_keep = False  # None would let ms-swift choose it
        pack_trainer(trainer, _options)


def configure(**options: Any) -> None:
    """Let ms-swift train language models by :class:`PackedSeq2SeqTrainer`.

    Args:
        options: arguments of ``enable_packing``, and ``audit=True`` to compare a batch with each document
            alone. Rows are ms-swift's, so ``capacity`` has no effect, and is refused.

    Raises:
        PackingError: an option is none.
    """
    _options.update(read_options(options, "configure()"))
    TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{__name__}.{PackedSeq2SeqTrainer.__name__}"
    SftArguments._check_padding_free = _any_attention  # it asks for flash attention, and patched models need none


def _any_attention(arguments: Any) -> None:
    """Replaces a check of ms-swift's arguments; ``crosspack.patch`` checks what the model runs on."""
    joined = arguments.padding_free or arguments.packing
    if joined and TrainerFactory.get_trainer_cls(arguments) is not PackedSeq2SeqTrainer:
        kind = getattr(arguments, "rlhf_type", arguments.task_type)
        raise UnsupportedError(
            f"ms-swift trains {kind} by a trainer that this plugin does not patch, and documents that it joins would "
            "see each other in some models: leave out --padding_free and --packing, or the plugin"
        )
    arguments.padding_free = joined  # which the check sets as well
