"""Models and text that can be had by name."""
