"""Big models whose routing behaves like a real one's: `python models/synth.py --like NAME -o FILE`."""

from models.planted.real import REAL, Real, Recipe
from models.planted.write import make_like, parse_size

__all__ = ["REAL", "Real", "Recipe", "make_like", "parse_size"]
