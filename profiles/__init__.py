"""What devices cost: recorded operation tables and device specifications.

``signature`` names an operation, ``table`` holds measured costs by signature,
``devices`` what devices can do at best, ``roofline`` computes a cost from that,
and ``price`` chooses among them.  Nothing here imports TensorFlow; measuring is
in ``remat.profile``.
"""
