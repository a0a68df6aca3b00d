"""What the experiments' pictures have in common: readable without colours, too."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

# Okabe and Ito's palette; yellow is left out, as it is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = "os^Dv<>P*XphH"


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour, a marker and a label for each line of a picture.

    Lines that share a colour, where there are more than colours, differ in their dashes.
    """
    dashes = itertools.chain.from_iterable(
        itertools.repeat(dash, len(COLOURS)) for dash in ("-", "--", ":")
    )
    looks = zip(names, itertools.cycle(COLOURS), itertools.cycle(_MARKERS), dashes, strict=False)
    return {
        name: {"label": name, "color": colour, "marker": marker, "linestyle": dash, "markersize": 4}
        for name, colour, marker, dash in looks
    }
