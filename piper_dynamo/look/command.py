"""How the commands that look at things fail, and tell machines what they found.

Exit codes: 0 fine, 1 what is looked at is refused (or differs, or has no such task), 2 the command
was asked wrongly.
"""

import json
from typing import Any

import click

from piper_dynamo.errors import PiperError

REFUSED, WRONG = 1, 2


class Command(click.Command):
    """Shows a PiperError as its text, or as the last line where that is to be JSON."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except PiperError as error:
            from piper_dynamo.look.target import Misuse

            click.echo(f"piper: {error}", err=True)
            code = WRONG if isinstance(error, Misuse) else REFUSED
            if ctx.params.get("as_json"):
                show_json(ctx, is_fine=False, error=type(error).__name__, message=str(error))
            ctx.exit(code)


def show_json(ctx: click.Context, *, is_fine: bool, **values: Any) -> None:
    """The machine-readable last line."""
    found = {"command": ctx.info_name, "ok": is_fine, **values}
    click.echo(json.dumps(found, default=str, allow_nan=False))
