"""The work: pulls, pins, heals, and the loop that does them."""
