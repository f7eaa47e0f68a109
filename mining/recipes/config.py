"""What ``fnpipe prepare`` is asked, and the stages that its recipes are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fnpipe.mining.connections.config import JudgeFlags, MineConfig
from fnpipe.mining.graph.config import GraphConfig
from fnpipe.mining.plans.config import GroupConfig, parse_search_space
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import flag
from fnpipe.pipeline.made_by import NEAR_EDGES

# Neighbours that are judged before the plan is made: a plan that knows 8 of them meets half as many false negatives
# again, one that knows 24 no fewer.
NEAR = 16

Step = GraphConfig | MineConfig | GroupConfig


@dataclass(frozen=True)
class Recipe:
    """How a plan is made: at a quantile of similarity (1: nearest), apart from what is known to match or not."""

    quantile: float
    avoids: bool


RECIPES = {
    "quantile": Recipe(0.99, avoids=False),
    "avoid": Recipe(0.997, avoids=True),
    "towers": Recipe(1, avoids=True),
}


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What ``fnpipe prepare`` makes ready for training: one field per flag.

    Attributes:
        threads: as in `MineConfig`.
    """

    recipe: str = flag("avoid", f"{', '.join(list(RECIPES)[:-1])} or {list(RECIPES)[-1]}.")
    batch_size: int = flag(GroupConfig.batch_size, "Pairs per batch.")
    search_space: int | Literal["all"] = flag(
        4096, "Pairs that one chain looks through.", metavar="M|all", parse=parse_search_space
    )
    epochs: int = flag(GroupConfig.epochs, "Different plans to make.")
    seed: int = flag(GroupConfig.seed, "Seed of everything drawn.")
    name: str | None = flag(None, "Of groups/NAME and edges/NAME; the recipe's if not given.")
    embeddings: str | None = flag(None, "Which embeddings; default: vacsr's own, else the only ones.")
    replan: bool = flag(
        False,
        "After the edges NAME-near were relabelled or mined again: make the plan and its edges anew from them as they "
        "are now; what they judged is taken over.",
    )
    overwrite: bool = flag(False, "Make the plan and the edges afresh; the graph stays.")
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise InputError(f"--recipe {self.recipe}: one of {', '.join(RECIPES)}")
        if self.search_space == "all" and RECIPES[self.recipe].quantile < 1:
            whole = [name for name, recipe in RECIPES.items() if recipe.quantile == 1]
            raise InputError(
                f"--search-space all: --recipe {self.recipe} ranks the pairs of a search space; give a number, or "
                f"--recipe {' or '.join(whole)}"
            )
        # The flags of the stages say what is wrong with theirs.
        self.steps()

    @property
    def plan_name(self) -> str:
        return self.name or self.recipe

    def steps(self, **graph: Any) -> list[Step]:
        """The stages of the recipe, each with its configuration, in their order.

        Args:
            graph: what the graph was begun with, where there is one.
        """
        recipe, name, near = RECIPES[self.recipe], self.plan_name, f"{self.plan_name}{NEAR_EDGES}"
        plan = GroupConfig(
            batch_size=self.batch_size,
            search_space=self.search_space,
            epochs=self.epochs,
            seed=self.seed,
            name=name,
            embeddings=self.embeddings,
            quantile=recipe.quantile,
            edges=near if recipe.avoids else None,
            overwrite=self.overwrite,
        )
        common: dict[str, Any] = {key: getattr(self, key) for key in ("embeddings", "threads", "overwrite")}
        judge_planned = MineConfig(groups=(name,), known=near if recipe.avoids else None, name=name, **common)
        judge_near = MineConfig(candidates=0, graph=NEAR, name=near, **common)
        of_graph = GraphConfig(**{"embeddings": self.embeddings, "k": NEAR, **graph})
        # The graph is needed by what judges it and by chains over all pairs.
        with_graph = recipe.avoids or self.search_space == "all"
        first: list[Step] = [*([of_graph] if with_graph else []), *([judge_near] if recipe.avoids else [])]
        return [*first, plan, judge_planned]


@dataclass(frozen=True, kw_only=True)
class PrepareRequest(JudgeFlags, PrepareConfig):
    """All that ``fnpipe prepare`` is asked."""

    plan: bool = flag(False, "Say what is ahead and how long judging takes; make nothing.", after="name")
