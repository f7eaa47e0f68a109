"""What ``fnpipe mine-connections`` is asked: its flags, and what they allow."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from fnpipe.mining.edges.thresholds import TAU_HIGH, TAU_LOW, check_thresholds
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import flag
from fnpipe.pipeline.machine.device import check_engine

# The most candidates by one way of proposing: their ranks, and those of the graph behind them, are stored as int16.
MOST_PROPOSED = 2**14 - 2


@dataclass(frozen=True, kw_only=True)
class MineConfig:
    """How ``fnpipe mine-connections`` judges: one field per flag, the paper's thresholds as defaults.

    Attributes:
        groups: the plans that propose; empty for the only one there is.
        candidates: per anchor, direction and planned batch. graph: per anchor and direction, from the graph.
        known: edges of the same discriminator, whose verdicts are taken over and whose combinations are kept.
        positive_share: label this share of the judged, the most probable, as positive and the rest as negative,
            whatever the thresholds; for discriminators whose p is no probability.
        identity: the same picture and caption as a recorded pair are positive without being judged; else judged too.
        block_images: whose features are held at a time; memory grows with it, results do not change.
        workers: threads that decode pictures.
        threads: what torch computes with on a CPU; None: torch's own choice. Part of the edges' parameters, because
            the last bits of p depend on it.
        engine: ``local``, or ``ray``: one shard at a time on each worker of the cluster at ``ray_address`` (None starts
            a cluster on this machine). The workspace must lie at the same path on all of them.
    """

    candidates: int = flag(8, "Per anchor, direction and planned batch: so many of the most similar others.")
    groups: tuple[str, ...] = flag((), "Plans that propose; repeat for several. Default: the only one.")
    graph: int = flag(0, "Also the K nearest neighbours in the graph.", metavar="K")
    known: str | None = flag(
        None, "Take the verdicts of these edges over, and judge only what is new.", metavar="EDGES"
    )
    embeddings: str | None = flag(None, "Which embeddings; default: vacsr's own, else the only ones.")
    tau_low: float = TAU_LOW
    tau_high: float = TAU_HIGH
    positive_share: float | None = flag(
        None, "Label this share, the most probable, positive and the rest negative.", metavar="F"
    )
    score_recorded: bool = flag(False, "Judge the recorded pairs too.")
    identity: bool = flag(True, "Judge what has a recorded pair's picture and caption too; train so as well.")
    block_images: int = flag(128, "Images whose features are held at a time.")
    workers: int = flag(4, "Threads that decode pictures; changes no byte.")
    threads: int | None = flag(None, "Threads the discriminator computes with on a CPU.")
    engine: str = flag("local", "local, or ray.")
    ray_address: str | None = flag(None, "Of a running cluster; default: start one on this machine.")
    name: str | None = flag(None, "Directory under edges/; default: the discriminator's kind.", after="no_identity")
    overwrite: bool = flag(False, "Throw away what is there and start afresh.")

    def __post_init__(self) -> None:
        check_thresholds(self.tau_low, self.tau_high)
        for option, value in (("--candidates", self.candidates), ("--graph", self.graph)):
            if not 0 <= value <= MOST_PROPOSED:
                raise InputError(f"{option} {value}: a number from 0 to {MOST_PROPOSED}")
        numbers = {"--block-images": self.block_images, "--workers": self.workers, "--threads": self.threads}
        for option, number in numbers.items():
            if number is not None and number < 1:
                raise InputError(f"{option} {number}: at least 1")
        if self.candidates == self.graph == 0:
            raise InputError("--candidates 0 without --graph K proposes nothing to judge")
        if self.positive_share is not None and not 0 < self.positive_share < 1:
            raise InputError(f"--positive-share {self.positive_share}: a share between 0 and 1")
        check_engine(self.engine)
        if self.name is not None and ("/" in self.name or self.name in ("", ".", "..")):
            raise InputError(f"--name {self.name!r}: a plain name, without slashes")


@dataclass(frozen=True, kw_only=True)
class JudgeFlags:
    """Who judges, and where: one field per flag of every command that a discriminator judges for."""

    discriminator: str = flag(
        MISSING, "itm:RUN, itm:demo, blip:MODEL, vacsr:RUN or clip.", metavar="KIND[:MODEL]", after="workspace"
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N.", after="name")
    precision: str = flag("auto", "With itm and blip: auto, fp32, bf16 or fp16.", after="device")


@dataclass(frozen=True, kw_only=True)
class MineRequest(JudgeFlags, MineConfig):
    """All that ``fnpipe mine-connections`` is asked but for the thresholds, which a share may stand in the place of."""

    calibrate_on: str | None = flag(
        None,
        "With clip and vacsr: fit p on edges of this name, or on a truth file.",
        metavar="EDGES|TRUTH",
        after="positive_share",
    )
    plan: bool = flag(False, "Say how many judgements and how long; judge nothing but a probe.", after="no_identity")
