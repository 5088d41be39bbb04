"""The judge: asks one backend, holds the answer against the oracle or against an earlier answer, and keeps the score.

A test states a requirement in terms of a `Judge`; no test touches a backend or a tolerance itself. Every way to fail
raises `Rejected` and names what differs, where, and by how many budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, Literal

import numpy as np

from conformance import expert_cases, oracle, scan_cases
from conformance.answers import malformed
from conformance.draws import LARGE, LossCase, OperationCase, generator, round_to, segment_ids
from conformance.oracle import Expected, Result
from packing_core import budget
from packing_core.errors import UnsupportedError
from packing_core.protocol import LEVELS, Array, Backend, Batch, Decoder, Document, segments

ORACLES: dict[str, Callable[[Any, Any], Expected]] = {
    "attention": oracle.attention,
    "rope": oracle.rope,
    "scan": oracle.scan,
    **dict.fromkeys(("delta_rule", "ssd", "convolution"), scan_cases.expected),
    "experts": expert_cases.expected,
}
RERUNS = 4


class Rejected(AssertionError):
    """The backend breaks the requirement."""


class NotDeclared(Exception):
    """The backend does not declare what the requirement needs, and refused it as it must."""


class Judge:
    """One backend before one requirement.

    Attributes:
        backend: who is judged.
        worst: the largest error over budget seen so far, at most 1 if all is well.
        atomic: whether the gradients that the requirement is about are declared to differ from run to run.
    """

    def __init__(self, backend: Backend, *, method: str, required: bool) -> None:
        self.backend = backend
        self.worst = 0.0
        self._required = required
        capabilities = backend.capabilities
        # Whether gradients differ from run to run: attention's, or those of a model.
        self.atomic = capabilities.atomic_backward or (
            capabilities.atomic_embedding and method in LEVELS["model"] + LEVELS["trainer"]
        )

    @property
    def dtype(self) -> str:
        """The dtype in which requirements about anything but dtypes are tried: the first that is declared."""
        return self.backend.capabilities.dtypes[0]

    @property
    def narrow_dtype(self) -> str:
        """The dtype of mixed precision: the first that is declared and is not float32, or bfloat16 if none is."""
        narrow = [dtype for dtype in self.backend.capabilities.dtypes if dtype != "float32"]
        return (narrow or ["bfloat16"])[0]

    @property
    def words(self) -> int:
        """The number of token ids that a model's documents are drawn from, where many matter."""
        capabilities = self.backend.capabilities
        return min(capabilities.words, 1000) if capabilities.own_model else 1000

    def promised(self, method: str, option: str) -> None:
        """Go on only if the backend has the method and declares the option, one of `PROMISES`."""
        if not self.backend.provides(method):
            raise NotDeclared(f"no {method}")
        if option not in self.backend.capabilities.options:
            raise NotDeclared(f"{option} not declared")

    # -- asking --------------------------------------------------------------------------------------------------

    def ask(
        self,
        method: str,
        *arguments: Any,
        options: Collection[str] = (),
        head_dim: int | None = None,
        **keywords: Any,
    ) -> Any:
        """Call a method of the backend, within its declared capabilities.

        Args:
            options: the declarable options that the call takes.
            head_dim: the width, where there is one.

        Raises:
            NotDeclared: the call lies outside of what is declared, and the backend refused it.
            Rejected: it was refused although declared, or served although not, or it changed an argument.
        """
        capabilities = self.backend.capabilities
        has_it = self.backend.provides(method)
        reason = capabilities.refusal(dtype=keywords.get("dtype"), options=options, head_dim=head_dim)
        if not has_it:
            reason = f"no {method}"
        elif reason and self._required:
            raise Rejected(f"a backend with {method} must serve this: {reason}")
        called = signature(getattr(Backend, method)).bind(self.backend, *arguments, **keywords).arguments
        before = {name: x.copy() for name, x in _arrays("", called)}
        try:
            answer = getattr(self.backend, method)(*arguments, **keywords)
        except UnsupportedError as refusal:
            if reason is None:
                raise Rejected(f"{method} is declared and refused: {refusal}") from refusal
            raise NotDeclared(reason) from refusal
        if reason is not None:
            raise Rejected(f"{method} returned an answer that it does not declare ({reason}): it must raise")
        changed = [name for name, x in _arrays("", called) if not np.array_equal(x, before[name], equal_nan=True)]
        self.holds(not changed, f"{method} changed its arguments in place: {', '.join(changed)}; work on a copy")
        wrong = malformed(method, answer)
        self.holds(wrong is None, f"{method} returned {wrong}; see packing_core.protocol.Backend.{method}")
        return answer

    def collate(self, documents: Sequence[Document], capacity: int) -> Batch:
        """The batch of the backend's collator, which gets room for all documents in one row if it has no capacity."""
        if "capacity" not in self.backend.capabilities.options:
            capacity = sum(len(document.input_ids) for document in documents)
        batch: Batch = self.ask("collate", documents, capacity)
        return batch

    def ask_case(
        self,
        case: OperationCase,
        dtype: str,
        changed: Mapping[str, Array | None] | None = None,
        *,
        ids: Array | None = None,
    ) -> Result:
        """Output and gradients of a case, some of whose arrays, and whose segment ids, may be exchanged."""
        arrays: dict[str, Any] = {**case.arguments(dtype), **case.options(), **(changed or {})}
        taken = case.taken(arrays)
        if case.method != "rope":  # which is told positions
            arrays["segment_ids"] = segment_ids(case.rows) if ids is None else ids
        out, gradients = as_result(self.ask(case.method, **arrays, dtype=dtype, options=taken, head_dim=case.head_dim))
        shape = case.arguments(dtype)["dout"].shape
        self.holds(out.shape == shape, f"out has shape {out.shape}, not {shape}")
        return out, gradients

    def ask_loss(self, case: LossCase, dtype: str, changed: Mapping[str, Array] | None = None) -> tuple[Result, float]:
        """The loss sum with the gradient of the logits, and the weight sum."""
        arrays: dict[str, Any] = {**case.arguments(dtype), **(changed or {})}
        taken = {"token_weights"} if case.weighted else set()
        total, weight, dlogits = self.ask(
            "loss", **arrays, segment_ids=segment_ids(case.rows), dtype=dtype, options=taken
        )
        return (np.array([total], np.float64), {"logits": np.asarray(dlogits, np.float64)}), float(weight)

    # -- against the oracle --------------------------------------------------------------------------------------

    def check(
        self, case: OperationCase, dtype: str | None = None, *, only: str | None = None, order: Literal["C", "F"] = "C"
    ) -> None:
        """Hold a case against the oracle: output and gradients, or only the one named ("q", ...; "out" of a forward
        alone). The arrays lie in memory in C's or in Fortran's ``order``."""
        dtype, case = dtype or self.dtype, case.fitted(self.backend.capabilities.head_dims)
        changed: dict[str, Any] = {"dout": None} if only == "out" else {}
        if order == "F":
            changed |= {name: np.asfortranarray(x) for name, x in case.arguments(dtype).items()}
        answer = self.ask_case(case, dtype, changed)
        self.within(answer, ORACLES[case.method](case, dtype), segment_ids(case.rows), dtype, only=only)

    def loss(self, case: LossCase, dtype: str | None = None) -> None:
        """Hold the loss sum, the weight sum and the gradient of a case against the oracle."""
        dtype = dtype or self.dtype
        answer, weight = self.ask_loss(case, dtype)
        expected, expected_weight = oracle.loss(case, dtype)
        self.equal("weight sum", np.float32(weight), np.float32(expected_weight))
        self.within(answer, expected, segment_ids(case.rows), dtype)

    def within(
        self, answer: Result, expected: Expected, ids: Array | None, dtype: str, *, only: str | None = None
    ) -> None:
        """Hold arrays within the error budget, those of shape ``[B, S, ..]`` at the real tokens.

        The floor of a gradient's budget follows the largest gradient alone: the size of a loss that is summed over a
        thousand tokens says nothing about its gradient.
        """
        results = {"out": answer[0], **answer[1]}
        exact = {"out": expected.exact[0], **expected.exact[1]}
        rounded = {"out": expected.rounded[0], **expected.rounded[1]}
        of_gradients = budget.largest(expected.exact[1].values())
        of_all = max(of_gradients, budget.largest([exact["out"]]))
        for name in exact if only is None else [only]:
            scale = of_all if name == "out" else of_gradients
            if name not in results:
                raise Rejected(f"nothing came back for {name}, only for {', '.join(answer[1])}")
            got = results[name]
            if got.shape != exact[name].shape:
                raise Rejected(f"{name} has shape {got.shape}, not {exact[name].shape}")
            over = budget.over_budget(got, exact[name], rounded[name], scale=scale, dtype=dtype)
            per_token = ids is not None and over.shape[:2] == ids.shape
            if per_token:
                over[ids == 0] = 0.0
            worst = float(over.max(initial=0.0))
            self.worst = max(self.worst, worst)
            if not worst <= 1:
                where = _place(over, ids) if ids is not None and per_token else ""
                raise Rejected(f"{name}{where} is {worst:.3g} times its error budget away from the oracle")

    # -- against an earlier answer -------------------------------------------------------------------------------

    def isolated(
        self,
        call: Callable[[Mapping[str, Array]], Mapping[str, Array]],
        arguments: Mapping[str, Array],
        ids: Array,
        *,
        change: Sequence[str],
        dtype: str,
        where: Collection[int] | None = None,
        backward: bool = False,
    ) -> None:
        """Change one segment after the other by a large finite amount: the others' results stay, its own move.

        Args:
            call: from arguments to results by name, each ``[B, S, ..]``.
            change: the arguments to change.
            where: which segments to change; None for all.
            backward: results but the one named "output" are gradients, for which a backend may have declared that
                running twice changes them.
        """
        large = LARGE[dtype]
        before = call(arguments)
        noise = self.noise(lambda: call(arguments), before) if backward else dict.fromkeys(before, 0.0)
        noise |= {name: 0.0 for name in before if name == "output"}  # a forward adds in one order, always
        every = segments(ids)
        for number in range(len(every)) if where is None else where:
            row, start, stop = every[number]
            changed = dict(arguments)
            for name in change:
                changed[name] = arguments[name].copy()
                drawn = generator("change", number, name).choice([-large, large], changed[name][row, start:stop].shape)
                changed[name][row, start:stop] = round_to(dtype, drawn)
            after = call(changed)
            elsewhere = ids > 0
            elsewhere[row, start:stop] = False
            for name, result in before.items():
                self.unmoved(
                    f"{name} of other segments", result[elsewhere], after[name][elsewhere],
                    because=f"segment {number} changed", noise=noise[name],
                )  # fmt: skip
            if all(np.array_equal(x[row, start:stop], after[name][row, start:stop]) for name, x in before.items()):
                raise Rejected(f"segment {number} changed by {large:g} and nothing of its own moved")

    def noise(self, again: Callable[[], Mapping[str, Array]], before: Mapping[str, Array]) -> dict[str, float]:
        """Measures how far results move when the same call is made again: 0 unless a backward adds with atomics."""
        if not self.atomic:
            return dict.fromkeys(before, 0.0)
        reruns = [again() for _ in range(RERUNS)]
        return {name: budget.FACTOR * budget.largest(other[name] - x for other in reruns) for name, x in before.items()}

    def unmoved(self, what: str, before: Array, after: Array, *, because: str, noise: float = 0.0) -> None:
        """Two results are the same to the bit, or within the noise of running twice."""
        moved = ~np.isclose(before, after, rtol=0, atol=noise) if noise else before != after
        if moved.any():
            raise Rejected(
                f"{because}, and {what} moved: {int(moved.sum())} of {moved.size} values, by up to "
                f"{budget.largest([np.nan_to_num(after - before)]):.3g}"
            )

    def equal(self, what: str, got: Any, expected: Any) -> None:
        """Two arrays, numbers or lists are exactly the same."""
        if not np.array_equal(np.asarray(got), np.asarray(expected)):
            raise Rejected(f"{what}: expected {expected}, got {got}")

    def holds(self, condition: bool, otherwise: str) -> None:
        """A plain statement is true."""
        if not condition:
            raise Rejected(otherwise)


def _arrays(name: str, x: Any) -> Iterator[tuple[str, Array]]:
    """Yields the arrays inside of arguments with names such as ``steps[0][1][2].labels``."""
    if isinstance(x, np.ndarray):
        yield name, x
    entries: Any = ()
    if isinstance(x, Document | Batch | Decoder):
        entries = ((f"{name}.{key}", y) for key, y in vars(x).items() if key != "native")
    elif isinstance(x, Mapping):
        entries = ((f"{name}[{key}]" if name else key, y) for key, y in x.items())
    elif isinstance(x, list | tuple):
        entries = ((f"{name}[{number}]", y) for number, y in enumerate(x))
    for key, y in entries:
        yield from _arrays(key, y)


def as_result(answer: Any) -> Result:
    """Converts a backend's answer, an array or number and arrays by name, to float64."""
    out, gradients = answer
    return np.asarray(out, np.float64), {name: np.asarray(x, np.float64) for name, x in gradients.items()}


def _place(over: Array, ids: Array) -> str:
    """Returns the segment that holds the largest entry of a ``[B, S, ..]`` array."""
    row, token = np.unravel_index(int(over.argmax()), over.shape)[:2]
    for number, (of_row, start, stop) in enumerate(segments(ids)):
        if of_row == row and start <= token < stop:
            return f" of segment {number} (row {row}, tokens {start} to {stop - 1}) at token {token}"
    raise AssertionError("the largest entry is at a real token")
