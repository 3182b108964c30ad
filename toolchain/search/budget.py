"""What the user asks for: one budget, and how the rounds of a search close in on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolchain.errors import DtoolError
from toolchain.search.solve import Problem, cheapest, least_loss

Kind = Literal["kl", "rise", "mb"]
SYMBOLS = {"kl": "nats of KL", "rise": "nats of rise of the NLL", "mb": "MB of weights and cache"}

LEAST_RATIO, SMALLEST = 0.1, 1e-9
"""A rise may come out below zero on a short text: that is no reason to believe in a tenth of the estimate or less."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most of one thing: mean KL or rise of the mean NLL against float (nats), or megabytes (1e6 bytes).

    Megabytes are those of the weights and of the KV cache of one sequence that fills `engine.kv_capacity`. Weights
    are the tensors of the file: its header, which names them in some kB, is not counted.
    """

    kind: Kind
    most: float

    def text(self) -> str:
        """The budget in words."""
        return f"at most {self.most:g} {SYMBOLS[self.kind]}"

    def is_met(self, size: int, kl: float, rise: float) -> bool:
        """Whether measured bytes and losses (nats) keep the budget; a loss that is no number does not."""
        return {"kl": kl, "rise": rise, "mb": size / 1e6}[self.kind] <= self.most

    def measured(self, kl: float, rise: float) -> float:
        """The loss that the budget is about."""
        return rise if self.kind == "rise" else kl

    def check_bytes(self, problem: Problem) -> None:
        """Raise DtoolError when even the smallest mix has more bytes than the budget: that needs no measuring."""
        least = problem.bytes_of(problem.extremes()[0])
        if self.kind == "mb" and least > self.most * 1e6:
            raise DtoolError(
                "no mix of these formats is that small",
                expected=self.text(),
                found=f"{least / 1e6:.2f} MB in the smallest formats of all units",
                fix=f"--budget-mb {math.ceil(least / 1e4) / 100:g}, smaller formats, a smaller engine.kv_capacity, "
                "or fewer matrices in weights.skip",
            )


@dataclass(frozen=True, slots=True)
class Question:
    """A whole request: the budget, the formats beside the base recipe's, and the text to measure on.

    `heads`: whether every KV head of a quantized cache is measured too. `base`: the base recipe by name, as the recipe
    that is found tells of it.
    """

    budget: Budget
    formats: Sequence[str] = ()
    text: str | None = None
    blocks: int = 4
    seq_len: int = 256
    heads: bool = False
    base: str = "a recipe"

    def about(self) -> str:
        """What the recipe that is found says of itself: what was asked, nothing of what the base says of itself."""
        return f"Formats mixed by dtool search from {self.base}, asked for {self.budget.text()}"


def make_budget(kl: float | None, rise: float | None, mb: float | None) -> Budget:
    """The one budget given. Raises DtoolError for none, several, or one that is not a number above zero."""
    given: list[tuple[Kind, float]] = []
    pairs: tuple[tuple[Kind, float | None], ...] = (("kl", kl), ("rise", rise), ("mb", mb))
    for kind, value in pairs:
        if value is not None:
            given.append((kind, value))
    if len(given) != 1:
        raise DtoolError(
            "a search has one budget",
            expected="one of --budget-kl, --budget-rise, --budget-mb",
            found=", ".join(f"--budget-{kind}" for kind, _ in given) or "none",
            fix="for example --budget-kl 0.01",
        )
    kind, most = given[0]
    if not (math.isfinite(most) and most > 0):
        raise DtoolError(
            f"--budget-{kind} is no budget",
            expected="a number above zero",
            found=f"{most:g}",
            fix=f"for example --budget-{kind} {100 if kind == 'mb' else 0.01}",
        )
    return Budget(kind, most)


def make_question(
    *,
    budget_kl: float | None = None,
    budget_rise: float | None = None,
    budget_mb: float | None = None,
    formats: str | None = None,
    text: str | None = None,
    blocks: int = 4,
    seq_len: int = 256,
    heads: bool = False,
    base: str = "a recipe",
) -> Question:
    """A request as the command line has it; `formats` are separated by commas. Raises as `make_budget`."""
    names = tuple(name.strip() for name in (formats or "").split(",") if name.strip())
    return Question(make_budget(budget_kl, budget_rise, budget_mb), names, text, blocks, seq_len, heads, base)


@dataclass(slots=True)
class Rounds:
    """Which mix to try next: the cheapest whose corrected estimate keeps the budget.

    The estimate is corrected by measured / estimated of the round before. What met and what missed the budget
    bounds the sums that are worth a try: where a correction would leave those bounds, their mean is taken.
    """

    budget: Budget
    problem: Problem
    met: float = 0.0
    missed: float = math.inf
    ratio: float = 1.0
    tried: list[dict[str, str]] = field(default_factory=list)

    def propose(self) -> dict[str, str] | None:
        """The next mix; None when there is nothing left to try."""
        if self.budget.kind == "mb":
            mix = least_loss(self.problem, math.floor(self.budget.most * 1e6))
        else:
            target = self.budget.most / self.ratio
            if not self.met < target < self.missed:
                target = (
                    math.sqrt(max(self.met, SMALLEST) * self.missed) if math.isfinite(self.missed) else 2 * self.met
                )
            mix = cheapest(self.problem, target) or self.problem.extremes()[1]
        if mix is None or mix in self.tried:
            return None
        self.tried.append(mix)
        return mix

    def learn(self, mix: dict[str, str], loss: float, *, met: bool) -> None:
        """Take in what a mix was measured to lose (nats)."""
        estimate = self.problem.loss_of(mix)
        if met:
            self.met = max(self.met, estimate)
        else:
            self.missed = min(self.missed, estimate)
        if estimate > 0:
            self.ratio = min(max(loss / estimate, LEAST_RATIO), 1 / SMALLEST)
