"""What devices cost: recorded operation tables and device specifications."""
