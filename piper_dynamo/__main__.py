"""`python -m piper_dynamo` is the command `piper`, also from a checkout that is not installed."""

from piper_dynamo.cli import main

if __name__ == "__main__":
    main()
