"""See the project's docs/how-it-works.md for what lives here."""

if __name__ != "piper_dynamo.lowering":
    raise ImportError(
        f"this package is piper_dynamo.lowering, not {__name__!r}; import it by that name"
    )
