"""Planned batches and a workspace's pairs as ``torch.utils.data`` has them, for people with a trainer of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from torch.utils.data import Dataset, Sampler

from fnpipe.pipeline.errors import InputError, one_line
from fnpipe.pipeline.workspace.workspace import Stage, Workspace
from fnpipe.train.data.pictures import Samples
from fnpipe.train.data.plans import PlannedBatches, batches_each, batches_of_rank

T = TypeVar("T")


class PlanBatchSampler(Sampler[list[int]]):
    """The batches of a plan as lists of pair_ids: the ``batch_sampler`` of a DataLoader over a `PairDataset`.

    Epoch e has the batches of the plan's epoch e mod E, in the plan's order. Of several processes each takes its own,
    as many as every other. Without `set_epoch` in between a second pass is the same epoch again.

    Args:
        plan: ``workspace.stage("groups/NAME")``. rank, world: this process's number, and how many there are.

    Attributes:
        batch_size: rows of a full batch. epoch: the epoch of the running pass, or of the next one.

    Raises:
        InputError: the plan is missing, unfinished or stale, or has fewer batches than there are processes.
    """

    def __init__(self, plan: Stage, rank: int = 0, world: int = 1) -> None:
        self._source = PlannedBatches(plan)
        self._rank, self._world = rank, world
        self.batch_size = self._source.batch_size
        # Where the running pass began and the next one begins, and how many batches of the epoch the loop has taken;
        # None: nobody counts them.
        self._began = self._start = 0
        self._taken: int | None = 0
        self._enter(0)

    def _enter(self, epoch: int) -> None:
        self.epoch, self._plan = epoch, self._source.epoch(epoch)
        batches_each(len(self._plan), self._world)

    def __len__(self) -> int:
        """The batches of the whole epoch that this process takes."""
        return batches_each(len(self._plan), self._world)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = batches_of_rank(len(self._plan), self._rank, self._world)[self._start :]
        self._began, self._start, self._taken = self._start, 0, None
        plan = self._plan
        return (plan.batch(number)[1].tolist() for number in numbers)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; the one that `load_state_dict` went to goes on where it was."""
        if epoch != self.epoch:
            self._start, self._taken = 0, 0
            self._enter(epoch)

    def counted(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader over this sampler, counted for `state_dict` as the loop takes them.

        Workers fetch batches ahead of the loop, so that the sampler alone cannot tell where the loop is.
        """
        for number, batch in enumerate(loader, 1):
            self._taken = self._began + number
            yield batch
        if self._taken is None:
            self._taken = self._began

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is; the batch that it took last counts as done.

        Raises:
            RuntimeError: the batches of this pass are not taken through `counted`.
        """
        if self._taken is None:
            raise RuntimeError("take the batches through PlanBatchSampler.counted(loader), or nobody counts them")
        return {**self._made_for, "epoch": self.epoch, "batches": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a loop was: the next pass has the rest of its epoch.

        Raises:
            InputError: it was a loop over another plan, or over other processes.
        """
        for name, now in self._made_for.items():
            if state[name] != now:
                raise InputError(f"{self._source.stage.path}: the state is of {name} {state[name]}, not {now}")
        self._enter(state["epoch"])
        self._start = self._taken = state["batches"]

    @property
    def _made_for(self) -> dict[str, Any]:
        return {"plan": self._source.stage.digest, "world": self._world}


class PairDataset(Dataset[tuple[Any, Any, int, int]]):
    """The pairs of a workspace by pair_id, for any DataLoader: (picture, caption, image_id, pair_id).

    A DataLoader gives a batch of them as pictures (B, ...), captions (B, L), and two (B,) int64 tensors. A picture that
    cannot be decoded is an InputError.

    Args:
        transform: a decoded RGB picture to what the model takes, as open_clip's and torchvision's.
        tokenizer: n captions to n rows of tokens, as open_clip's; None: a caption stays a text.
    """

    def __init__(
        self,
        workspace: Workspace,
        transform: Callable[[Image.Image], Any],
        tokenizer: Callable[[list[str]], Sequence[Any]] | None = None,
    ) -> None:
        self._samples = Samples.of(workspace)
        self._transform, self._tokenizer = transform, tokenizer

    def __len__(self) -> int:
        return len(self._samples.image_of)

    def __getitem__(self, pair_id: int) -> tuple[Any, Any, int, int]:
        return self.__getitems__([pair_id])[0]

    def __getitems__(self, pair_ids: Sequence[int]) -> list[tuple[Any, Any, int, int]]:
        """The pairs of a batch, read and tokenised at once; a DataLoader asks for them so.

        Raises:
            InputError: a picture cannot be decoded, or the tokenizer does not give a row for each caption.
        """
        ids = np.asarray(pair_ids, np.int64)
        image_ids = self._samples.image_of[ids]
        pictures = [self._picture(*one) for one in zip(image_ids, self._samples.decode(image_ids), strict=True)]
        texts: Sequence[Any] = self._samples.texts(ids)
        if self._tokenizer is not None:
            texts = _tokenised(self._tokenizer, list(texts))
        return list(zip(pictures, texts, image_ids.tolist(), ids.tolist(), strict=True))

    def _picture(self, image_id: int, rgb: np.ndarray | None) -> Any:
        # Left out, it would leave this process's batch smaller than the others', whose gathering then waits in vain.
        if rgb is None:
            tar = self._samples.urls[self._samples.shard[image_id]]
            raise InputError(
                f"{tar}: the picture of image {image_id} cannot be decoded; leave it out: `fnpipe embed` finds such "
                "pictures, and a plan of `fnpipe group --sampling grit` goes without them"
            )
        return self._transform(Image.fromarray(rgb))


def _tokenised(tokenizer: Callable[[list[str]], Sequence[Any]], captions: list[str]) -> Sequence[Any]:
    asked = "it is asked for a whole list at once, as open_clip's are: wrap one that takes a single caption"
    try:
        texts = tokenizer(captions)
    except (AttributeError, TypeError) as error:
        # What a function of one text says of a list: it has no .lower(), or is no str.
        raise InputError(f"tokenizer does not take a list of captions ({one_line(error)}); {asked}") from error
    if len(texts) != len(captions):
        raise InputError(f"tokenizer gave {len(texts)} rows for {len(captions)} captions; {asked}")
    return texts
