"""What `piper train` can be asked for, checked before any process starts."""

import math
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from piper_dynamo import strategies
from piper_dynamo.directives import Keep, Precision
from piper_dynamo.errors import PiperStrategyError, join_faults
from piper_dynamo.loss_scaling import NAN_CHECKS
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.strategy import Strategy

CHUNKS = ("aten", "inductor")
DTYPES = ("float32", "float64")
PRECISIONS = ("bf16", "fp16")
LEVELS = (0, 1, 2, 3)
MODELS = ("llama", "moe")
AXES = ("pp", "dp", "ep")
_COUNTS = (
    "steps",
    "pp",
    "dp",
    "ep",
    "experts",
    "top_k",
    "microbatches",
    "dim",
    "layers",
    "heads",
    "kv_heads",
    "seq",
    "batch",
    "eval_batches",
    "keep_last",
)
_COUNTS_OR_ZERO = ("warmup", "seed", "eval_every", "save_every", "prefetch")
MAX_SEED = 2**63  # torch's generators take no more
_POSITIVE = ("lr", "clip", "timeout_s", "bucket_mb", "capacity")


def budget_of(text: str | None) -> float | None:
    """What `--recompute` says, as the directive has it; NaN where it is none."""
    if text is None or text == "full":
        return None if text is None else 0.0
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of the main job; `piper train --help` explains them.

    The defaults end near 2.1 nats per byte after about a minute on two cores.
    """

    out: str | None = None
    model: str = "llama"
    steps: int = 200
    ranks: int | None = None
    pp: int = 2
    dp: int = 1
    ep: int = 1
    order: str | None = None
    zero: int = 0
    bucket_mb: float | None = None
    prefetch: int = 1
    keep: str = "chunk"
    recompute: str | None = None
    microbatches: int = 4
    schedule: str = "one_f_one_b"
    compile: str = "aten"
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    seq: int = 128
    batch: int = 16
    experts: int = 8
    top_k: int = 2
    capacity: float | None = None
    tied_head: bool = False
    dtype: str = "float32"
    precision: str | None = None
    nan_check: str | None = None
    lr: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 4
    save_every: int = 0
    keep_last: int = 2
    resume: str | None = None
    compare: bool = False
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse what cannot train.

        Raises:
            PiperStrategyError: Lists every fault.
        """
        numbers = self._number_faults()
        # Shapes are worked out from the numbers.
        faults = [*numbers, *self._name_faults(), *([] if numbers else self._shape_faults())]
        if faults:
            raise PiperStrategyError(join_faults("this job cannot be run", faults))

    def _number_faults(self) -> list[str]:
        faults = []
        for names, least in ((_COUNTS, 1), (_COUNTS_OR_ZERO, 0)):
            faults += [
                f"{_flag(name)} is {getattr(self, name)}; give a number of at least {least}"
                for name in names
                if getattr(self, name) < least
            ]
        if self.seed >= MAX_SEED:
            faults.append(f"--seed is {self.seed}; give a number below 2^63")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                faults.append(f"{_flag(name)} is {value}; give a number above 0")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            faults.append(f"--weight-decay is {self.weight_decay}; give 0 or a number above")
        if self.zero not in LEVELS:
            faults.append(f"--zero is {self.zero}; choose one of {', '.join(map(str, LEVELS))}")
        if self._keep() == 0:
            faults.append(
                f"--keep is {self.keep!r}; choose chunk, step, or how many buckets stay (at least "
                "1)"
            )
        budget = budget_of(self.recompute)
        if budget is not None and not 0 <= budget <= 1:  # NaN is not, either
            faults.append(
                f"--recompute is {self.recompute!r}; choose full, or how much is kept: 0 to 1"
            )
        return faults

    def _name_faults(self) -> list[str]:
        return [
            f"{_flag(name)} is {value!r}; {_near(value, known)}choose one of {', '.join(known)}"
            for name, value, known in (
                ("model", self.model, MODELS),
                ("schedule", self.schedule, tuple(SCHEDULES)),
                ("compile", self.compile, CHUNKS),
                ("dtype", self.dtype, DTYPES),
                ("precision", self.precision, PRECISIONS),
                ("nan_check", self.nan_check, NAN_CHECKS),
            )
            if value is not None and value not in known
        ]

    def _shape_faults(self) -> list[str]:
        faults = [*self._replica_faults(), *self._expert_faults(), *self._precision_faults()]
        unordered = self._order_faults()
        faults += unordered
        if self.ranks not in (None, self.world):
            asked = " x ".join([f"--pp {self.pp}", *self._replica_axes()])
            faults.append(
                f"--ranks is {self.ranks}, but {asked} needs {self.world}; leave --ranks out"
            )
        replicas = " x ".join(self._replica_axes())
        if self.batch % self.replicas:
            faults.append(
                f"--batch {self.batch} does not divide among {replicas} replicas; numbers "
                f"that do: {_divisors(self.batch)}"
            )
        elif self.batch // self.replicas % self.microbatches:
            share = self.batch // self.replicas
            each = f" (the share of {replicas} is {share})" if self.replicas > 1 else ""
            faults.append(
                f"--batch {self.batch}{each} does not divide into --microbatches "
                f"{self.microbatches}; numbers that do: {_divisors(share)}"
            )
        faults += self._checkpoint_faults()
        if self.dim % (2 * self.heads):
            faults.append(
                f"--dim {self.dim} must be a multiple of 2 x --heads {self.heads} (rotary pairs)"
            )
        if self.heads % self.kv_heads:
            faults.append(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")
        if self.schedule in SCHEDULES and not unordered:
            faults += self._schedule_faults()
        return faults

    def _order_faults(self) -> list[str]:
        """Of what would number the ranks otherwise."""
        if self.order is None:
            return []
        given = self.order.split(",")
        needed = {name for name in AXES if getattr(self, name) > 1}
        if len(set(given)) == len(given) and needed <= set(given) <= set(AXES):
            return []
        shown = ", ".join(f"--{name}" for name in AXES if name in needed) or "none here"
        return [
            f"--order is {self.order!r}; give the axes of more than one rank ({shown}) in an order "
            "such as dp,pp,ep: the last ones stay within a host"
        ]

    def _precision_faults(self) -> list[str]:
        faults = []
        if self.precision is not None and self.compare:
            faults.append(
                f"--precision {self.precision} rounds, which --compare's one process does not; "
                "leave one of them out"
            )
        if self.precision == "fp16" and self.nan_check == "raise":
            faults.append(
                "--precision fp16 finds its loss scale by steps that overflow, at which "
                "--nan-check raise stops; give --nan-check skip"
            )
        return faults

    def _checkpoint_faults(self) -> list[str]:
        faults = []
        if self.resume is not None and self.compare:
            faults.append("--compare is about a run's first steps; leave it out with --resume")
        if self._changed("keep_last") and not self.save_every:
            faults.append(f"--keep-last {self.keep_last} keeps nothing without --save-every")
        return faults

    def _replica_axes(self) -> list[str]:
        return [f"--{n} {getattr(self, n)}" for n in ("dp", "ep") if getattr(self, n) > 1]

    def _changed(self, *names: str) -> list[str]:
        """Which of these options were given."""
        known = Config.__dataclass_fields__
        return [name for name in names if getattr(self, name) != known[name].default]

    def _expert_faults(self) -> list[str]:
        faults = []
        if self.model != "moe":
            return [
                f"{_flag(name)} {getattr(self, name)} is about experts; give --model moe"
                for name in self._changed("ep", "experts", "top_k", "capacity")
            ]
        if self.experts % self.ep:
            faults.append(
                f"--experts {self.experts} do not divide among --ep {self.ep} ranks; numbers that "
                f"do: {_divisors(self.experts)}"
            )
        if self.top_k > self.experts:
            faults.append(f"--top-k {self.top_k} is more than --experts {self.experts}")
        if self.capacity is not None and self.compare:
            faults.append(
                f"--capacity {self.capacity:g} drops tokens, which the one process of --compare "
                "does not; leave one of them out"
            )
        return faults

    def _replica_faults(self) -> list[str]:
        """Options that would change nothing are a misunderstanding."""
        faults = []
        changed = self._changed("prefetch", "keep")
        if self.replicas == 1:
            alone = [name for name in ("zero", "bucket_mb") if getattr(self, name)]
            faults += [
                f"{_flag(name)} {getattr(self, name)} needs replicas, but --dp is 1; "
                "give --dp 2 or more"
                for name in alone + changed
            ]
            return faults
        if "prefetch" in changed and self.zero == 0:
            faults.append(
                f"--prefetch {self.prefetch} is about gathers, and --zero 0 has none; give --zero "
                "1, 2 or 3"
            )
        if "keep" in changed and self.zero < 3:
            faults.append(
                f"--keep {self.keep} needs --zero 3: --zero {self.zero} keeps parameters whole "
                + ("always" if self.zero == 0 else "from their first use to the step's end")
            )
        return faults

    def _schedule_faults(self) -> list[str]:
        faults = []
        if self.layers < self.stages:
            faults.append(
                f"--layers is {self.layers}, fewer than the {self.stages} stages of "
                f"--schedule {self.schedule} on --pp {self.pp}; add layers"
            )
        try:
            self.strategy()
        except PiperStrategyError as error:
            # The schedule's own conditions, such as its least number of microbatches.
            asked = f"--schedule {self.schedule} --pp {self.pp} --microbatches {self.microbatches}"
            _, *why = str(error).splitlines()
            faults.append("\n".join([f"{asked} is refused by the schedule", *why]))
        return faults

    @property
    def world(self) -> int:
        """How many processes: pipeline ranks times replicas."""
        return self.pp * self.replicas

    @property
    def replicas(self) -> int:
        """On how many parts of the batch: those that share experts are replicas, too."""
        return self.dp * self.ep

    def _keep(self) -> Keep:
        """`keep` as the directive has it; 0 where it is none."""
        named: dict[str, Keep] = {"chunk": "chunk", "step": "step"}
        if self.keep in named:
            return named[self.keep]
        return int(self.keep) if self.keep.isascii() and self.keep.isdigit() else 0

    @property
    def stages(self) -> int:
        """How many pipeline stages the model is cut into: the schedule's least number."""
        return len(strategies.placement(self.schedule, self.pp))

    @property
    def loss_scale(self) -> str | None:
        """Gradients in float16 need one."""
        return "dynamic" if self.precision == "fp16" else None

    def strategy(self) -> Strategy:
        """The job's strategy."""
        # What needs replicas is refused without them before it comes to a strategy's own refusal.
        found = strategies.pipeline(
            self.schedule,
            ranks=self.pp,
            num_microbatches=self.microbatches,
            replicas=self.replicas,
            expert_ranks=self.ep,
            capacity=self.capacity,
            zero=self.zero if self.replicas > 1 else 0,
            bucket_mb=self.bucket_mb if self.replicas > 1 else None,
            prefetch=self.prefetch,
            keep=self._keep(),
            recompute=budget_of(self.recompute),
            order=None if self.order is None else self.order.split(","),
        )
        if self.precision is None:
            return found
        return Strategy(*found.directives, self._precision(), mesh=found.mesh)

    def _precision(self) -> Precision:
        return Precision({}, param="bf16" if self.precision == "bf16" else "fp16")

    def as_dict(self) -> dict[str, object]:
        """For the run folder."""
        return asdict(self)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _divisors(number: int) -> str:
    return ", ".join(str(m) for m in range(1, number + 1) if number % m == 0)


def _near(value: str, known: tuple[str, ...]) -> str:
    found = get_close_matches(value, known, n=1)
    return f"did you mean {found[0]}? " if found else ""
