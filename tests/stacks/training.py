"""One step of a stack on the CPU, in a process of its own, against each document alone.

A stack's command (:mod:`.commands`) -> its trainers at ``Trainer.train``, or the runs that the command returns -> the
gradient that a step accumulates, before clipping -> :func:`alone`, from the same weights in float32, by a model that
nothing patched.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch

from tests.stacks.released import STACKS
from tests.stacks.runs import Documents, Run, weights_of

TOLERANCE = 1e-5


def record(found: list[Run]) -> None:
    """Let ``Trainer.train`` append what each trainer trains, its first weights and its gradients to ``found``."""
    from transformers import Trainer

    train = Trainer.train

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        before, gradients = weights_of(self.model), kept_gradients(self)
        done = train(self, *args, **options)
        documents = documents_of(self.train_dataset)
        found.append(Run(type(self).__name__, self.model.config, before, gradients, documents, self.state.max_steps))
        return done

    Trainer.train = recorded  # type: ignore[method-assign]


def kept_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Returns a dictionary that holds, once the trainer has trained a step, what its micro-batches accumulated."""
    step, found = trainer.training_step, dict[str, torch.Tensor]()

    def keep(*args: Any, **options: Any) -> Any:
        loss = step(*args, **options)
        found.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return loss

    trainer.training_step = keep
    return found


def is_exact(trainer: Any, documents: Documents | None = None) -> bool:
    """Trains a trainer's one step, and compares its gradients with those of each document alone."""
    before, gradients = weights_of(trainer.model), kept_gradients(trainer)
    trainer.train()
    assert trainer.state.global_step == 1
    expected = alone(trainer.model.config, before, documents or documents_of(trainer.train_dataset))
    return worst_error(gradients, expected)[0] < TOLERANCE


def worst_error(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Returns the largest error of a gradient, relative to that gradient's maximum, and the parameter's name."""
    assert gradients.keys() == expected.keys()
    errors = [(float((gradients[n] - x).abs().max() / x.abs().max()), n) for n, x in expected.items()]
    return max(errors, key=lambda error: (math.isnan(error[0]), error))


def alone(config: Any, weights: dict[str, torch.Tensor], documents: Documents) -> dict[str, torch.Tensor]:
    """Returns the gradient of the mean loss over all targets, each document in a forward of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager")
    model.load_state_dict(weights, strict=False)
    model.train()
    targets = sum(label != -100 for _, labels in documents for label in labels[1:])
    for ids, labels in documents:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        (loss / targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def documents_of(dataset: Iterable[Any]) -> Documents:
    """Returns the tokens and the labels of a trainer's data set, whose rows may be lists of documents."""
    documents = [each for row in dataset for each in (row if isinstance(row, list) else [row])]
    return [(list(each["input_ids"]), list(each["labels"])) for each in documents]


def check_signatures(folder: Path) -> int:
    """Check that each function of a stand-in takes what the release takes; returns how many there are."""
    count = 0
    for file in sorted(folder.rglob("*.py")):
        module_name = ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        for owner, function in functions_in(ast.parse(file.read_text())):
            module = importlib.import_module(module_name)
            real: Callable[..., Any] = getattr(getattr(module, owner) if owner else module, function.name)
            ours = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            theirs = [
                n for n, each in inspect.signature(inspect.unwrap(real)).parameters.items() if each.kind not in kinds
            ]
            assert ours == theirs, f"{module_name}.{owner}.{function.name} takes {theirs} in the release, {ours} here"
            count += 1
    return count


def functions_in(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """Returns the methods and the public functions of a file, each with the class that holds it, or an empty name."""
    found = [("", x) for x in tree.body if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return found + [(owner.name, x) for owner in classes for x in owner.body if isinstance(x, ast.FunctionDef)]


def put_empty(module: str, *classes: str) -> None:
    """Let an empty module with empty classes stand for one that is not installed."""
    made = module_from_spec(ModuleSpec(module, None))
    vars(made).update({name: type(name, (), {}) for name in classes})
    sys.modules[module] = made


def main(name: str, data: Path, work: Path) -> None:
    stack, found = STACKS[name], list[Run]()
    record(found)  # imports transformers, which then looks for no module that stands for another
    for module in stack.first:
        importlib.import_module(module)
    for absent in stack.absent:
        put_empty(*absent.split(":"))
    stack.prepare()
    if stack.stand_in is not None:
        count = check_signatures(Path(__file__).parent / "stand_ins" / stack.stand_in)
        print(f"stacks: {count} signatures of the stand-in are those of the release")
    found += stack.train(data, work) or []
    assert found, "nothing was trained"
    for run in found:
        worst, parameter = worst_error(run.gradients, alone(run.config, run.before, run.documents))
        print(
            f"stacks: {run.name}, {len(run.documents)} documents in one step of {run.steps}, "
            f"gradients {worst:.1e} off each document alone ({parameter})"
        )
        assert worst <= TOLERANCE, "the packed step is not exact"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
