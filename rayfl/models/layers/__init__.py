"""Layers in forms that PyTorch lacks and clients need: stacked, with drawn masks, of low rank."""
