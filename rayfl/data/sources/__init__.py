"""Where samples come from: data sets by name, downloads, and users' own files and functions."""
