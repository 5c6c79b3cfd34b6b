"""Right implementations in many styles, as a stranger would write them."""
