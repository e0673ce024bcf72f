"""See the project's docs/how-it-works.md for what lives here."""

if __name__ != "piper_dynamo.passes":
    raise ImportError(
        f"this package is piper_dynamo.passes, not {__name__!r}; import it by that name"
    )
