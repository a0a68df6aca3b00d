"""The order in which TensorFlow's executor runs a graph by itself.

Used to predict what the *plain* step takes, and to know the order in which
the plain step sums gradients.  The lowered step leaves the executor no choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

ONE_BY_ONE = "SINGLE_THREADED_EXECUTOR"
"""TensorFlow's name for the executor that runs a function's operations in turn."""

# Kernels that the executor runs at once, on the thread that made them ready
# (OpKernel::IsExpensive returns false).
INEXPENSIVE = frozenset(
    [
        "Const",
        "Identity",
        "IdentityN",
        "NoOp",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "Shape",
        "ShapeN",
        "Size",
        "Rank",
        "StopGradient",
        "PreventGradient",
        "ReadVariableOp",
        "VarHandleOp",
        "Placeholder",
        "Switch",
        "Merge",
        "Enter",
        "Exit",
        "NextIteration",
        "LoopCond",
        "Snapshot",
    ]
)

# Kernels that work on a thread of their own: what they make ready is queued when they are
# done, at the back, behind whatever waits for none of it.
_ASYNCHRONOUS = frozenset(["IteratorGetNext"])


def execution_order(types: Sequence[str], producers: Sequence[Sequence[int]]) -> list[int]:
    """Order of execution by one thread.

    What an operation makes ready runs next: inexpensive operations and the
    last expensive one on the spot, the other expensive ones are queued at the
    front of the thread pool's queue (tensorflow/core/common_runtime/executor,
    ScheduleReady, on one Eigen worker).

    Args:
      types: operation type of each node.
      producers: for each node, the nodes it waits for (repeated if read twice).
    """
    consumers: list[list[int]] = [[] for _ in types]
    for node, sources in enumerate(producers):
        for source in sources:
            consumers[source].append(node)
    waiting = [len(sources) for sources in producers]
    order: list[int] = []
    queue: deque[int] = deque()
    inline: deque[int] = deque()

    def schedule(ready: Sequence[int]) -> None:
        expensive: int | None = None
        for node in ready:
            if types[node] in INEXPENSIVE:
                inline.append(node)
                continue
            if expensive is not None:
                queue.appendleft(expensive)
            expensive = node
        if expensive is not None:
            if inline:
                queue.appendleft(expensive)
            else:
                inline.append(expensive)

    schedule([node for node, count in enumerate(waiting) if count == 0])
    while inline or queue:
        if not inline:
            inline.append(queue.popleft())
        node = inline.popleft()
        order.append(node)
        ready = []
        for consumer in consumers[node]:
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                ready.append(consumer)
        if types[node] in _ASYNCHRONOUS:
            queue.extend(ready)
        else:
            schedule(ready)
    return order
