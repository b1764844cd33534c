"""The pieces of the shipped model `spice-tiny`; `models/train_tiny.py` is their command line."""
