"""Images: decoded, resized, normalized, augmented."""
