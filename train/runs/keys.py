"""The keys that a run of any model takes, whatever its method: one field each."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Literal

from fnpipe.pipeline.flags import option
from fnpipe.train.keys import SessionKeys


@dataclass(frozen=True, kw_only=True)
class RunKeys(SessionKeys):
    """What a run that trains a model on pictures and captions can be told; the papers' values, where a paper gives one.

    A key that is None is chosen when the run starts, from the method, the model and the data.
    """

    method: Literal["itc", "albef", "grit", "mafa", "falcon"] = option(
        MISSING,
        "itc, albef, grit, mafa or falcon (see METHODS).",
        help="itc, albef, grit, mafa or falcon; on frozen embeddings: adapter or vacsr.",
    )
    model: str | None = option(
        None,
        "fnpipe-tiny or an open_clip architecture; None: that of init, else fnpipe-tiny.",
        help="fnpipe-tiny (default), albef-base, or an open_clip architecture.",
    )
    init: str | None = option(
        None,
        "where the weights start: a checkpoint file, run:NAME, demo; None: from scratch.",
        help="A checkpoint file, run:NAME, demo, or a tag of --model.",
    )
    image_size: int | None = option(
        None,
        "width and height of the model's input, in pixels (None: that of the architecture, or of init, whose positions "
        "are interpolated to another size).",
        low=1,
    )
    fusion_layers: int | None = option(
        None, "layers of the fusion encoder (None: as many as the architecture, or init, has).", low=1
    )
    itc_loss: Literal["softmax", "sigmoid"] | None = option(
        None, "the contrastive loss: softmax, or SigLIP's sigmoid (None: that of init, else softmax)."
    )
    text_attention: Literal["own", "bidirectional"] | None = option(
        None,
        "the mask under which captions are embedded: the architecture's own, or bidirectional (None: that of init, "
        "bidirectional from scratch).",
    )
    groups: str | None = option(
        None,
        "the plan, or several in turn with the epochs that each serves, from its first: random:2,hard:6 trains for 8; "
        "None: the only GRIT plan where the method needs one, else seeded random batches.",
        help="The plan, or several with the epochs that each serves: random:2,hard:6. Default: the only GRIT plan for "
        "grit and mafa, else random batches.",
    )
    warm: int = option(
        0,
        "epochs of random batches first, of the plan's pairs: hard batches ruin a matching head that cannot tell easy "
        "combinations yet.",
        low=0,
    )
    captions: Literal["one", "all"] = option(
        "one",
        "of random batches: every image once an epoch, with another caption each time, or once with each of its "
        "captions; a plan has its own.",
    )
    materialized: str | None = option(
        None, "where fnpipe group --materialize has put the plan: its shards are read front to back."
    )
    edges: str | None = option(
        None,
        "the mined edges; None: the only ones there are where the method needs some. With falcon they are optional, "
        "and treated as by mafa.",
        help="The mined edges. Default: the only ones for mafa; optional for falcon, adapter and vacsr.",
    )
    embeddings: str | None = option(
        None,
        "the stored embeddings that falcon's first epoch looks through; None: the only ones there are.",
        help="Stored embeddings (falcon, adapter, vacsr). Default: the only ones.",
    )
    truth: str | None = option(
        None,
        "a truth file, for the share of false negatives met and for mAP@R.",
        help="Truth file: count false negatives, report mAP@R.",
        after="epochs",
    )
    agreement: str | None = option(
        None,
        "itm:RUN or itm:demo: run this discriminator on some batches, and log how often it would have said what was "
        "looked up.",
    )
    agreement_steps: int = option(50, "batches from one that agreement looks at to the next.", low=1)
    epochs: int | None = option(
        None,
        "how often the train images are gone through (None: 20, for fnpipe-tiny as many as make about 3,600 steps).",
        low=1,
        help="Default: 20; for fnpipe-tiny about 3,600 steps, on frozen embeddings about 1,536.",
    )
    batch_size: int | None = option(
        None,
        "pairs of a random batch, or one of falcon's (None: 64 for fnpipe-tiny, else 128, or all images where there "
        "are fewer); a plan has its own.",
        low=2,
    )
    seed: int = option(0, "every random draw derives from it, the epoch and the batch.", low=0, high=2**63 - 1)
    itm: bool | None = option(None, "train the matching head, ITM (None: all do but itc, and falcon with reward itg).")
    mlm: bool | None = option(
        None, "train masked language modelling, MLM (None: all do but itc, and falcon with reward itg)."
    )
    mask_rate: float = option(0.5, "share of the tokens that MLM masks.", low=0.0, high=1.0)
    min_recorded_probability: float = option(
        0.0,
        "leave out recorded pairs that the discriminator doubts: those whose p, in the edges' _recorded/, is lower.",
        low=0.0,
        high=1.0,
    )
    tau_low: float | None = option(
        None, "edges with p below this are negatives (None: as the edges are labelled).", low=0.0, high=1.0
    )
    tau_high: float | None = option(
        None, "edges with p above this are positives (None: as the edges are labelled).", low=0.0, high=1.0
    )
    false_negatives: Literal["positive", "drop", "ignore"] = option(
        "positive",
        "what the hardest negatives that edges call positive become: positive, taken out (drop), or left as "
        "they are (ignore).",
    )
    unscored: Literal["negative", "next"] = option(
        "negative", "a hardest negative without a score is a negative, or the hardest scored one is taken (next)."
    )
    second: Literal["plain", "next-negative"] = option(
        "plain",
        "what takes the place of a hardest negative that edges call ambiguous: the next hardest (plain), or the next "
        "one that they call negative (next-negative).",
    )
    itm_negatives: Literal["hardest", "sampled"] = option(
        "hardest",
        "the negative of ITM for every picture and every caption: the most similar one of the batch (GRIT-VLP, MAFA), "
        "or one drawn in proportion to exp(similarity / temperature) (ALBEF).",
    )
    itm_top: int = option(
        1, "the negatives of ITM are drawn from so many of the most similar ones of the batch; 1: the hardest.", low=1
    )
    itm_easy: int = option(
        0,
        "random negatives of the batch for every picture and every caption, beside the hardest, so that the matching "
        "head goes on seeing easy ones.",
        low=0,
    )
    smoothing: float | None = option(
        None,
        "weight of smoothed contrastive targets, a in MAFA's S-ITC (None: 0.5 for mafa on grouped batches and falcon "
        "with edges, else 0).",
        low=0.0,
        high=1.0,
    )
    smoothing_start_epoch: int = option(1, "the epoch in which smoothing starts, counted from 0.", low=0)
    grad_checkpointing: bool = option(False, "compute activations again in the backward pass instead of keeping them.")
    consistency: float = option(0.0, "weight of GRIT's consistency loss (0.2 in the paper); 0: none.", low=0.0)
    vacsr: float = option(
        0.0,
        "weight of VACSR's loss on the two embeddings, its network trained along with the towers; 0: none. The network"
        " is saved beside the weights, for vacsr:RUN on embeddings of this run.",
        low=0.0,
    )
    itc_columns: Literal["both", "stopped"] = option(
        "both",
        "ITC's gradient reaches both sides of a similarity, or stops at the one that a row is compared with, as in the "
        "released code of GRIT-VLP and MAFA.",
    )
    distillation: float = option(
        0.0,
        "ALBEF's momentum distillation: the share of the targets of ITC and MLM that a slow copy of the model gives "
        "(0.4 in the paper), rising over the first epoch; 0: none.",
        low=0.0,
        high=1.0,
    )
    queue: int = option(
        0,
        "pairs of earlier batches, as that copy embedded them, that ITC compares with beside the batch (65,536 in "
        "ALBEF); 0: none.",
        low=0,
    )
    gather: bool = option(False, "ITC over the batches of all ranks instead of the local one.")
    lr: float | None = option(
        None,
        "peak learning rate (None: 1.5e-3 for fnpipe-tiny, else 1e-4). A run with init warms up to it again; one that "
        "goes on as gently as init's ended takes that run's lr times its min_lr_ratio.",
        low=0.0,
    )
    min_lr_ratio: float = option(0.1, "the share of lr at which its cosine ends.", low=0.0, high=1.0)
    weight_decay: float = option(0.02, "AdamW's weight decay, not on norms, biases, and the temperature.", low=0.0)
    warmup_steps: int | None = option(
        None, "steps in which lr rises from 0 (None: a twentieth of the run, 1,000 at most).", low=0
    )
    clip_norm: float | None = option(
        None,
        "bound of the gradient's norm; 0: none. None: 5, with falcon 0. A bound below the norm of hard batches "
        "(some 25 in small runs, 5 on easy ones) shrinks exactly their steps, and with them the reward of hardness, "
        "whose sign it turns over. grad_norm is logged before clipping.",
        low=0.0,
    )
    accumulate: int = option(1, "batches per optimiser step.", low=1)
    ema_decay: float = option(
        0.0, "keep an exponential mean of the weights, and evaluate and save that; 0: none.", low=0.0, high=1.0
    )
    compile: bool = option(False, "run the transformer blocks through torch.compile.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto", "numbers that the forward pass computes in; auto is bf16 on a GPU that has it, else fp32."
    )
    device: str = option("auto", "where the run computes: auto, cpu or cuda.")
    threads: int | None = option(
        None,
        "torch's threads for one process; None: torch's own choice.",
        low=1,
        help="torch's threads. Default: torch's own choice.",
    )
    workers: int | None = option(
        None,
        "processes that decode pictures; None: none where the pictures are kept in memory, else one per core.",
        low=0,
    )
    cache_mib: int = option(
        1024, "MiB of memory for decoded pictures: they stay, at the model's input size, if all fit.", low=0
    )
    augment: Literal["auto", "tiny", "albef", "open-clip", "none"] = option(
        "auto", "how pictures are changed at random; auto is tiny for fnpipe-tiny, open-clip for itc, else albef."
    )
    flip: bool | None = option(
        None, "mirror half the pictures (None: as the papers do, but not for fnpipe-tiny: captions say left and right)."
    )
    evaluate_every: int = option(1, "epochs between evaluations on evaluate_on; 0: never.", low=0)
    evaluate_on: str | None = option(
        None,
        "the split that is evaluated while training (None: validation if there is one, else test, else no "
        "evaluation). Of a split other than test the best weights are kept.",
    )
    dual_weight: float | Literal["fit"] | None = option(
        None,
        "evaluate also by the matching head's logit plus this times the dual encoder's: both_ in metrics.jsonl. fit: "
        "by the best weight on the validation split, every time; evaluate_on has to be another split then.",
        low=0.0,
    )
    evaluate_images: int = option(1000, "the most images to evaluate on while training.", low=1)
    checkpoint_steps: int = option(
        1000, "steps from one saved state (last) to the next; the end of an epoch saves one too.", low=1
    )
    keep_every: int = option(0, "keep the checkpoint of every N-th epoch; 0: only last and best.", low=0)
    tensorboard: bool = option(True, "write scalars for TensorBoard, where it is installed.")

    @property
    def evaluated_on(self) -> str | None:
        return self.evaluate_on if self.evaluate_every else None
