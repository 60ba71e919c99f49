"""Goals of the holes in a text, and tactics tried on them."""
