"""What is wrong with placements, with halves of backwards and with orders, told at once.

Signature: the DAG over the whole batch -> the same DAG, placed; or one error of all of them.
"""

from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir.graph import Dag
from piper_dynamo.passes.order import Halves, Order
from piper_dynamo.passes.place import Place


class PlaceOrRefuse:
    """Place all tasks; where that or the halves are refused, say what is wrong with orders, too.

    Orders are kept at the end only, when a plan is known to be possible otherwise: they are looked
    at before where it is not, so that nobody mends one fault after the other.

    rewrite:   as `Place`
    requires:  as `Place`; no backward is ordered both whole and split
    keeps:     the graph
    """

    name = Place.name

    def __init__(self, place: Place, halves: Halves, order: Order) -> None:
        self._place, self._halves, self._order = place, halves, order

    def __call__(self, dag: Dag) -> None:
        """Rewrite `dag` in place.

        Raises:
            PiperPlanError: Every fault of the three.
        """
        refused = [self._halves.refused] if self._halves.refused is not None else []
        try:
            self._place(dag)
        except PiperPlanError as error:
            refused.append(error)
        if not refused:
            return
        try:
            self._order(dag)
        except PiperPlanError as error:
            refused.append(error)
        raise PiperPlanError("\n".join(map(str, refused))) from None
