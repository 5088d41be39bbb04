"""A plugin for axolotl: its configuration trains packed documents without contamination.

``plugins: [crosspack.integrations.axolotl.CrosspackPlugin]`` -> :meth:`CrosspackPlugin.register` takes axolotl's own
packing over -> axolotl loads its data, one example per document, and builds its trainer -> ``enable_packing``.
Preference and reward trainers keep their batches, and their forwards run without padding.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin, PluginManager
from pydantic import BaseModel
from transformers import Trainer

from crosspack.integrations.options import pack_trainer, read_options, refuse
from packing_core.errors import UnsupportedError

_PLANNED = "says how its sampler plans, and rows are planned over the whole data set here: leave it out"
_REFUSED = {
    "sample_packing_group_size": _PLANNED,
    "sample_packing_eff_est": _PLANNED,
    "sample_packing_mp_start_method": _PLANNED,
    "multipack_real_batches": "joins the rows of a batch into one, and here they stay rows: leave it out",
    "batch_flattening": "packs the documents of each batch, and the whole data set is packed here: leave it out",
    "pretraining_dataset": "cuts documents into rows before the trainer sees them: give the documents as datasets",
    "streaming": "cuts documents into rows before the trainer sees them: leave it out",
    "use_pose": "gives documents positions with gaps, which packing would restart: leave it out",
    "trainer_cls": "has a dataloader of its own: leave out either that or the plugin",
    "process_reward_model": "scores steps inside a document, which packing does not know: leave out the plugin",
}
_CUT = dict.fromkeys(
    ("context_parallel_size", "sequence_parallel_degree"), "cuts rows, and documents with them: leave it out"
)
_SHARE = 0.03  # of the steps that axolotl warms up for, unless told otherwise


class CrosspackArgs(BaseModel):
    """Adds the options of the plugin to axolotl's configuration.

    Attributes:
        crosspack: arguments of ``enable_packing``, and ``audit``: true to audit the trainer before its first step.
    """

    crosspack: dict[str, Any] | None = None


class PackedTrainer(AxolotlTrainer):
    """axolotl's trainer for language models, with the samplers and the dataloader of transformers.

    axolotl's own serve its multipack, and ``enable_packing`` packs a whole data set only where it makes the dataloader.
    """

    _get_train_sampler = Trainer._get_train_sampler
    _get_eval_sampler = Trainer._get_eval_sampler
    _get_dataloader = Trainer._get_dataloader

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        # axolotl looks for num_items_in_batch in the decoder, which has no loss, and would average over micro-batches
        keywords = signature(type(model).forward).parameters.values()
        self.model_accepts_loss_kwargs = any(each.kind is each.VAR_KEYWORD for each in keywords)


class PackedTrainerWithStockLoss(PackedTrainer):
    """The same with the loss of transformers, which the fast step computes without logits."""

    compute_loss = Trainer.compute_loss


class CrosspackPlugin(BasePlugin):
    """Packs what axolotl trains; see docs/stacks.md."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}

    def register(self, cfg: dict[str, Any]) -> None:
        """Read the plugin's options, and take axolotl's packing over.

        Raises:
            UnsupportedError: an option of axolotl asks for something that packing does not follow.
        """
        if cfg.get("sample_packing") is False and not (cfg.get("rl") or cfg.get("reward_model")):
            raise UnsupportedError(
                "axolotl's sample_packing=False pads each document: leave out either that or the plugin"
            )
        self.options = read_options(cfg.get("crosspack"), "crosspack")
        refuse(_REFUSED, cfg, "axolotl")
        refuse(_CUT, {name: size for name, size in cfg.items() if size != 1}, "axolotl")
        if cfg.get("sample_packing_bin_size") is not None:
            self.options.setdefault("max_segments", cfg["sample_packing_bin_size"])
        if cfg.get("sample_packing_sequentially"):
            cfg["curriculum_sampling"] = True
        # its data would get position_ids, its loaders batches of batches, and its modeling files other attention
        cfg["sample_packing"] = cfg["eval_sample_packing"] = False

    def get_input_args(self) -> str:
        """Returns the class of the plugin's own options."""
        return f"{CrosspackArgs.__module__}.{CrosspackArgs.__qualname__}"

    def get_trainer_cls(self, cfg: Any) -> type[Trainer] | None:
        """Returns the trainer of language models; None where axolotl trains by one of TRL's.

        Raises:
            UnsupportedError: another plugin names a trainer as well, of which axolotl would take the first.
        """
        if not _packs_rows(cfg):
            return None
        for name, other in PluginManager.get_instance().plugins.items():
            if other is not self and other.get_trainer_cls(cfg) is not None:
                raise _two_trainers(name)
        adds = cfg.include_tkps or cfg.orpo_alpha or str(cfg.model_config_type).startswith("gemma4")
        return PackedTrainer if adds else PackedTrainerWithStockLoss

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Returns arguments that axolotl derived from the number of documents, and that follow from rows here."""
        if not _packs_rows(cfg):
            return {}
        found: dict[str, Any] = {"average_tokens_across_devices": True}
        if not cfg.max_steps:
            found["max_steps"] = -1
        if cfg.warmup_steps is None:
            found["warmup_steps"] = _SHARE if cfg.warmup_ratio is None else cfg.warmup_ratio
        if cfg.curriculum_sampling:
            found["train_sampling_strategy"] = "sequential"
        return found

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Pack the trainer's data, and patch its model.

        Raises:
            PackingError: as ``enable_packing``.
            UnsupportedError: another plugin's trainer was built.
        """
        if _packs_rows(cfg) and not isinstance(trainer, PackedTrainer):
            raise _two_trainers(type(trainer).__name__)
        rows = {"capacity": cfg.sequence_len} if _packs_rows(cfg) else {}
        pack_trainer(trainer, self.options, **rows)


def _two_trainers(other: str) -> UnsupportedError:
    return UnsupportedError(
        f"axolotl trains by one trainer, and {other} is another than that of packed documents: leave out its plugin, "
        "or crosspack.integrations.axolotl"
    )


def _packs_rows(cfg: Any) -> bool:
    """Returns whether axolotl trains a language model on documents, and not pairs or scored answers."""
    return not (cfg.rl or cfg.reward_model)
