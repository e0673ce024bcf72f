"""See the project's docs/how-it-works.md for what lives here."""

if __name__ != "piper_dynamo.runtime":
    raise ImportError(
        f"this package is piper_dynamo.runtime, not {__name__!r}; import it by that name"
    )
