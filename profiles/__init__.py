"""What devices cost: recorded operation tables and device specifications.

``signature`` names an operation, ``table`` holds measured costs by signature,
``devices`` what devices can do at best, ``roofline`` computes a cost from that,
and ``price`` chooses among them.  ``NAME.csv`` is a recorded table, and NAME one
for ``profile=``; ``amd-epyc-2-cores`` is the machine of this project's figures,
which other work slowed at times (the column ``spread`` shows it).  Nothing here
imports TensorFlow; measuring is in ``remat.profile``.
"""
