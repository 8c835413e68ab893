"""Pretrained transformers with adapters: a frozen base that every client shares, and small trained matrices in it."""
