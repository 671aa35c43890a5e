"""How ranks find out that their calls differ, or that one of them is missing."""
