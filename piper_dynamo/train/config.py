"""What `piper train` can be asked for, checked before any process starts."""

from dataclasses import asdict, dataclass, fields

from piper_dynamo import schedules
from piper_dynamo.errors import PiperStrategyError, join_faults
from piper_dynamo.strategy import Place, Split, Strategy

# Stages per rank that each schedule needs: one each, or two.
STAGES_PER_RANK = {
    "gpipe": 1,
    "one_f_one_b": 1,
    "zb_h1": 1,
    "interleaved_1f1b": 2,
    "zbv": 2,
    "dualpipev": 2,
}
V_SHAPED = ("zbv", "dualpipev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of the main job; `piper train --help` explains them."""

    out: str = "runs/train"
    steps: int = 200
    ranks: int | None = None
    pp: int = 2
    microbatches: int = 4
    schedule: str = "one_f_one_b"
    compile: str = "aten"
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    seq: int = 128
    batch: int = 16
    tied_head: bool = False
    dtype: str = "float32"
    lr: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 4
    compare: bool = False
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse what cannot train, all faults at once."""
        faults = [
            f"--{f.name.replace('_', '-')} is {getattr(self, f.name)}; give a number of at least 1"
            for f in fields(self)
            if f.type in ("int", int)
            and f.name not in ("seed", "warmup", "eval_every")
            and getattr(self, f.name) < 1
        ]
        if self.schedule not in STAGES_PER_RANK:
            known = ", ".join(STAGES_PER_RANK)
            faults.append(f"--schedule is {self.schedule!r}; choose one of {known}")
        elif not faults:
            faults += self._shape_faults()
        if self.compile not in ("aten", "inductor"):
            faults.append(f"--compile is {self.compile!r}; choose aten or inductor")
        if self.dtype not in ("float32", "float64"):
            faults.append(f"--dtype is {self.dtype!r}; choose float32 or float64")
        if faults:
            raise PiperStrategyError(join_faults("this job cannot be run", faults))

    def _shape_faults(self) -> list[str]:
        faults = []
        if self.ranks not in (None, self.pp):
            faults.append(
                f"--ranks is {self.ranks}, but --pp {self.pp} needs {self.pp}; leave --ranks out"
            )
        if self.layers < self.stages:
            faults.append(
                f"--layers is {self.layers}, fewer than the {self.stages} stages of "
                f"--schedule {self.schedule} on --pp {self.pp}; add layers"
            )
        if self.batch % self.microbatches:
            divisors = [m for m in range(1, self.batch + 1) if self.batch % m == 0]
            faults.append(
                f"--batch {self.batch} does not divide into --microbatches {self.microbatches}; "
                f"numbers that do: {divisors}"
            )
        if self.dim % (2 * self.heads):
            faults.append(
                f"--dim {self.dim} must be a multiple of 2 x --heads {self.heads} (rotary pairs)"
            )
        if self.heads % self.kv_heads:
            faults.append(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")
        return faults

    @property
    def stages(self) -> int:
        """How many pipeline stages the model is cut into."""
        return self.pp * STAGES_PER_RANK[self.schedule]

    def placement(self) -> dict[int, list[int]]:
        """Stage -> ranks: a line, a loop (interleaved) or a V."""
        placed = {}
        for stage in range(self.stages):
            turn, rank = divmod(stage, self.pp)
            if self.schedule in V_SHAPED and turn % 2:
                rank = self.pp - 1 - rank
            placed[stage] = [rank]
        return placed

    def strategy(self) -> Strategy:
        """The job's strategy."""
        placement = self.placement()
        orders = getattr(schedules, self.schedule)(placement, self.microbatches)
        return Strategy(
            Split({}, num_microbatches=self.microbatches),
            *(Place({"PP": stage}, devices=ranks) for stage, ranks in placement.items()),
            *orders,
        )

    def as_dict(self) -> dict[str, object]:
        """For the run folder."""
        return asdict(self)
