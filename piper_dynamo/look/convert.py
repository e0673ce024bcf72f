"""`piper convert`: strategies between the forms in which they are written."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piper_dynamo.look.command import Command, show_json

if TYPE_CHECKING:  # importing torch takes seconds
    from piper_dynamo.strategy import Strategy


@click.command(cls=Command)
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    help="Of a table of actions: how many replicas the pipeline has.  [default: 1]",
)
@click.option(
    "--zero",
    type=click.IntRange(0, 3),
    help="Of a table of actions: what these replicas shard.  [default: 0]",
)
@click.option(
    "--comms", is_flag=True, help="Write a table with the communication that torch's runtime runs."
)
@click.option("--json", "as_json", is_flag=True, help="A last line as JSON.")
@click.pass_context
def convert(
    ctx: click.Context,
    source: str,
    target: str,
    replicas: int | None,
    zero: int | None,
    comms: bool,
    as_json: bool,
) -> None:
    """Write a strategy in another form, by the suffixes of SOURCE and TARGET.

    SOURCE is a table of actions of torch.distributed.pipelining (.csv), a strategy or a schedule
    file of the published system (.json), or a Python file that defines strategy(). TARGET is a
    strategy (.json), or a table of actions (.csv), which holds its orders alone: what it leaves out
    is told.
    """
    from piper_dynamo.look.target import Misuse

    kinds = Path(source).suffix, Path(target).suffix
    if kinds[0] != ".csv" and (replicas is not None or zero is not None):
        raise Misuse("--replicas and --zero are for tables of actions, which say nothing of them")
    if kinds[1] != ".csv" and comms:
        raise Misuse("--comms is about tables of actions: name the target *.csv")
    strategy = _read(Path(source), replicas or 1, zero or 0)
    text, left_out = _written(strategy, kinds[1], target, comms=comms)
    try:
        Path(target).write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise Misuse(f"{target} cannot be written: {error}") from error
    click.echo(f"wrote {target}")
    for one in left_out:
        click.echo(f"left out, since tables of actions have no place for it: {one}")
    if as_json:
        show_json(ctx, is_fine=True, path=target, left_out=left_out)


def _read(source: Path, replicas: int, zero: int) -> "Strategy":
    from piper_dynamo.look.target import Misuse, load_strategy
    from piper_dynamo.schedules import from_csv
    from piper_dynamo.strategies import from_orders

    if source.suffix != ".csv":
        return load_strategy(source)
    if not source.exists():
        raise Misuse(f"there is no file {source}")
    return from_orders(from_csv(source), replicas=replicas, zero=zero)


def _written(strategy: "Strategy", kind: str, target: str, *, comms: bool) -> tuple[str, list[str]]:
    """The text, and what of the strategy is not in it."""
    from piper_dynamo.look.target import Misuse
    from piper_dynamo.schedules import to_csv
    from piper_dynamo.strategy import Order, Place, Split

    if kind == ".json":
        return strategy.to_json(), []
    if kind != ".csv":
        raise Misuse(f"{target} names no form that strategies are written in: use .json or .csv")
    orders = strategy.of(Order)
    if not orders:
        raise Misuse("the strategy has no orders, of which a table of actions is made")
    first = {one.filter.tags.get("PP"): min(one.devices) for one in strategy.of(Place)}

    def rank(order: Any) -> int:
        return first.get(order.groups[0][0].tags.get("PP"), 0)

    rest: list[Any] = [d for d in strategy.directives if not isinstance(d, Split | Place | Order)]
    shared = [place for place in strategy.of(Place) if len(place.devices) > 1]
    settings = [
        f"{name}={value!r}"
        for name in ("mesh", "loss", "regions")
        if (value := getattr(strategy, name)) is not None
    ]
    return to_csv(sorted(orders, key=rank), comms=comms), [
        *map(repr, [*rest, *shared]),
        *settings,
    ]
