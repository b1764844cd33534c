"""Recipes that make GGUF models: synthetic (`synth`), and up-cycled from a real dense model (`upcycle`)."""
