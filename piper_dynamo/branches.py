"""Branches of forward on a batch size: Dynamo takes the side of the whole batch.

Signature: Dynamo's graph, the sizes of a microbatch -> nothing, or a refusal.
"""

from collections.abc import Mapping

from torch import fx

from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.errors import PiperCaptureError, format_error


def refuse_other_sides(
    gm: fx.GraphModule, batch_dims: Mapping[int, int], num_microbatches: int
) -> None:
    """A microbatch would take the other side of a branch than the whole batch, which was traced.

    What torch itself takes for granted of sizes below two is not seen: `len(x) > 1` of one row.

    Args:
        gm: Dynamo's graph.
        batch_dims: The dim along which each data argument is split, by position.
        num_microbatches: Into how many slices.

    Raises:
        PiperCaptureError: Tells the lines of such branches.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    dims = {placeholders[position]: dim for position, dim in batch_dims.items()}
    found = dynamo.other_branches(dims, num_microbatches)
    if found:
        raise PiperCaptureError(
            format_error(
                "a microbatch would take another branch than the whole batch",
                {f"branch {k + 1}": line for k, line in enumerate(found)},
                hint="choose by torch.where, or by an argument that the caller decides; "
                "fewer microbatches may be on the same side",
            )
        )
