"""Sound: files, and features of waveforms."""
