"""remat: train neural networks that do not fit in memory."""
