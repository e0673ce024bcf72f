"""Tables as text: columns as wide as their widest cell, numbers at the right."""

from collections.abc import Collection, Sequence


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str] = ()
) -> list[str]:
    """The lines of a table, its heads first.

    Args:
        heads: Of the columns.
        rows: A cell per head each.
        left: Heads of the columns that are text, which begin at the left.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for cells in (heads, *rows):
        padded = [
            cell.ljust(width) if head in left else cell.rjust(width)
            for head, cell, width in zip(heads, cells, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
