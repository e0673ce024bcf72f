"""Schedules."""
from piper_dynamo.strategy import Order


def gpipe(placement, num_microbatches):
    """GPipe."""
    by = {}
    for s, d in placement.items():
        by.setdefault(tuple(d), []).append(s)
    m = range(num_microbatches)
    return [
        Order([{"PP": s, "MB": k, "PASS": "F"} for s in ss for k in m] + [{"PP": s, "MB": k, "PASS": "B"} for s in reversed(ss) for k in m])
        for ss in by.values()
    ]


def one_f_one_b(placement, num_microbatches):
    """1F1B."""
    p, m, out = len(placement), num_microbatches, []
    for r in range(p):
        f = min(m, p - r)
        o = [("F", k) for k in range(f)]
        for k in range(m):
            o.append(("B", k))
            if f < m:
                o.append(("F", f))
                f += 1
        out.append(Order([{"PP": r, "MB": k, "PASS": a} for a, k in o]))
    return out
